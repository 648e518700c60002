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
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == ["pretrain_top1", "finetune_top1", "fewshot_top1", "images_per_second", "seconds"]
    assert summary["finetune_top1"] >= 0.35  # Of ten classes, after 66 steps.
    assert 0.15 < summary["fewshot_top1"] < 1
    assert "resumed from" in (out / "pretrain" / "log.txt").read_text(), "it was killed and went on"
    # The addresses of the tables of runs, at the end of both runs and of the demo.
    assert done.stdout.count(f"STORE={out / 'mlflow.db'}, then http://localhost:5000/#/experiments/1/runs?") == 3
