"""Arrays that one process of a host computes and all others map: they are in memory once, whatever the number of ranks.

    TMPDIR/vit-pipeline-UID/arrays/lock            held while a folder beside it is created, opened or removed
                                   KEY/used        each process that maps these arrays has a shared lock on it
                                   KEY/NAME.DTYPE  a plain array
                                   KEY.part/       the same while a process, which has the lock, computes them

A folder exists as long as a process uses it: the last one removes it. What killed processes left is removed by the next
process that opens or closes arrays, and is never read. Pages of files on a disk can be dropped by the kernel when it
needs memory.
"""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from pipeline.base.errors import OneRankError
from pipeline.base.locks import FileLock, locked
from pipeline.process.waits import waiting

# Making the arrays of a billion samples takes minutes, in which other hosts may wait for this one.
_WAIT_SECONDS = 3600.0


class HostArrays:
    """Read-only arrays by name, until this object is deleted or the process ends."""

    def __init__(self, what: str, key: str, make: Callable[[Path], None]) -> None:
        """Map the arrays of a key, which `make` writes by `new_array` if no process has them.

        what: names them in messages. key: identifies all that they are a function of. Raises OneRankError if they
        cannot be stored.
        """
        home = Path(tempfile.gettempdir(), f"vit-pipeline-{os.getuid()}", "arrays")
        folder = home / xxhash.xxh3_128_hexdigest(key.encode())
        try:
            home.mkdir(parents=True, exist_ok=True)
            with waiting(f"{what} to be computed on this host", _WAIT_SECONDS):
                lock = _opened(folder, make)
            weakref.finalize(self, _close, lock, home)
            files = {path: path.name.split(".") for path in folder.glob("*.*")}
            self._arrays = {name: np.asarray(np.memmap(path, dtype, "r")) for path, (name, dtype) in files.items()}
        except OSError as error:
            raise OneRankError(
                f"TMPDIR = {tempfile.gettempdir()} cannot store {what} ({error.strerror or error}). Set TMPDIR to a"
                " folder of this host with more room."
            ) from None

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]


def new_array(folder: Path, name: str, dtype: type | np.dtype, length: int) -> np.ndarray:
    """A writable array (length,) in a file of this folder, whose room is reserved. Raises OSError."""
    dtype = np.dtype(dtype)
    with open(folder / f"{name}.{dtype.name}", "w+b") as file:
        # Without room, a write to a mapped page would kill the process.
        os.posix_fallocate(file.fileno(), 0, length * dtype.itemsize)
        return np.asarray(np.memmap(file, dtype, "r+"))


def _opened(folder: Path, make: Callable[[Path], None]) -> FileLock:
    """A shared lock on this folder, which is made if no process has made it or does so now."""
    home, part = folder.parent, folder.with_suffix(".part")
    while True:
        with locked(home / "lock"):
            _remove_unused(home)
            is_made, is_begun = folder.exists(), part.exists()
            if not (is_made or is_begun):
                part.mkdir()
            lock = FileLock((folder if is_made else part) / "used")
            if not is_begun:
                lock.acquire(shared=is_made)
        if is_made:
            return lock
        if is_begun:
            with contextlib.closing(lock):
                lock.acquire(shared=True)
            continue
        try:
            make(part)
            with locked(home / "lock"):
                part.rename(folder)
                lock.acquire(shared=True)
            return lock
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            lock.close()
            raise


def _remove_unused(home: Path) -> None:
    """Remove the folders that no process maps. The caller has the lock of `home`."""
    for folder in home.iterdir():
        if folder.is_dir():
            with contextlib.suppress(FileNotFoundError), contextlib.closing(FileLock(folder / "used")) as lock:
                if lock.acquire(wait=False):
                    shutil.rmtree(folder, ignore_errors=True)


def _close(lock: FileLock, home: Path) -> None:
    lock.close()
    with contextlib.suppress(OSError), contextlib.closing(FileLock(home / "lock", create=False)) as of_home:
        if of_home.acquire(wait=False):  # If not, the process that has it removes them.
            _remove_unused(home)
