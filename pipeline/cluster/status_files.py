"""State files of a run folder: is a run alive, how did its last start end, is it asked to stop. No slow imports.

lock             locked by rank 0 while it runs; contains its host and process id
status.json      how the last start ended; "running" also if it was killed
failures/*       error and traceback of each rank that failed by itself; a killed rank leaves none
stop             created by a person or a supervisor: the run commits a checkpoint, removes this file and exits
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes, write_text
from pipeline.base.locks import FileLock
from pipeline.monitor.run_page import hide_passwords
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.settings.yaml_reader import parse_yaml

# Exit code of a stopped run: everything is committed, and the same command resumes it (EX_TEMPFAIL in sysexits.h).
RESUME = 75
SETTINGS_FILE = "config.yaml"
# End mark of a YAML document: a truncated file would otherwise be read with defaults for what it lacks.
_END_OF_SETTINGS = "\n...\n"
_UNKNOWN_HOLDER = "an unidentified run"
# In the identity of a checkpoint: the folder of its run, whatever folder a relative `out` began in.
RUN_FOLDER = "the run's folder"
# Begins a rank's failure record when its watchdog ended it (pipeline/monitor/watchdog.py).
HANG = "hang: "

Ending = Literal["running", "finished", "stopped", "failed", "refused", "diverged"]


@dataclass(frozen=True)
class Status:
    """How a start ended. step: at least this step is committed. code: exit code, -1 while running."""

    status: Ending
    step: int
    code: int
    reason: str


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. lost_others: because it lost another rank, not by itself."""

    rank: int
    host: str
    error: str
    lost_others: bool


class RunFolder:
    """The folder of the run in this process. held: the lock, on rank 0. ours: every rank knows that rank 0 has it.

    before: how the start before ended, in words, once this one has the lock; rank 0 only.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank, self.before = path, rank, ""
        self.ours = False
        self.is_locked = False
        self.held: FileLock | None = None
        self._saying = threading.Lock()  # Training and the thread that hears of stops both write the status.

    def lock(self) -> UserError | None:
        """Lock the folder until this process ends. Returns an error naming the holder if another process has the lock.

        This is a record lock: the kernel releases it when the process dies, and the file server when the host dies. It
        requires a file system whose locks work between hosts (NFS, GPFS, CephFS, BeeGFS; Lustre mounted with `flock`).
        On one without locks the run continues unlocked (`is_locked` stays False).
        """
        self.path.mkdir(parents=True, exist_ok=True)
        # Opened once and not closed: closing any descriptor of the file would release the lock.
        lock = FileLock(self.path / "lock", by_record=True)
        is_free = True
        with contextlib.suppress(OSError):  # Raised by file systems without locks.
            is_free = self.is_locked = lock.acquire(wait=False)
        if not is_free:
            who = lock.read_owner() or _UNKNOWN_HOLDER
            lock.close()
            return UserError(f"{self.path} is in use by {who}. Stop that one, or start another run with name=...")
        self.held = lock
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        lock.write_owner(f"host {socket.gethostname()}, pid {os.getpid()}, since {since}")
        self.before = last_end_in_words(self.path)  # Not earlier: the last start may have been about to end.
        shutil.rmtree(self.path / "failures", ignore_errors=True)
        return None

    def unlock(self) -> None:
        if self.held:
            self.held.close()
        self.held, self.is_locked = None, False

    def say_status(self, status: Status) -> None:
        """Replace status.json. No-op unless this process holds the folder (rank 0)."""
        if not self.held:
            return
        path, text = self.path / "status.json", json.dumps(asdict(status))
        with self._saying:
            try:
                write_text(path, text)
            except OSError:
                # A full disk has no room for another file, but the last one has a block of its own.
                with contextlib.suppress(OSError), open(path, "r+b") as file:
                    file.write(as_bytes(text.ljust(path.stat().st_size)))
                    return
                raise

    def say_failure(self, error: str, lost_others: bool, trace: str = "") -> None:
        """Write this rank's failure record, and its traceback if there is one, unless the disk fails."""
        with contextlib.suppress(OSError):
            if not self.ours:
                return
            file = self._failure_file()
            file.parent.mkdir(exist_ok=True)
            failure = Failure(self.rank, socket.gethostname(), error, lost_others)
            write_text(file, json.dumps(asdict(failure)))
            if trace:
                write_text(file.with_suffix(".txt"), trace)

    def take_stderr(self) -> None:
        """Redirect stderr of this process, including native libraries, to the traceback file."""
        with open(self._failure_file().with_suffix(".txt"), "ab") as file:
            os.dup2(file.fileno(), 2)

    def take_back_failure(self) -> None:
        self._failure_file().unlink(missing_ok=True)

    def _failure_file(self) -> Path:
        return self.path / "failures" / f"rank-{self.rank:05d}.json"


def holder(path: Path) -> str | None:
    """Return who holds a run folder's lock, or None. Not for use by the holder: it would lose the lock."""
    try:
        lock = FileLock(path / "lock", create=False, by_record=True)
    except FileNotFoundError:
        return None
    with contextlib.closing(lock), contextlib.suppress(OSError):
        return (lock.read_owner() or _UNKNOWN_HOLDER) if lock.is_held() else None
    return None


def read_status(path: Path) -> Status | None:
    """Read status.json; None if it is missing or unreadable."""
    return json_record.read_or_none(path / "status.json", Status)


def read_settings(path: Path) -> RunConfig:
    """Read config.yaml. Raises FileNotFoundError, and UserError for a damaged file."""
    file = path / SETTINGS_FILE
    try:
        text = file.read_text("utf-8")
        tree = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if not text.endswith(_END_OF_SETTINGS):
        raise UserError(f"{file} is damaged: its end is missing.")
    return schema.build(RunConfig, tree, str(file))


def write_settings(config: RunConfig, path: Path) -> None:
    """Write config.yaml, without the password of the tracking URI."""
    settings = schema.to_dict(config)
    settings["track"]["uri"] = hide_passwords(settings["track"]["uri"])
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, explicit_end=True)
    write_text(path / SETTINGS_FILE, text)


def refuse_checkpoint_of_another(path: object, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if a checkpoint was made by another run that has the same place in checkpoint.folder, as its name
    is the same.

    path: of the checkpoint. then, now: settings by dotted name, of the run that made it and of this one.
    """
    own = Path(str(now.get("out", "")), str(now.get("name", "")))
    other = Path(str(then.get(RUN_FOLDER, "")))
    is_there = os.path.exists(other / SETTINGS_FILE)  # Else it was moved, and this run is it.
    if now.get("checkpoint.folder") and is_there and not (own.exists() and other.samefile(own)):
        raise UserError(
            f"{path} is of the run {other}, whose checkpoints have the same place. Choose another checkpoint.folder, or"
            " remove that run and its checkpoints."
        )


def read_end(path: Path) -> Status | None:
    """How the last start ended: its status, or what the other ranks recorded if rank 0, which writes it, could not."""
    status = read_status(path)
    if status is None or status.status != "running":
        return status
    failures = sorted(read_failures(path).values(), key=lambda failure: (failure.lost_others, failure.rank))
    # The error of a rank that lost another one is not the cause, unless its watchdog found it.
    error = next((f.error for f in failures if not f.lost_others or f.error.startswith(HANG)), "")
    return Status("failed", status.step, 1, error) if error else status


def last_end_in_words(path: Path) -> str:
    """How the last start of a run ended; empty if there was none. Only true while no start holds the folder's lock."""
    status = read_end(path)
    if status is None:
        return ""
    if status.status == "running":
        return f"killed, or lost with its host, at step {status.step:,} or later"
    why = f": {status.reason}" if status.reason else ""
    return f"{status.status} at step {status.step:,}{why}"


def read_failures(path: Path) -> dict[int, Failure]:
    """Read the failure records of the last start, by rank."""
    found = {}
    with contextlib.suppress(OSError):  # The file server fails.
        for file in sorted((path / "failures").glob("rank-*.json")):
            if failure := json_record.read_or_none(file, Failure):  # An unreadable record counts as missing.
                found[failure.rank] = failure
    return found


def stop_file(path: Path) -> Path:
    return path / "stop"


def is_stop_asked(path: Path) -> bool:
    """Whether there is a stop file. False while the folder's file system fails, as NFS may for a moment."""
    return os.path.exists(stop_file(path))  # Path.exists() would raise its errors.
