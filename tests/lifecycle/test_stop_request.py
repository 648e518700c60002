"""Stop requests and errors of one rank, in this process alone; with several ranks: tests/faults/test_stop.py."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.base.errors import OneRankError
from pipeline.lifecycle.run_folder import RESUME, Failure, Status, is_stop_asked, read_failures, read_status
from pipeline.lifecycle.stop import Stop
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def stop_of(folder: Path) -> Stop:
    given = ["name=x", f"out={folder}", "data.path=x", "model.name=ViT-Ti/16", "train.length=2 steps"]
    return Stop(schema.load(RunConfig, None, given))


def test_a_folder_that_cannot_be_read_asks_for_no_stop(tmp_path: Path) -> None:
    """An exception would end the thread that hears signals, and SIGTERM would be ignored from then on."""
    assert not is_stop_asked(tmp_path / ("x" * 5000))
    (tmp_path / "stop").touch()
    assert is_stop_asked(tmp_path)


def test_ranks_that_wait_for_one_that_prepares_leave_with_it(tmp_path: Path) -> None:
    """They were in training already, and failed when it left."""
    waiting: list[bool] = []
    with stop_of(tmp_path) as stop:
        stop._ranks = SimpleNamespace(is_main=False, barrier=lambda: waiting.append(stop._training))  # type: ignore[assignment]
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
        stop._ranks = SimpleNamespace(is_main=True, barrier=lambda: None)  # type: ignore[assignment]
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
        "import os, signal, sys, time; sys.path.insert(0, 'tests/lifecycle')\n"
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


def test_a_rank_that_loses_one_which_was_asked_to_leave_leaves_as_asked(tmp_path: Path) -> None:
    """Before training: it met the loss before it was told of the request, and failed with code 1."""
    code = (
        "import sys; from types import SimpleNamespace; sys.path.insert(0, 'tests/lifecycle')\n"
        "from test_stop_request import Path, stop_of\n"
        "with stop_of(Path(sys.argv[1])) as stop:\n"
        "    nothing = lambda *of: 1\n"
        "    stop._ranks = SimpleNamespace(is_main=False)\n"
        "    stop._store = SimpleNamespace(check=lambda key: key.endswith('/stop/0'), get=lambda key: 'SIGTERM', set=nothing, add=nothing)\n"
        "    raise RuntimeError('gloo: connection closed by peer')\n"
    )
    environment = {**os.environ, "RANK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (RESUME, "")


@pytest.mark.parametrize(
    "when",
    ["os.kill(os.getpid(), 15); until(lambda: stop.reason)", "join, stop._thread.join = stop._thread.join, after"],
)
def test_a_silent_rank_does_not_outlive_its_launchers_sigterm(tmp_path: Path, when: str) -> None:
    """It waits for rank 0 to say the mistake of all: a SIGTERM heard before, or while nobody listens any more, must end that."""
    code = (
        "import os, sys, time; sys.path[:0] = ['tests/lifecycle', 'tests/helpers']\n"
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
    """Rank 0 waits until all ranks know of the request. Training began meanwhile, and a supervisor took the run for killed."""
    code = (
        "import os, signal, sys, time; from types import SimpleNamespace; sys.path[:0] = ['tests/lifecycle', 'tests/helpers']\n"
        "from test_stop_request import Path, read_status, stop_of\n"
        "from polling import until\n"
        "with stop_of(Path(sys.argv[1])) as stop:\n"
        "    assert stop.folder.lock() is None\n"
        "    nothing = lambda *of: None\n"
        "    stop._ranks = SimpleNamespace(is_main=True, barrier=nothing)\n"
        "    stop._store = SimpleNamespace(check=nothing, set=nothing)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    until(lambda: read_status(stop.folder.path))\n"
        "    stop.begin_training(5)\n"
        "    time.sleep(300)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == RESUME, done.stderr
    assert read_status(tmp_path / "x") == Status("stopped", 0, RESUME, "SIGTERM, before training began")


def test_the_status_of_what_ends_with_code_2_says_so(tmp_path: Path) -> None:
    """Also of an error of the system, such as a full disk: a restart would repeat it."""
    stop = stop_of(tmp_path)
    assert stop.folder.lock() is None
    with pytest.raises(OSError, match="left"), stop:
        raise OSError(errno.ENOSPC, "No space left on device", "page/facts.json")
    said = "No space left for page/facts.json: free some, or choose another folder for the output."
    assert read_status(tmp_path / "x") == Status("refused", 0, 2, said)


def test_the_failure_of_a_file_server_is_no_refusal(tmp_path: Path) -> None:
    """A supervisor ended with the first one."""
    stop = stop_of(tmp_path)
    assert stop.folder.lock() is None
    stop.folder.ours = True
    with pytest.raises(OSError, match="I/O"), stop:
        raise OSError(errno.EIO, "I/O error", "log.txt")
    said = "log.txt: its disk, or the server that has it, failed (I/O error). See the system's log, or choose another folder."
    assert read_status(tmp_path / "x") == Status("failed", 0, 1, said)
    assert read_failures(tmp_path / "x") == {0: Failure(0, socket.gethostname(), said, False, outage=True)}


def test_why_one_rank_alone_ended_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the others say that it was killed."""
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "x").mkdir()
    stop = stop_of(tmp_path)
    stop.folder.ours = True
    with pytest.raises(OneRankError), stop:
        raise OneRankError("shard 3 is missing")
    assert read_failures(tmp_path / "x") == {1: Failure(1, socket.gethostname(), "shard 3 is missing", False)}
