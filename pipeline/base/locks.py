"""Locks between processes. Standard library only."""

import errno
import fcntl
import hashlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from pipeline.base.errors import UserError, naming

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class FileLock:
    """A lock on a file. The kernel releases it when the process ends, so a killed process leaves none
    behind.

    The file stays when the lock is released; its text may say who holds it.
    """

    def __init__(self, path: Path, create: bool = True, by_record: bool = False) -> None:
        """Open the file, without locking it. Raises OSError.

        by_record: use a POSIX record lock (`lockf`), which more network file systems share between hosts than `flock`.
        It is released when the process closes any descriptor of the file.
        """
        self.path, self._by_record = path, by_record
        self.file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)

    def acquire(self, wait: bool = True, shared: bool = False) -> bool:
        """Take the lock; returns False when another process has it and `wait` is False. Raises OSError without lock
        support.

        shared: other processes may have it, too, each as a shared one.
        """
        lock = fcntl.lockf if self._by_record else fcntl.flock
        try:
            lock(self.file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):  # For a record lock, EACCES has the same meaning.
            return False
        return True

    def is_held(self) -> bool:
        """Whether another process has this record lock, which is not taken: one who wants it at this moment gets it.
        Raises OSError.
        """
        assert self._by_record
        try:
            os.lockf(self.file, os.F_TEST, 0)
        except (BlockingIOError, PermissionError):
            return True
        return False

    def close(self) -> None:
        """Close the file, which releases the lock unless a forked process has it open."""
        os.close(self.file)

    def is_current(self) -> bool:
        """Whether the path still names the open file. The lock on a removed file has no effect."""
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def read_owner(self) -> str:
        """The text that the owner of the lock wrote, if any."""
        return os.pread(self.file, 1000, 0).decode(errors="replace")

    def write_owner(self, owner: str) -> None:
        """Replace that text. Raises OSError."""
        with naming(self.path):
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, owner.encode(), 0)


@contextmanager
def locked(path: Path) -> Iterator[FileLock]:
    """Wait for the lock on a file, and hold it during the block. Raises OSError."""
    with closing(FileLock(path)) as lock:
        lock.acquire()
        try:
            yield lock
        finally:  # A process that another thread has forked meanwhile has the file open, too.
            fcntl.flock(lock.file, fcntl.LOCK_UN)


@contextmanager
def only_writer(output: object, is_file: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on an output until the block ends: a second command would mix its files with those of the
    first.

    output: a folder, which is created, and removed if it stays empty; a file (is_file), whose folder exists; or the URL
    of a bucket. The lock is a flock on a hidden file in that folder: it ends with its process, and applies to all
    machines that share the folder if the file system supports locks. Object stores do not: there the lock file is in
    the local temporary folder, and excludes commands on this machine only. Raises UserError, with the process that
    holds the lock.
    """
    folder, name = Path(str(output)), ".lock"
    if "://" in str(output):
        folder = Path(tempfile.gettempdir(), f"vit-pipeline-{os.getuid()}")
        name = f"{hashlib.sha256(str(output).encode()).hexdigest()[:16]}.lock"
    elif is_file:
        folder, name = folder.parent, f".{folder.name}.lock"
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        lock = _lock(folder / name, output)
        try:
            command = os.path.basename(sys.argv[0]) or "python"
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            lock.write_owner(f"{command} on {socket.gethostname()} (process {os.getpid()}, since {since})")
            yield
        finally:
            (folder / name).unlink(missing_ok=True)
            lock.close()
    finally:
        with suppress(OSError):
            for place in new:
                place.rmdir()


def _lock(path: Path, output: object) -> FileLock:
    """Create and lock the file, and its folder."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(path)
        except FileNotFoundError:
            continue  # Another command has just removed the empty folder.
        try:
            if not lock.acquire(wait=False):
                first = lock.read_owner() or "another process"
                lock.close()
                raise UserError(f"{output} is being written by {first}. Wait until that ends, or stop it.")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"note: {output} has no locks ({error.strerror}): start no second job on it", file=sys.stderr)
        # The previous holder may have deleted the file after we opened it and before we locked it.
        if lock.is_current():
            return lock
        lock.close()
