"""Checksums of large files, computed once and remembered until the file is written again.

A matching checksum is remembered in the user's cache folder, in one small file for each that was read, with the size,
times and inode (for an object: its version). So opening a data set does not take longer the larger it is. Content that
changes on a disk without being written goes unnoticed here: `launch/verify.py` reads everything again.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.base.locks import locked
from pipeline.data.storage.bucket import AnyPath, version

# A file that was written so recently may be written again within the resolution of its times.
_STABLE_SECONDS = 2.0
_CHUNK = 2**22


def cache_home() -> Path:
    """The folder of everything that may be deleted and is made again when needed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit-pipeline"


def checksum_of(path: AnyPath, expected: str, algorithm: Callable = hashlib.sha256) -> str:
    """Hex checksum of a file. Reads the file, unless its checksum is remembered to be `expected`.

    algorithm: a constructor like those of hashlib. Raises FileNotFoundError.
    """
    name = str(path.absolute() if isinstance(path, Path) else path).encode("utf-8", "replace")
    proof = _proof(name, path, expected)
    with contextlib.ExitStack() as stack:
        record = None
        with contextlib.suppress(OSError):
            folder = cache_home() / "proven"
            folder.mkdir(parents=True, exist_ok=True)
            # The ranks of a node start together; one of them reads the file.
            record = stack.enter_context(locked(folder / hashlib.sha256(name).hexdigest()[:32])).file
        if record is not None and os.pread(record, len(proof) + 1, 0) == proof:
            return expected
        digest = digest_of(path, algorithm)
        is_stable = not isinstance(path, Path) or abs(time.time() - path.stat().st_mtime) > _STABLE_SECONDS
        if record is not None and is_stable and proof == _proof(name, path, digest):
            with contextlib.suppress(OSError):
                os.pwrite(record, proof, 0)
                os.ftruncate(record, len(proof))
    return digest


def digest_of(path: AnyPath, algorithm: Callable = hashlib.sha256) -> str:
    """Hex checksum of a file, which is read. Raises FileNotFoundError."""
    with path.open("rb", _CHUNK) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]


def state_of(path: AnyPath) -> str:
    """Changes when the file is written: its size, times and inode, or the version of an object. Raises
    FileNotFoundError.
    """
    if not isinstance(path, Path):
        return version(path)
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _proof(name: bytes, path: AnyPath, digest: str) -> bytes:
    """What is remembered: it changes when the file is written."""
    return b" ".join((name, state_of(path).encode(), digest.encode()))
