"""The demo as a user runs it, on fewer pictures and in fewer steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_demo_goes_the_whole_way(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "launch/demo.py", f"out={out}", "num_per_class=40", "finetune_epochs=6"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1700, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    (score,) = (out / "finetune").rglob("evaluate/**/scores.json")
    assert json.loads(score.read_text())["top1"] >= 0.35  # Of ten classes, after 66 steps.
    assert "5-shot" in done.stdout
    assert "resumed from" in (out / "pretrain" / "log.txt").read_text(), "it was killed and went on"
