"""Stop requests and errors of one rank, in this process alone; with several ranks: tests/faults/test_stop.py."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import ROOT

from pipeline.base.errors import CrashError, DivergedError, UserError
from pipeline.cluster.status_files import RESUME, Status, is_stop_asked, read_status
from pipeline.cluster.stop import Stop


def stop_of(folder: Path) -> Stop:
    return Stop(folder / "x")


def test_a_folder_that_cannot_be_read_asks_for_no_stop(tmp_path: Path) -> None:
    """An exception would end the thread that hears signals, and SIGTERM would be ignored from then on."""
    assert not is_stop_asked(tmp_path / ("x" * 5000))
    (tmp_path / "stop").touch()
    assert is_stop_asked(tmp_path)


def test_ranks_that_wait_for_one_that_prepares_leave_with_it(tmp_path: Path) -> None:
    """They were in training already, and failed when it left."""
    waiting: list[bool] = []
    with stop_of(tmp_path) as stop:
        stop._ranks = SimpleNamespace(is_main=False, barrier=lambda: waiting.append(stop._training))
        stop.begin_training(0)
        assert (waiting, stop._training) == ([False], True)


@pytest.mark.parametrize(
    ("checkpoint", "commits", "reserve"),
    [(0, [], 30), (10e9, [], 330), (1e12, [], 500), (10e9, [1, 2], 36), (10e9, [200, 2], 630)],
)
def test_a_limit_leaves_time_for_the_first_commit_too(
    checkpoint: float, commits: list[float], reserve: float, tmp_path: Path
) -> None:
    """Until one is known, it is expected to take its bytes at 100 MB/s, in at most half of the limit."""
    with stop_of(tmp_path) as stop:
        stop.limit_seconds = 1000.0
        stop._ranks = SimpleNamespace(barrier=lambda: None)  # type: ignore[assignment]
        stop.folder.ours = True
        stop.expect_checkpoint(int(checkpoint))
        stop.begin_training(0)
        for seconds in commits:
            stop.committed(1, seconds)
        asked = []
        for passed in (1000 - reserve - 5, 1000 - reserve + 5):
            stop.begin = time.monotonic() - passed
            asked.append(stop._asked_elsewhere())
    assert asked == ["", "train.stop_after_minutes"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_before_training_is_said(number: signal.Signals, tmp_path: Path) -> None:
    """Also the end of a terminal, unless the run was told to outlive it."""
    code = (
        "import os, signal, sys, time; sys.path[:0] = ['tests/cluster', 'tests/helpers']\n"
        "from test_stop_request import Path, stop_of\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with stop_of(Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    time.sleep(1)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "with stop_of(Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), int(sys.argv[2]))\n"
        "    time.sleep(300)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = f"stopped by {number.name} before training began: the same command starts it again (exit code 75)\n"
    assert (done.returncode, done.stderr) == (RESUME, said)


@pytest.mark.parametrize(
    "when",
    ["os.kill(os.getpid(), 15); until(lambda: stop.reason)", "join, stop._thread.join = stop._thread.join, after"],
)
def test_a_silent_rank_does_not_outlive_its_launchers_sigterm(tmp_path: Path, when: str) -> None:
    """It waits for rank 0 to say the mistake of all: a SIGTERM heard before, or while nobody listens any more, must end
    that.
    """
    code = (
        "import os, sys, time; sys.path[:0] = ['tests/cluster', 'tests/helpers']\n"
        "from pipeline.base.errors import OneRankError, UserError\n"
        "from test_stop_request import Path, stop_of\n"
        "from polling import until\n"
        "def after():\n"
        "    join(); os.kill(os.getpid(), 15)\n"
        "try:\n"
        "    with stop_of(Path(sys.argv[1])) as stop:\n"
        "        stop._training = True\n"
        f"        {when}\n"
        "        raise globals()[sys.argv[2]]('wrong')\n"
        "except UserError:\n"
        "    time.sleep(0 if os.environ['RANK'] == '0' or sys.argv[2] == 'OneRankError' else 300)\n"
    )
    # The last one has something to say.
    for rank, error, ends in (("1", "UserError", -signal.SIGTERM), ("0", "UserError", 0), ("1", "OneRankError", 0)):
        command = [sys.executable, "-c", code, str(tmp_path), error]
        assert subprocess.run(command, cwd=ROOT, env={**os.environ, "RANK": rank}).returncode == ends


def test_a_run_that_is_leaving_does_not_say_that_it_is_running(tmp_path: Path) -> None:
    """Rank 0 waits until all ranks know of the request. Training began meanwhile, and a supervisor took the run for
    killed.
    """
    code = (
        "import os, signal, sys, time; from types import SimpleNamespace; sys.path[:0] = ['tests/cluster',"
        " 'tests/helpers']\nfrom test_stop_request import Path, read_status, stop_of\nfrom polling import until\nwith"
        " stop_of(Path(sys.argv[1])) as stop:\n    assert stop.folder.lock() is None\n    nothing = lambda *of: None\n "
        "   stop._ranks = SimpleNamespace(is_main=True, barrier=nothing)\n    stop._store ="
        " SimpleNamespace(check=nothing, set=nothing)\n    os.kill(os.getpid(), signal.SIGTERM)\n    until(lambda:"
        " read_status(stop.folder.path))\n    stop.begin_training(5)\n    time.sleep(300)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == RESUME, done.stderr
    assert read_status(tmp_path / "x") == Status("stopped", 0, RESUME, "SIGTERM, before training began")


@pytest.mark.parametrize(
    ("error", "how", "code", "word"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "run.json"), "refused", 2, "run.json"),
        (OSError(errno.EIO, "I/O error", "log.txt"), "failed", 1, "log.txt"),  # A restart may succeed.
        (UserError("train.length"), "refused", 2, "train.length"),
        (DivergedError("optimizer.lr"), "diverged", 2, "optimizer.lr"),
        (CrashError("rank 3"), "failed", 1, "rank 3"),
        (RuntimeError("a bug"), "failed", 1, "a bug"),
    ],
)
def test_an_end_is_recorded_at_one_place(
    tmp_path: Path, error: Exception, how: str, code: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """status.json and what mirrors the run have the same ending and reason, also where the mirror or failures/ cannot
    be written.
    """
    stop, shown = stop_of(tmp_path), list[tuple[str, str]]()

    def show(how: str, reason: str) -> None:
        shown.append((how, reason))
        raise OSError(errno.ENOSPC, "No space left on device", "run.json")

    stop.show_end = show
    assert stop.folder.lock() is None
    stop.folder.ours = True
    (tmp_path / "x/failures").touch()
    with pytest.raises(type(error)), stop:
        raise error
    status = read_status(tmp_path / "x")
    assert (status.status, status.code) == (how, code)
    assert word in status.reason
    assert shown == [(how, status.reason)]
