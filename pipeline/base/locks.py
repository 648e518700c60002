"""Locks between processes. Standard library only."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pipeline.base.errors import naming


class FileLock:
    """An exclusive lock on a file. The kernel releases it when the process ends, so a killed process leaves none behind.

    The file stays when the lock is released; its text may say who holds it.
    """

    def __init__(self, path: Path, create: bool = True, by_record: bool = False) -> None:
        """Open the file, without locking it. Raises OSError.

        by_record: use a POSIX record lock (`lockf`), which more network file systems share between hosts than `flock`. It
        is released when the process closes any descriptor of the file.
        """
        self.path, self._by_record = path, by_record
        self.file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock; returns False when another process has it and `wait` is False. Raises OSError without lock support."""
        lock = fcntl.lockf if self._by_record else fcntl.flock
        try:
            lock(self.file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):  # For a record lock, EACCES has the same meaning.
            return False
        return True

    def is_held(self) -> bool:
        """Whether another process has this record lock, which is not taken: one who wants it at this moment gets it. Raises OSError."""
        assert self._by_record
        try:
            os.lockf(self.file, os.F_TEST, 0)
        except (BlockingIOError, PermissionError):
            return True
        return False

    def close(self) -> None:
        """Release the lock and close the file."""
        os.close(self.file)

    def is_current(self) -> bool:
        """Whether the path still names the open file. The lock on a file that was removed meanwhile is of no use."""
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
        yield lock
