"""One driver at a time for each output folder: a second one would sweep up what the first has half-done."""

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

from pipeline.data.storage.bucket import AnyPath
from pipeline.errors import UserError
from pipeline.locks import FileLock

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
        lock = _take(local / name, folder)
        try:
            yield
        finally:
            (local / name).unlink(missing_ok=True)
            lock.close()
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                local.rmdir()


def _take(place: Path, folder: AnyPath) -> FileLock:
    """Lock the file `place`, and write into it who holds it. Makes its folder."""
    while True:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(place)
        except FileNotFoundError:
            continue  # Another job has just removed the empty folder.
        try:
            if not lock.acquire(wait=False):
                first = lock.read_owner() or "another process"
                lock.close()
                raise UserError(f"{folder} is being written by {first}. Wait until that ends, or stop it.")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note: {folder} has no locks ({error.strerror}): start no second job on it", file=sys.stderr)
        # Its previous owner may have removed the file after we opened it and before we locked it.
        if lock.is_current():
            break
        lock.close()
    command = os.path.basename(sys.argv[0]) or "python"
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    lock.write_owner(f"{command} on {socket.gethostname()} (process {os.getpid()}, since {since})")
    return lock
