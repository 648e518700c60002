"""The ranks of the tests themselves: a test that is given up must not mislead the next, nor touch a foreign process."""

import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

import psutil
import pytest
from forked import Forge, ForkedRun

CODE = 3


def leave(seconds: float) -> None:
    """In a rank."""
    time.sleep(seconds)
    os._exit(CODE)


class GivenUpError(Exception):
    """What pytest-timeout does to a test, at any moment."""


@pytest.fixture
def given_up_in_the_midst() -> Iterator[None]:
    """While an answer of the forge is waited for."""
    ticks: list[bool] = []

    def give_up(number: int, frame: FrameType) -> None:
        ticks.append(frame.f_code.co_name == "ask" and "pids" in frame.f_locals["request"])
        if ticks[-3:] == [True] * 3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise GivenUpError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("given_up_in_the_midst")
def test_a_wait_that_is_given_up_leaves_no_ranks_and_no_answer(forge: Forge) -> None:
    """Its codes once went to the next start, which took them for process ids, and gave process 1 a memory limit."""
    hung = ours(forge, 600)
    ranks = [psutil.Process(pid) for pid in hung.pids]
    with pytest.raises(GivenUpError):
        hung.wait()
    assert hung.pids == []
    assert not psutil.wait_procs(ranks, timeout=300)[1]

    assert ours(forge, 0).wait() == [CODE, CODE]


def test_ranks_that_take_too_long_are_killed(forge: Forge) -> None:
    run = ours(forge, 600)
    assert run.wait(0.5) == [-signal.SIGKILL, -signal.SIGKILL]


def ours(forge: Forge, seconds: float) -> ForkedRun:
    """A start of two ranks that leave by themselves after so many seconds; they are the forge's."""
    run = forge.start_work(2, "test_forked:leave", seconds)
    assert [psutil.Process(pid).ppid() for pid in run.pids] == [forge.process.pid] * 2
    return run
