"""What a launcher tells a rank is checked before anything uses it."""

import os
import socket
from pathlib import Path

import pytest

from pipeline.base.errors import OneRankError, UserError
from pipeline.process import launcher
from pipeline.process.launcher import check_environment, free_port, key_of_start, share_cores

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WHOLE, "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_environment() == 1
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    assert check_environment() == 2


def test_what_does_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    # Each rank says these itself: with a RANK left in the environment there is no rank 0.
    with pytest.raises(
        OneRankError, match=r"RANK = 0 is set .* but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.*unset RANK"
    ):
        check_environment()


@pytest.mark.parametrize("agent_has_store", [True, False])
def test_starts_differ_in_the_store_of_an_agent_alone(agent_has_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of two hosts had different counts, and their ranks waited for each other in vain."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent_has_store))
    starts = set()
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        starts.add(key_of_start("stop"))
    assert len(starts) == 1 + agent_has_store


def test_a_free_port_is_none_that_linux_assigns(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert {free_port() for _ in range(20)} <= set(range(20_000, min(29_000, lowest)))
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", free_port()))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setattr(launcher, "_PORTS", range(port, port + 1))
        with pytest.raises(UserError, match=rf"no port from {port} to {port} is free"):
            free_port()


@pytest.mark.parametrize(
    ("ranks", "given", "expected"), [(1, None, None), (2, None, "4"), (16, None, "1"), (2, "3", "3")]
)
def test_ranks_of_a_host_share_its_cores(
    ranks: int, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    share_cores()
    assert os.environ.get("OMP_NUM_THREADS") == expected
