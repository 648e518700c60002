"""The measurement of a training step: both contestants do the same work. Forked, as ranks are: a start takes a second instead of five."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forge
from tiny import make_dataset

ROOT = Path(__file__).parents[3]


def test_a_step_beside_a_bare_loop(forge: Forge, tmp_path: Path) -> None:
    small = [
        f"json={tmp_path}/found.json",
        "model=ViT-Ti/16",
        "image_size=32",
        "batch=4",
        "steps=2",
        "rounds=3",
        "peak_tflops=0.1",
    ]
    said = forge.start_work(1, "forked:command", ["launch/bench.py", "train", *small]).finish()
    losses = re.search(r"loss of the first step: pipeline (\S+), bare PyTorch (\S+)\n", said)
    assert losses
    assert losses[1] == losses[2]
    assert said.count("round ") == 3
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["pipeline", "bare PyTorch", "overhead"]
    assert found["model"] == "ViT-Ti/16 at 32 px, batch 4, fp32"
    assert re.search(
        r"the pipeline's step takes [+-]\d+\.\d%, [+-]\d+\.\d% in CPU seconds \(median of 3 rounds\)\n$", said
    )


def test_a_short_run_from_shards(forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the line is from the run's own metrics; nothing of the run stays."""
    data = make_dataset(tmp_path / "data", {"train": 40, "val": 5})
    (tmp_path / "scratch").mkdir()
    small = ["model=ViT-Ti/8", "image_size=16", "batch=4", "steps=2", "rounds=2", "peak_tflops=0.1", f"data={data}"]
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    said = forge.start_work(1, "forked:command", ["launch/bench.py", "train", *small]).finish()
    number = r"[\d.,]+"
    line = (rf"median of 2 rounds of 2 steps: {number} images/s, MFU {number}%, data wait {number}% of the time, "
            rf"peak memory {number} GiB, stalled {number} s by a checkpoint\n$")  # fmt: skip
    assert re.search(line, said), said
    assert said.count("step 6: val") == 1, "one evaluation"
    assert not list((tmp_path / "scratch").glob("*/bench"))


def test_mistakes() -> None:
    command = [sys.executable, "launch/bench.py", "train"]
    for mistake, said in {
        "rounds=0": "the command line: rounds = 0 must be at least 1.",
        "precision=bf16 zero_stage=0": "precision = bf16 with zero_stage = 0 takes a wrong first Adam step in DeepSpeed. Use "
        "zero_stage=1 or precision=fp32.",
    }.items():
        done = subprocess.run([*command, *mistake.split()], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
