"""Allows one driver at a time for each output folder: a second one would delete the unfinished files of the first (`remove_leftovers`)."""

import contextlib
import errno
import hashlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.locks import FileLock
from pipeline.data.storage.bucket import AnyPath

LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def only_driver(folder: AnyPath) -> Iterator[None]:
    """Hold an exclusive lock on an output folder. Creates the folder, and removes it if it stays empty.

    The lock is a flock on a file in the folder: it ends with its process, and applies to all machines that share the folder
    if the file system supports locks. Object stores do not: there the lock file is in the local temporary folder, and excludes
    drivers on this machine only. Raises UserError, with the process that holds the lock.
    """
    local = folder if isinstance(folder, Path) else Path(tempfile.gettempdir(), f"vit-pipeline-{os.getuid()}")
    is_new = not local.exists()
    name = LOCK_FILE if local == folder else f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.lock"
    try:
        lock = _lock(local / name, folder)
        try:
            yield
        finally:
            (local / name).unlink(missing_ok=True)
            lock.close()
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                local.rmdir()


def remove_leftovers(*folders: AnyPath, pattern: str = ".*.tmp") -> None:
    """Remove unfinished files of killed drivers and tasks (`atomic.replacing`). Object stores have none: uploads are atomic."""
    for folder in folders:
        for leftover in folder.glob(pattern) if isinstance(folder, Path) else ():
            leftover.unlink(missing_ok=True)


def _lock(path: Path, folder: AnyPath) -> FileLock:
    """Lock the file, and write this process's name into it. Creates its folder."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(path)
        except FileNotFoundError:
            continue  # Another driver has just removed the empty folder.
        try:
            if not lock.acquire(wait=False):
                first = lock.read_owner() or "another process"
                lock.close()
                raise UserError(f"{folder} is being written by {first}. Wait until that ends, or stop it.")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note: {folder} has no locks ({error.strerror}): start no second job on it", file=sys.stderr)
        # The previous holder may have deleted the file after we opened it and before we locked it.
        if lock.is_current():
            break
        lock.close()
    command = os.path.basename(sys.argv[0]) or "python"
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        lock.write_owner(f"{command} on {socket.gethostname()} (process {os.getpid()}, since {since})")
    except OSError:
        path.unlink(missing_ok=True)
        lock.close()
        raise
    return lock
