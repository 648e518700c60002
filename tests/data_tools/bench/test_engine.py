"""The measurement of a training step: both contestants do the same work. Forked, as ranks are: a start takes a second
instead of five.
"""

import re

from forked import Forge


def test_a_step_beside_a_bare_loop(forge: Forge) -> None:
    small = ["ViT-Ti/16", "--pixels", "32", "--batch", "4", "--steps", "2", "--rounds", "3"]
    said = forge.start_work(1, "forked:command", ["tests/measure/measure_engine.py", *small]).finish()
    losses = re.search(r"pipeline (\d+\.\d+), bare PyTorch (\d+\.\d+)\n", said)
    assert losses[1] == losses[2]
    assert said.count("round ") == 3
