"""What a person sees of a run, and what happens when nobody looks any more."""

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT

from pipeline.process import console
from pipeline.process.console import LineClock, progress_line

SPEED = ("images_per_second", "data_wait", "peak_memory_gib", "time_forward", "time_backward", "time_optimizer")


def test_a_launcher_that_died_does_not_end_the_run(tmp_path: Path) -> None:
    """Its end of the pipes is closed; what the run says is in log.txt all the same."""
    code = (
        "import sys; from pathlib import Path; from pipeline.process.console import Console\n"
        "console = Console(Path(sys.argv[1]), True)\n"
        "sys.stdin.read()\n"
        "for line in ('one', 'two'): console.say(line)\n"
        "print('three', file=sys.stderr, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log.txt")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    for pipe in (process.stdout, process.stderr, process.stdin):
        pipe.close()
    assert process.wait(300) == 0
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["one", "two"]


def test_lines_are_due_at_once_and_then_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    by_time, by_steps = LineClock(10.0), LineClock(0.0)
    due = []
    for now[0] in (100, 105, 109.9, 110, 119, 131, 140, 141):
        due.append((by_time.is_due(), by_steps.is_due()))
    assert [first for first, _ in due] == [True, False, False, True, False, True, False, True]
    assert [second for _, second in due] == [True] + [False] * 7


def test_a_line_does_not_show_a_speed_of_zero() -> None:
    metrics = dict.fromkeys((*SPEED, "loss", "lr", "grad_norm", "time_checkpoint", "skipped_steps"), 0.5)
    metrics |= {"bad_samples": 0, "storage_retries": 0, "images_per_second": 0.0231}
    assert "0.0231 img/s" in progress_line(1, 10, metrics, 8)
    assert "MFU" not in progress_line(1, 10, metrics, 8)
    assert "MFU 41.0%" in progress_line(1, 10, metrics | {"mfu": 0.41}, 8)
