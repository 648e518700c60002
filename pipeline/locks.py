"""Locks between processes. Standard library only."""

import fcntl
import os
from pathlib import Path
from types import TracebackType


class FileLock:
    """An exclusive lock on a file. The kernel releases it when the process ends, so a killed process leaves none behind.

    `with FileLock(path):` waits for the lock. The file stays when the lock is released, and may say who holds it.
    """

    def __init__(self, path: Path, create: bool = True, by_record: bool = False) -> None:
        """Open the file, without locking it.

        by_record: use a POSIX record lock, which network file systems share between hosts more often than `flock`. It is
        released when the process closes any descriptor of the file. Raises OSError.
        """
        self.path, self._by_record = path, by_record
        self.file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock; False when another process has it and `wait` is False. Raises OSError where the file system has no locks."""
        lock = fcntl.lockf if self._by_record else fcntl.flock
        try:
            lock(self.file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):  # For a record lock, EACCES has the same meaning.
            return False
        return True

    def close(self) -> None:
        """Release the lock and close the file."""
        os.close(self.file)

    def is_current(self) -> bool:
        """Whether the path still names the open file: a file that was removed while we waited locks out nobody."""
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def read_owner(self) -> str:
        """The text that the owner of the lock wrote, if any."""
        return os.pread(self.file, 1000, 0).decode(errors="replace")

    def write_owner(self, owner: str) -> None:
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, owner.encode(), 0)

    def __enter__(self) -> "FileLock":
        try:
            self.acquire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
