"""One driver at a time for each output folder: a second one would sweep up what the first has half-done."""

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
    """Alone with an output folder until the block ends or the process does. Makes the folder; removes it if it stays empty.

    The lock is one of the system's on a file in the folder (flock), so none outlives its process, and it holds for all
    machines that share the folder, if their file system has locks. A bucket has none: there the file is in this machine's
    temporary folder, and keeps apart the drivers of this machine alone. Raises UserError that names who came first.
    """
    local = folder if isinstance(folder, Path) else Path(tempfile.gettempdir(), f"vit-pipeline-{os.getuid()}")
    is_new = not local.exists()
    name = LOCK_FILE if local == folder else f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.lock"
    try:
        file = _take(local / name, folder)
        try:
            yield
        finally:
            (local / name).unlink(missing_ok=True)
            os.close(file)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                local.rmdir()


def _take(place: Path, folder: AnyPath) -> int:
    """The lock file, open and locked; it says who has it. Makes its folder."""
    while True:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # Whoever made the folder has just removed it, empty.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            first = os.read(file, 1000).decode() or "another process"
            os.close(file)
            raise UserError(f"{folder} is being written by {first}. Wait until that ends, or stop it.") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note: {folder} has no locks ({error.strerror}): start no second job on it", file=sys.stderr)
        # Whoever had it may have removed the file between our opening and our locking it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(place)):
                break
        os.close(file)
    command = os.path.basename(sys.argv[0]) or "python"
    us = f"{command} on {socket.gethostname()} (process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')})"
    os.ftruncate(file, 0)
    os.pwrite(file, us.encode(), 0)
    return file
