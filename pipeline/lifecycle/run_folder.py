"""What a run's folder says of the run in it: is one alive, how did the last start end, is it to stop. No heavy imports.

lock             held by rank 0 as long as it lives; its text says who that is
status.json      how the last start ended, or that it is running (or was killed: then nobody could say it ended)
failures/*       why a rank gave up by itself, and its traceback; a rank that was killed leaves nothing
stop             made by a person or a supervisor: the run commits, removes it and leaves
"""

import contextlib
import json
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline import json_record
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.locks import FileLock

# "Resume me": all that was trained is committed, and the same command goes on (EX_TEMPFAIL of sysexits.h).
RESUME = 75
_NOBODY = "a run that does not say who it is"

Ending = Literal["running", "finished", "stopped", "failed", "refused", "diverged"]


@dataclass(frozen=True)
class Status:
    """How a start ended. step: what is committed at least. code: its exit code, -1 while it runs."""

    status: Ending
    step: int
    code: int
    reason: str


@dataclass(frozen=True)
class Failure:
    """Why a rank gave up. lost_others: because another rank was gone, not of itself."""

    rank: int
    host: str
    error: str
    lost_others: bool


class RunFolder:
    """The folder of one run, as the run itself uses it. Rank 0 locks it; `ours` once every rank knows that it did."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.ours = False
        self.is_owner = self.is_locked = False
        self._lock: FileLock | None = None

    def lock(self) -> UserError | None:
        """Take the folder until this process ends, or say who has it.

        A record lock: the kernel drops it when its process dies, however that dies, and the file server when its host
        does. Assumed: hosts that share the folder see each other's locks (NFS, GPFS, CephFS, BeeGFS; Lustre mounted
        with `flock`). Where there are none at all, the run owns the folder without (`is_locked` stays False).
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # Opened once and not closed: closing any descriptor of the file would release the lock.
        lock = FileLock(self.path / "lock", by_record=True)
        is_free = True
        with contextlib.suppress(OSError):  # Raised by file systems without locks.
            is_free = self.is_locked = lock.acquire(wait=False)
        if not is_free:
            who = lock.read_owner() or _NOBODY
            lock.close()
            return UserError(f"{self.path} is in use by {who}. Stop that one, or start another run with name=...")
        self._lock, self.is_owner = lock, True
        lock.write_owner(f"host {socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        shutil.rmtree(self.path / "failures", ignore_errors=True)
        return None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock, self.is_owner, self.is_locked = None, False, False

    def say_status(self, status: Status) -> None:
        """Replace status.json; only by the run that has the folder, on its rank 0."""
        if self.is_owner:
            write_text(self.path / "status.json", json.dumps(asdict(status)))

    def say_failure(self, error: str, lost_others: bool, trace: str = "") -> None:
        """Leave word why this rank gives up (see Failure), and its traceback if there is one."""
        if self.ours:
            file = self._failure_file()
            file.parent.mkdir(exist_ok=True)
            write_text(file, json.dumps(asdict(Failure(self.rank, socket.gethostname(), error, lost_others))))
            if trace:
                write_text(file.with_suffix(".txt"), trace)

    def take_stderr(self) -> None:
        """Send what this process still prints to stderr, from any library, into the file of its traceback."""
        file = os.open(self._failure_file().with_suffix(".txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(file, 2)
        os.close(file)

    def take_back_failure(self) -> None:
        self._failure_file().unlink(missing_ok=True)

    def _failure_file(self) -> Path:
        return self.path / "failures" / f"rank-{self.rank:05d}.json"


def holder(path: Path) -> str | None:
    """Who has the run folder, None when nobody does. Not for the process that has it: the lock would be lost."""
    try:
        lock = FileLock(path / "lock", create=False, by_record=True)
    except FileNotFoundError:
        return None
    with contextlib.closing(lock), contextlib.suppress(OSError):
        return None if lock.acquire(wait=False) else lock.read_owner() or _NOBODY
    return None


def read_status(path: Path) -> Status | None:
    """How the last start ended, None when there is no word of it, or no readable one."""
    try:
        return json_record.read(path / "status.json", Status)
    except (OSError, UserError):
        return None


def read_failures(path: Path) -> dict[int, Failure]:
    """What the ranks said that gave up by themselves in the last start, by rank."""
    found = {}
    for file in sorted((path / "failures").glob("rank-*.json")):
        with contextlib.suppress(OSError, UserError):  # What cannot be read says nothing, like a rank that was killed.
            failure = json_record.read(file, Failure)
            found[failure.rank] = failure
    return found


def forget_last_start(path: Path) -> None:
    """Remove what the last start said, so that the next one's silence is not taken for it."""
    (path / "status.json").unlink(missing_ok=True)
    shutil.rmtree(path / "failures", ignore_errors=True)


def stop_file(path: Path) -> Path:
    return path / "stop"
