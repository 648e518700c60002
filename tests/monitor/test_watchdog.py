"""Hangs end a run and are named; waits that may last are none."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from polling import until

from pipeline.cluster.status_files import RunFolder, Status, last_end_in_words, read_failures
from pipeline.monitor import watchdog
from pipeline.monitor.watchdog import diagnosis
from pipeline.process import waits

FORK = multiprocessing.get_context("fork")  # A rank that need not import what this process has imported.


def test_who_is_waited_for() -> None:
    folder = Path("hang")
    waits, reads = (
        "step of step 7 (waits for other ranks) for 60 s, a, process 1",
        "data of step 7 for 60 s, b, process 2",
    )
    of_reader = diagnosis({0: waits, 1: reads}, ["a", "b"], folder)
    assert "rank 1 on b" in of_reader[0]
    assert reads in of_reader[0]
    assert str(folder / "rank-00001.txt") in of_reader[0]
    assert "1 of 2 ranks" in of_reader[1]
    assert "rank 1 on b does not respond" in diagnosis({0: waits}, ["a", "b"], folder)[0]
    assert len(diagnosis({0: waits, 1: waits}, ["a", "b"], folder)) == 2


def test_a_report_that_is_just_being_written_is_none(tmp_path: Path) -> None:
    """The file is there before its line: a rank that waited for others was named, with an empty reason."""
    dog = watchdog.Watchdog(tmp_path, 0, ["a", "b"], minutes=0)  # Without a thread.
    dog._write("step of step 7 (waits for other ranks) for 60 s")
    for begun in ("", "step of step 7 (wai"):
        (tmp_path / "rank-00001.txt").write_text(begun)
        assert list(dog._read()) == [0]


def test_clocks_that_differ_by_hours_hide_no_report(tmp_path: Path) -> None:
    """All ranks were said not to respond, where the clock of the host that reads, or of the file server, was wrong."""
    waits, reads = "step of step 7 (waits for other ranks) for 60 s", "data of step 7 for 60 s"
    for rank in (0, 1):
        watchdog.Watchdog(tmp_path, rank, ["a", "b"], minutes=0)._write(waits)  # An earlier hang.
    dogs = [watchdog.Watchdog(tmp_path, rank, ["a", "b"], minutes=0) for rank in (0, 1)]
    dogs[1]._write(reads)
    assert list(dogs[0]._read()) == [1]
    dogs[0]._write(waits)
    now = time.time()
    for hours in (-5, 5):
        os.utime(tmp_path / "rank-00001.txt", (now, now + 3600 * hours))
        assert [report.startswith(reads) for report in dogs[0]._read().values()] == [False, True]


def read_from_a_dead_disk(seconds: float) -> None:
    time.sleep(seconds)


def _rank(out: Path, rank: int, wait_seconds: float, num_reports: int, is_ready: Event, go: Event) -> None:
    """A forked rank of three, in a step; ends with 0 unless its watchdog ends it."""
    sys.stderr = open(out / f"stderr-{rank}", "w", buffering=1)  # noqa: SIM115
    waits.say_with(None)
    waits.NOTICE_SECONDS = 0.2
    folder = RunFolder(out, rank)
    if rank == 0:
        assert folder.lock() is None
        folder.say_status(Status("running", 12, -1, ""))
    folder.ours = True

    def record(line: str, lost_others: bool) -> None:  # As Stop does.
        folder.say_failure(line, lost_others)
        folder.say_status(Status("failed", 12, 1, line))

    def reports() -> list[Path]:
        return [file for file in (out / "hang").glob("rank-*.txt") if "process" in file.read_text()]

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout == watchdog._REPORT_SECONDS:  # Not for so long, but until all are there that come, however late.
                until(lambda: len(reports()) == num_reports)
                return self.is_set()
            return super().wait(timeout)

    watchdog._REPORT_SECONDS, watchdog._SPEAK_SECONDS = 300.0, 0.0
    is_ready.set()
    go.wait()
    dog = watchdog.Watchdog(out / "hang", rank, ["a", "b", "c"], minutes=1.0 / 60, record=record)
    dog._over = Over()
    dog.at(12, "step")
    dog.at(13, "step")
    if rank == 0 and num_reports == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and wait_seconds:
        dog.at(13, "data")
        with waits.waiting("s3://bucket/x", wait_seconds, "data.retry_minutes"):
            read_from_a_dead_disk(3 if wait_seconds > 3 else 600)
            # Here, before its watchdog can say that the wait is over: the others, who began later, would have to end
            # within 1 s.
            os._exit(0)
    time.sleep(3 if wait_seconds > 3 else 600)
    os._exit(0)


Start = Callable[..., list[ForkProcess]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts three ranks in a step, which may do nothing for 1 s.

    wait: if given, the limit of an announced wait, in which rank 1 reads data, for 3 s or more. num_reports: of ranks
    that hang; of two, when rank 0 stands still.
    """
    processes: list[ForkProcess] = []

    def start(wait: float = 0, num_reports: int = 3) -> list[ForkProcess]:
        ready, go = ([FORK.Event() for _ in range(3)] for _ in range(2))
        for rank in range(3):
            processes.append(
                FORK.Process(target=_rank, args=(tmp_path, rank, wait, num_reports, ready[rank], go[rank]))
            )
            processes[rank].start()
        for is_ready in ready:
            assert is_ready.wait(300)
        for rank in (1, 0, 2):
            go[rank].set()
            if rank == 1 and wait > 1:  # The others know of it before they may take it for a hang.
                until(lambda: list(tmp_path.glob("hang/wait-00001.json")) or not processes[1].is_alive())
        return processes

    yield start
    for process in processes:
        process.kill()
        process.join()


def errors_of(tmp_path: Path, ranks: list[ForkProcess]) -> list[str]:
    """What ranks have said, once they have ended."""
    for process in ranks:
        process.join(300)  # Not at the end of the sleep.
    return [(tmp_path / f"stderr-{rank}").read_text() for rank in range(3)]


@pytest.mark.slow
def test_a_hang_names_rank_host_and_line_and_leaves_a_record(tmp_path: Path, start: Start) -> None:
    ranks = start(wait=0.5)
    errors = errors_of(tmp_path, ranks)
    assert [process.exitcode for process in ranks] == [1, 1, 1]
    told = "".join(errors)
    assert (
        "rank 1 on b has been in data of step 13, waiting for s3://bucket/x, at most 0.5 s (data.retry_minutes), for"
        in told
    )
    assert "rank 0 on a has been in" not in told
    assert "read_from_a_dead_disk" in (tmp_path / "hang" / "rank-00001.txt").read_text()
    failures = read_failures(tmp_path)
    assert [failures[rank].lost_others for rank in range(3)] == [True, False, True]
    assert last_end_in_words(tmp_path).startswith(
        "failed at step 12: hang: rank 1 on b has been in data of step 13, waiting for"
    )


@pytest.mark.slow
def test_a_rank_that_stands_still_entirely_is_named(tmp_path: Path, start: Start) -> None:
    ranks = start(num_reports=2)
    errors = errors_of(tmp_path, ranks[1:])
    ranks[0].kill()
    ranks[0].join()
    assert "rank 0 on a does not respond" in "".join(errors)
    assert 0 not in read_failures(tmp_path)
    said = "failed at step 12: hang: rank 0 on a does not respond"
    assert last_end_in_words(tmp_path).startswith(said), "rank 0 could not write its status"


@pytest.mark.slow
def test_a_wait_that_may_last_is_no_hang_of_any_rank(tmp_path: Path, start: Start) -> None:
    """Rank 1 waits for a store for 3 s, the others for rank 1; they may do nothing for 1 s."""
    ranks = start(wait=300)
    errors = errors_of(tmp_path, ranks)
    assert [process.exitcode for process in ranks] == [0, 0, 0], errors
    assert "rank 1 on b waits for s3://bucket/x, at most 5 min (data.retry_minutes)\n" in errors[0]
    assert errors[2] == "", "rank 0 speaks"
    assert not list((tmp_path / "hang").glob("rank-*"))
