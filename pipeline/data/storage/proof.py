"""Files that are compared with a checksum once, and then only when they were written again.

What was found is remembered in the user's cache folder, one small file for each that was read, by size, times, inode (of
an object in a bucket: its version) and the hash. So a start does not take longer the larger a data set is. What changes
on a disk without being written does not show here: `launch/verify.py` reads everything again.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from pipeline import json_record
from pipeline.data.storage.bucket import AnyPath, version
from pipeline.errors import UserError
from pipeline.locks import FileLock

# A file that was written so recently may be written again within the resolution of its times.
_SETTLED_SECONDS = 2.0
_CHUNK = 2**22


@dataclass(frozen=True)
class _Proof:
    """What was read: which file, in which state, and the hash that it had."""

    path: str
    state: str
    digest: str


def cache_home() -> Path:
    """The folder of all that may be removed and is made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit-pipeline"


def proven_sha256(path: AnyPath, expected: str, remember: bool = True) -> str:
    """Hex SHA-256 of a file, read only when it is not remembered to be `expected`. Raises FileNotFoundError."""
    return _proven(path, expected, remember, hashlib.sha256)


def proven_xxh128(path: AnyPath, expected: str, remember: bool = True) -> str:
    """Hex XXH3-128 of a file, read only when it is not remembered to be `expected`. Raises FileNotFoundError."""
    return _proven(path, expected, remember, xxhash.xxh3_128)


def _proven(path: AnyPath, expected: str, remember: bool, kind: Callable) -> str:
    if not remember:
        return _digest(path, kind)
    name = hashlib.sha256(
        str(path.absolute() if isinstance(path, Path) else path).encode("utf-8", "replace")
    ).hexdigest()
    record = cache_home() / "proven" / f"{name[:32]}.json"
    if _remembered(record) == _Proof(str(path), _state(path), expected):
        return expected
    # Ranks of a node start together; one of them reads.
    with _alone(record.with_suffix(".lock")) as can_write:
        state = _state(path)
        if _remembered(record) == _Proof(str(path), state, expected):
            return expected
        digest = _digest(path, kind)
        if can_write and digest == expected and _state(path) == state and _is_settled(path):
            _remember(record, _Proof(str(path), state, digest))
    return digest


def _digest(path: AnyPath, kind: Callable) -> str:
    digest = kind()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _state(path: AnyPath) -> str:
    """What changes when the file is written."""
    if not isinstance(path, Path):
        return version(path)
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _is_settled(path: AnyPath) -> bool:
    return not isinstance(path, Path) or abs(time.time() - path.stat().st_mtime) > _SETTLED_SECONDS


def _remembered(record: Path) -> _Proof | None:
    try:
        return json_record.read(record, _Proof)
    except (OSError, UserError):
        return None


def _remember(record: Path, proof: _Proof) -> None:
    temporary = record.with_name(f".{record.name}.{uuid.uuid4().hex[:8]}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(asdict(proof)))
        os.replace(temporary, record)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[bool]:
    """Alone among the processes that name this file, where that can be; whether the folder can be written."""
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(file))
            can_write = True
        except OSError:
            can_write = False
        yield can_write
