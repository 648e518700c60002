"""Hangs end a run and are named; waits that may last are none."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.lifecycle.hosts import to_blame
from pipeline.lifecycle.run_folder import forget_last_start, last_end_in_words, read_failures
from pipeline.monitor.watchdog import diagnosis

ROOT = Path(__file__).resolve().parents[2]


def test_who_is_waited_for() -> None:
    folder = Path("hang")
    waits, reads = (
        "step of step 7 (waits for other ranks) for 60 s, a, process 1",
        "data of step 7 for 60 s, b, process 2",
    )
    of_reader = diagnosis({0: waits, 1: reads}, ["a", "b"], folder)
    assert of_reader[0] == f"hang: rank 1 on b has been in {reads}; stack in {folder / 'rank-00001.txt'}"
    assert "1 rank wait" in of_reader[1]
    assert "rank 1 on b does not respond" in diagnosis({0: waits}, ["a", "b"], folder)[0]
    assert len(diagnosis({0: waits, 1: waits}, ["a", "b"], folder)) == 2


RANK = """
    import json, os, sys, time
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from pipeline.process import waits
    from pipeline.lifecycle.run_folder import Failure, RunFolder, Status
    from pipeline.monitor import watchdog as module
    module._REPORT_SECONDS, module._SPEAK_SECONDS = 2.0, 1.0
    waits.NOTICE_SECONDS = 0.2
    out, rank, wait_seconds = Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    folder = RunFolder(out, rank)
    if rank == 0:
        assert folder.lock() is None
        folder.say_status(Status("running", 12, -1, ""))
    folder.ours = True
    def record(line, lost_others):  # As Stop does.
        folder.say_failure(line, lost_others)
        folder.say_status(Status("failed", 12, 1, line))
    watchdog = module.Watchdog(out / "hang", rank, ["a", "b", "c"], minutes=1.5 / 60, record=record)
    def read_from_a_dead_disk(seconds):
        time.sleep(seconds)
    watchdog.at(12, "step")
    print("started", flush=True)
    sys.stdin.readline()
    watchdog.at(13, "step")
    if rank == 1 and wait_seconds:
        watchdog.at(13, "data")
        with waits.waiting("s3://bucket/x", wait_seconds, "data.retry_minutes"):
            read_from_a_dead_disk(4 if wait_seconds > 4 else 30)
        os._exit(0)
    time.sleep(4.5 if wait_seconds > 4 else 30)
    os._exit(0)
"""
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts three ranks in a step. wait: if given, the limit of an announced wait, in which rank 1 reads data, for 4 s or more."""
    processes: list[subprocess.Popen[str]] = []

    def start(wait: float = 0) -> list[subprocess.Popen[str]]:
        arguments = [sys.executable, "-c", textwrap.dedent(RANK), str(ROOT), str(tmp_path)]
        for rank in range(3):
            processes.append(
                subprocess.Popen([*arguments, str(rank), str(wait)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, start_new_session=True)
            )  # fmt: skip
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_hang_names_rank_host_and_line_and_leaves_a_record(tmp_path: Path, start: Start) -> None:
    ranks, begin = start(wait=0.5), time.monotonic()
    errors = [process.communicate(timeout=30)[1] for process in ranks]
    assert time.monotonic() - begin < 20, "within the configured time, not at the end of the sleep"
    assert [process.returncode for process in ranks] == [1, 1, 1]
    told = "".join(errors)
    assert (
        "rank 1 on b has been in data of step 13, waiting for s3://bucket/x, at most 0 s (data.retry_minutes), for"
        in told
    )
    assert "rank 0 on a has been in" not in told
    assert "read_from_a_dead_disk" in (tmp_path / "hang" / "rank-00001.txt").read_text()
    failures = read_failures(tmp_path)
    assert [failures[rank].lost_others for rank in range(3)] == [True, False, True]
    assert to_blame({"a": 1, "b": 1, "c": 1}, failures) == ["b"]
    assert last_end_in_words(tmp_path).startswith(
        "failed at step 12: hang: rank 1 on b has been in data of step 13, waiting for"
    )


@pytest.mark.slow
def test_a_rank_that_stands_still_entirely_is_named(tmp_path: Path, start: Start) -> None:
    ranks = start()
    os.kill(ranks[0].pid, signal.SIGSTOP)
    try:
        errors = [process.communicate(timeout=30)[1] for process in ranks[1:]]
    finally:
        ranks[0].kill()
        ranks[0].communicate()
    assert "rank 0 on a does not respond" in "".join(errors)
    assert to_blame({"a": 1, "b": 2}, read_failures(tmp_path)) == ["a"]
    said = "failed at step 12: hang: rank 0 on a does not respond"
    assert last_end_in_words(tmp_path).startswith(said), "rank 0 could not write its status"
    forget_last_start(tmp_path)
    assert last_end_in_words(tmp_path).startswith(said)


@pytest.mark.slow
def test_a_wait_that_may_last_is_no_hang_of_any_rank(tmp_path: Path, start: Start) -> None:
    """Rank 1 waits for a store for 4 s, the others for rank 1; they may do nothing for 1.5 s."""
    ranks = start(wait=60)
    errors = [process.communicate(timeout=30)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], errors
    assert "rank 1 on b waits for s3://bucket/x, at most 60 s (data.retry_minutes)\n" in errors[0]
    assert errors[2] == "", "rank 0 speaks"
    assert not list((tmp_path / "hang").glob("rank-*"))
