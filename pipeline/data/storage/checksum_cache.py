"""Checksums of large files, computed once and remembered until the file is written again.

A matching checksum is remembered in the user's cache folder, in one small file for each that was read, with the size,
times and inode (for an object: its version). So opening a data set does not take longer the larger it is. Content that
changes on a disk without being written goes unnoticed here: `launch/verify.py` reads everything again.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.base import files, json_record
from pipeline.base.locks import locked
from pipeline.data.storage.bucket import AnyPath, version

# A file that was written so recently may be written again within the resolution of its times.
_STABLE_SECONDS = 2.0
_CHUNK = 2**22


@dataclass(frozen=True)
class _CachedChecksum:
    """A file by its absolute path, its state when it was read, and its checksum."""

    path: str
    state: str
    digest: str


def cache_home() -> Path:
    """The folder of everything that may be deleted and is made again when needed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit-pipeline"


def checksum_of(path: AnyPath, expected: str, algorithm: Callable = hashlib.sha256, remember: bool = True) -> str:
    """Hex checksum of a file. Reads the file, unless its checksum is remembered to be `expected`.

    algorithm: a constructor like those of hashlib. remember: False reads the file always. Raises FileNotFoundError.
    """
    if not remember:
        return _digest(path, algorithm)
    absolute = str(path.absolute() if isinstance(path, Path) else path)
    name = hashlib.sha256(absolute.encode("utf-8", "replace")).hexdigest()
    record = cache_home() / "proven" / f"{name[:32]}.json"
    with contextlib.ExitStack() as stack:
        # The ranks of a node start together; one of them reads the file.
        can_write = False
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(record.with_suffix(".lock")))
            can_write = True
        known = _CachedChecksum(absolute, _state(path), expected)
        if json_record.read_or_none(record, _CachedChecksum) == known:
            return expected
        digest = _digest(path, algorithm)
        is_stable = not isinstance(path, Path) or abs(time.time() - path.stat().st_mtime) > _STABLE_SECONDS
        if can_write and digest == expected and _state(path) == known.state and is_stable:
            with contextlib.suppress(OSError), files.replacing(record) as file:
                file.write(json.dumps(asdict(known)).encode())
    return digest


def _digest(path: AnyPath, algorithm: Callable) -> str:
    digest = algorithm()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _state(path: AnyPath) -> str:
    """A text that changes when the file is written."""
    if not isinstance(path, Path):
        return version(path)
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
