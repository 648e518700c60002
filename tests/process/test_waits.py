"""What a process says of work that lasts."""

import io
import sys
import time

import pytest
from polling import until

from pipeline.process import waits
from pipeline.process.waits import Work, worked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_that_lasts_is_said_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(waits, "_LINE_SECONDS", 0.2)
    monkeypatch.setattr(waits, "_board", waits._Board(said.append))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Work("drawing"):
        pass
    with Work("reading val", 2000) as work:
        work.advance(500)
        until(lambda: any("500 of 2,000 images" in line for line in said))
        work.note = "loss 0.5"
        work.advance(9999)
        until(lambda: any("2,000 of 2,000 images, loss 0.5" in line for line in said))
    assert all(line.startswith("reading val") for line in said), "the first ended at once"
    lines = len(said)
    with Work("drawing"):
        until(lambda: len(said) > lines)
        time.sleep(0.5)
    assert len([line for line in said if line.startswith("drawing")]) == 1, "nothing is counted"


def test_on_a_terminal_work_that_is_counted_is_a_bar_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waits, "_board", waits._Board())
    for number in worked(range(3), "scoring", 3):
        time.sleep(0.15)
        assert number < 1 or "scoring" in shown.getvalue()
    assert "3/3" in shown.getvalue()
    assert not shown.getvalue().endswith("3/3\n")
    shown.truncate(0)
    monkeypatch.setenv("RANK", "1")
    assert list(worked(range(3), "scoring", 3)) == [0, 1, 2]
    assert not shown.getvalue().strip("\0")
