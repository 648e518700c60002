"""Time in which a process stood still does not count."""

import os
import pickle
import threading

import pytest

from pipeline.process import running_time as module
from pipeline.process.running_time import RunningClock, running_time
from pipeline.process.waits import Wait


def test_gaps_do_not_count() -> None:
    """A slow machine's do: they are short."""
    now = 100.0
    clock = RunningClock(lambda: now)
    begin = clock.seconds()
    for gap, counted in ((1.0, 1.0), (4.0, 5.0), (3600.0, 5.0), (1.0, 6.0), (6.0, 6.0), (0.0, 6.0)):
        now += gap
        assert clock.seconds() - begin == counted


def test_a_wait_that_was_suspended_has_its_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of ranks for each other at the start: afterwards, those that are missing still need theirs."""
    now = 100.0
    monkeypatch.setattr(module, "_clock", RunningClock(lambda: now))
    monkeypatch.setattr(module, "_looker", threading.current_thread())
    wait = Wait("rank 1 to start", 600.0)
    now += 3600.0
    assert wait.left == 600.0
    now += 4.0
    assert wait.left == 596.0


def test_a_process_that_is_forked_after_a_suspension_goes_on_with_its_parents_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_clock", RunningClock(left_out=3600))
    begin = running_time()
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, pickle.dumps(running_time() - begin))
        os._exit(0)
    os.waitpid(child, 0)
    assert 0 <= pickle.loads(os.read(reading, 1000)) < 3000
    os.close(reading)
    os.close(writing)
