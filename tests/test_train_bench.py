"""The measurement of a training step: both contestants do the same work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.ranks


def test_a_step_beside_a_bare_loop() -> None:
    small = ["model=ViT-Ti/16", "image_size=32", "batch=4", "steps=2", "rounds=3", "peak_tflops=0.1"]
    command = [sys.executable, "launch/bench.py", "train", *small]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = re.search(r"loss of the first step: pipeline (\S+), bare PyTorch (\S+)\n", done.stdout)
    assert losses
    assert losses[1] == losses[2]
    assert done.stdout.count("round ") == 3
    assert re.search(r"the pipeline's step takes [+-]\d+\.\d% \(median of 3 rounds\)\n$", done.stdout)


def test_mistakes() -> None:
    command = [sys.executable, "launch/bench.py", "train", "rounds=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: rounds = 0 must be at least 1.\n")
