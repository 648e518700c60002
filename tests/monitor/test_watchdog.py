"""Hangs end a run and are named; waits that may last are none."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from polling import until

from pipeline.lifecycle.hosts import to_blame
from pipeline.lifecycle.run_folder import forget_last_start, last_end_in_words, read_failures
from pipeline.monitor import watchdog
from pipeline.monitor.watchdog import diagnosis
from pipeline.process.running_time import RunningClock

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


def test_a_process_that_was_stopped_itself_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-Z, or a scheduler that suspends jobs: what passed meanwhile does not count, what passes afterwards does."""
    now, ends = 0.0, []

    class Over:
        """Each wait takes the next of these seconds; after the last, the run is over."""

        def __init__(self, *seconds: float) -> None:
            self.seconds = iter(seconds)

        def wait(self, timeout: float) -> bool:
            nonlocal now
            passed = next(self.seconds, None)
            now += passed or 0
            return passed is None

    def end(step: int, phase: str, seconds: float) -> None:
        ends.append(seconds)

    monkeypatch.setattr(watchdog, "running_time", RunningClock(lambda: now).seconds)
    dog = watchdog.Watchdog(tmp_path, 0, ["a"], minutes=0)  # Without a thread.
    dog.seconds = 10
    monkeypatch.setattr(dog, "_end", end)
    for passing, expected in (
        ((4, 4), []),
        ((4, 700, 4), []),
        ((4, 4, 4), [12]),
        ((700, 4, 4, 4), [12]),
    ):
        dog.at(1, "step")
        monkeypatch.setattr(dog, "_over", Over(*passing))
        dog._watch()
        assert ends == expected
        ends.clear()


RANK = """
    import os, signal, sys, threading, time
    sys.path[:0] = sys.argv[1:3]
    from pathlib import Path
    from polling import until
    from pipeline.process import waits
    from pipeline.lifecycle.run_folder import RunFolder, Status
    from pipeline.monitor import watchdog as module
    waits.NOTICE_SECONDS = 0.2
    out, rank, wait_seconds, num_reports = Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
    folder = RunFolder(out, rank)
    if rank == 0:
        assert folder.lock() is None
        folder.say_status(Status("running", 12, -1, ""))
    folder.ours = True
    def record(line, lost_others):  # As Stop does.
        folder.say_failure(line, lost_others)
        folder.say_status(Status("failed", 12, 1, line))
    def reports():
        return [file for file in (out / "hang").glob("rank-*.txt") if "process" in file.read_text()]
    class Over(threading.Event):
        def wait(self, timeout=None):
            if timeout == module._REPORT_SECONDS:  # Not for so long, but until all are there that come, however late.
                until(lambda: len(reports()) == num_reports)
                return self.is_set()
            return super().wait(timeout)
    module._REPORT_SECONDS, module._SPEAK_SECONDS = 300.0, 0.0
    print("started", flush=True)
    sys.stdin.readline()
    watchdog = module.Watchdog(out / "hang", rank, ["a", "b", "c"], minutes=1.0 / 60, record=record)
    watchdog._over = Over()
    watchdog.at(12, "step")
    def read_from_a_dead_disk(seconds):
        time.sleep(seconds)
    watchdog.at(13, "step")
    if rank == 0 and num_reports == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and wait_seconds:
        watchdog.at(13, "data")
        with waits.waiting("s3://bucket/x", wait_seconds, "data.retry_minutes"):
            read_from_a_dead_disk(3 if wait_seconds > 3 else 600)
        os._exit(0)
    time.sleep(3 if wait_seconds > 3 else 600)
    os._exit(0)
"""
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts three ranks in a step, which may do nothing for 1 s.

    wait: if given, the limit of an announced wait, in which rank 1 reads data, for 3 s or more. num_reports: of ranks that
    hang; of two, when rank 0 stands still.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(wait: float = 0, num_reports: int = 3) -> list[subprocess.Popen[str]]:
        arguments = [sys.executable, "-c", textwrap.dedent(RANK), str(ROOT), str(ROOT / "tests/helpers"), str(tmp_path)]
        for rank in range(3):
            processes.append(
                subprocess.Popen([*arguments, str(rank), str(wait), str(num_reports)], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
            )  # fmt: skip
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
        for rank in (1, 0, 2):
            pipe = processes[rank].stdin
            assert pipe is not None
            pipe.write("\n")
            pipe.flush()
            if rank == 1 and wait > 1:  # The others know of it before they may take it for a hang.
                until(lambda: list(tmp_path.glob("hang/wait-00001.json")) or processes[1].poll() is not None)
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_hang_names_rank_host_and_line_and_leaves_a_record(tmp_path: Path, start: Start) -> None:
    ranks = start(wait=0.5)
    errors = [process.communicate(timeout=300)[1] for process in ranks]  # Not at the end of the sleep.
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
    ranks = start(num_reports=2)
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks[1:]]
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
    """Rank 1 waits for a store for 3 s, the others for rank 1; they may do nothing for 1 s."""
    ranks = start(wait=300)
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], errors
    assert "rank 1 on b waits for s3://bucket/x, at most 5 min (data.retry_minutes)\n" in errors[0]
    assert errors[2] == "", "rank 0 speaks"
    assert not list((tmp_path / "hang").glob("rank-*"))
