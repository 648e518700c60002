"""Allows one driver at a time for each output folder: a second one would delete the unfinished files of the first."""

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.data.storage.bucket import AnyPath
from pipeline.errors import UserError

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
        file = _lock(local / name, folder)
        try:
            yield
        finally:
            (local / name).unlink(missing_ok=True)
            os.close(file)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                local.rmdir()


def _lock(path: Path, folder: AnyPath) -> int:
    """Returns the descriptor of the locked file, after writing this process's name into it. Creates the folder."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # Another driver has just removed the empty folder.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 1000).decode() or "another process"
            os.close(file)
            raise UserError(f"{folder} is being written by {holder}. Wait until that ends, or stop it.") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note: {folder} has no locks ({error.strerror}): start no second job on it", file=sys.stderr)
        # The previous holder may have deleted the file after we opened it and before we locked it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)
    command = os.path.basename(sys.argv[0]) or "python"
    description = (
        f"{command} on {socket.gethostname()} (process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')})"
    )
    os.ftruncate(file, 0)
    os.pwrite(file, description.encode(), 0)
    return file
