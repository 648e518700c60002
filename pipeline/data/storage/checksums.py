"""Checksums of large files: of a whole file, and of its chunks, each of which is compared when it is first read."""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from pipeline.base.errors import UserError
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.object_store import RangeReader

CHUNK_BYTES = 2**16
_READ_BYTES = 2**22


def cache_home() -> Path:
    """The folder of everything that may be deleted and is made again when needed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit-pipeline"


def digest_of(path: AnyPath) -> str:
    """Hex SHA-256 of a file, which is read. Raises FileNotFoundError."""
    with path.open("rb", _READ_BYTES) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def chunk_digests(path: AnyPath) -> np.ndarray:
    """uint64, XXH3-64 of each CHUNK_BYTES of a file. Raises FileNotFoundError."""
    with path.open("rb", _READ_BYTES) as file:
        chunks: Iterator[bytes] = iter(partial(file.read, CHUNK_BYTES), b"")
        return np.array([xxhash.xxh3_64_intdigest(chunk) for chunk in chunks], "<u8")


class CheckedFile(RangeReader):
    """A file to read, of which each chunk is compared with its checksum when it is first read."""

    def __init__(self, path: AnyPath, digests: np.ndarray, remedy: str) -> None:
        """digests: `chunk_digests` of the file. Raises OSError; reading raises UserError, which ends in `remedy`."""
        self._path, self._digests, self._remedy = path, digests, remedy
        self._is_checked = bytearray(len(digests))
        self._read: Callable[[int, int], bytes | memoryview]
        if isinstance(path, Path):
            with path.open("rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._size, self._read = len(content), lambda offset, size: content[offset : offset + size]
        else:
            reader = path.reader()
            self._size, self._read = reader.size(), reader.read_at
        if -(-self._size // CHUNK_BYTES) != len(digests):
            raise self._damage()

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, size: int) -> memoryview:
        chunks = range(offset // CHUNK_BYTES, -(-(offset + size) // CHUNK_BYTES))
        first = chunks.start * CHUNK_BYTES
        data = memoryview(self._read(first, min(chunks.stop * CHUNK_BYTES, self._size) - first))
        for chunk in chunks:
            if not self._is_checked[chunk]:
                begin = chunk * CHUNK_BYTES - first
                if xxhash.xxh3_64_intdigest(data[begin : begin + CHUNK_BYTES]) != self._digests[chunk]:
                    raise self._damage()
                self._is_checked[chunk] = True
        return data[offset - first :][:size]

    def _damage(self) -> UserError:
        return UserError(f"{self._path} is damaged: it does not match its checksums. {self._remedy}")
