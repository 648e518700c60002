"""Ranks that start meet, or say for which rank they wait."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from polling import until

from pipeline.base.errors import CrashError, OneRankError, UserError
from pipeline.process import distributed, waits
from pipeline.process.distributed import Ranks, all_started, use_exact_arithmetic
from pipeline.process.launcher import free_port

Forward = Callable[[float], None]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(0.01)))
    monkeypatch.setattr(distributed, "START_MINUTES", 60.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def rank(number: int) -> contextlib.AbstractContextManager[None]:
    """Of three, on hosts of their own."""
    return all_started(Ranks(number, 0, 3, torch.device("cpu")))


def until_said(missing: str, num_ranks: int, forward: Forward, capsys: pytest.CaptureFixture[str]) -> None:
    """Until `num_ranks` ranks have waited for so long that it is said for whom."""
    forward(400)
    until(lambda: [f"{wait}\n".startswith(missing) for wait in waits.in_progress()] == [True] * num_ranks)
    forward(200)
    heard: list[str] = []

    def is_said() -> bool:
        heard.append(capsys.readouterr().err)
        return f"waiting for {missing}" in "".join(heard)

    until(is_said)


def test_all_enter_together_and_the_missing_one_is_named(
    notice_after_600: Forward, capsys: pytest.CaptureFixture[str]
) -> None:
    entered: list[int] = []
    may_leave = threading.Event()

    def start(number: int) -> None:
        with rank(number):
            entered.append(number)
            may_leave.wait()  # As rank 0, which hosts the store, goes on to train.

    threads = [threading.Thread(target=start, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    until_said("rank 2 to start, at most 60 min\n", 2, notice_after_600, capsys)
    assert not entered
    with rank(2):
        until(lambda: sorted(entered) == [0, 1])
    may_leave.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("alone", "missing"), [(0, "ranks 1, 2 to start"), (1, "rank 0 to start, on 127.0.0.1:")])
def test_a_rank_that_never_starts_ends_the_wait(
    alone: int, missing: str, notice_after_600: Forward, capsys: pytest.CaptureFixture[str]
) -> None:
    def let_time_pass() -> None:
        until_said(missing, 1, notice_after_600, capsys)
        notice_after_600(3600)

    clock = threading.Thread(target=let_time_pass)
    clock.start()
    with pytest.raises(CrashError, match=f"waited in vain for {missing}.*at most 60 min") as error, rank(alone):
        pass
    clock.join()
    assert error.value.on_one_rank == (alone == 1), "rank 0 is not there to say it"


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        monkeypatch.setenv("MASTER_PORT", port := str(listener.getsockname()[1]))
        with pytest.raises(UserError, match=rf"MASTER_PORT = {port} is in use on this host.*--master_port"), rank(0):
            pass


def test_what_rank_0_finds_for_all_it_says_alone() -> None:
    def read() -> None:
        raise OneRankError("access denied")

    with pytest.raises(UserError, match=r"^access denied$") as error:
        Ranks(0, 0, 1, torch.device("cpu")).on_main(read)
    assert not error.value.on_one_rank, "every rank would print it"
    with pytest.raises(OneRankError, match="access denied"):
        Ranks(1, 0, 1, torch.device("cpu")).on_all(read)


@pytest.mark.parametrize(("given", "used"), [(None, ":4096:8"), (":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")])
def test_a_gpu_repeats_its_bits_also_in_attention(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With warn_only=True torch would only warn that the gradients of attention differ from time to time."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    try:
        use_exact_arithmetic(torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ[name] == used
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.allow_tf32 = torch.utils.deterministic.fill_uninitialized_memory = True


def test_numbers_of_one_rank_by_name() -> None:
    found = Ranks(0, 0, 1, torch.device("cpu")).gather_numbers({"a": [0.1, True], "none": [], "b": [float("inf")]})
    assert found == {"a": [[0.1, 1.0]], "none": [[]], "b": [[float("inf")]]}
