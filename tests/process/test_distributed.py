"""Ranks that start meet, or say for which rank they wait."""

import contextlib
import threading

import pytest
import torch

from pipeline.base.errors import CrashError
from pipeline.process import waits
from pipeline.process.distributed import Ranks, all_started
from pipeline.process.launcher import free_port


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(waits, "_board", waits._Board())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def rank(number: int, minutes: float = 1.0) -> contextlib.AbstractContextManager[None]:
    """Of three, on hosts of their own."""
    return all_started(Ranks(number, 0, 3, torch.device("cpu")), minutes)


def test_all_enter_together_and_the_missing_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    entered: list[int] = []
    may_leave = threading.Event()

    def start(number: int) -> None:
        with rank(number):
            entered.append(number)
            may_leave.wait(20)  # As rank 0, which hosts the store, goes on to train.

    threads = [threading.Thread(target=start, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(0.7)
    assert not entered
    assert capsys.readouterr().err.count("waiting for rank 2 to start, at most 60 s (engine.timeout_minutes)\n") >= 1
    with rank(2):
        for _ in range(100):
            if len(entered) == 2:
                break
            threads[0].join(0.1)
        assert sorted(entered) == [0, 1]
    may_leave.set()
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize(("alone", "missing"), [(0, "ranks 1, 2 to start"), (1, "rank 0 to start, on 127.0.0.1:")])
def test_a_rank_that_never_starts_ends_the_wait(alone: int, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CrashError, match=f"waited in vain for {missing}.*at most 0 s") as error, rank(alone, 0.5 / 60):
        pass
    assert error.value.on_one_rank == (alone == 1), "rank 0 is not there to say it"
    assert f"waiting for {missing}" in capsys.readouterr().err
