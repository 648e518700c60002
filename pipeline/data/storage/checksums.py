"""Checksums of large files: of a whole file, and of its chunks, each of which is compared when it is first read."""

import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from pipeline.base.errors import UserError
from pipeline.data.storage.bucket import AnyPath

CHUNK_BYTES = 2**16
_READ_BYTES = 2**22


def cache_home() -> Path:
    """The folder of everything that may be deleted and is made again when needed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit-pipeline"


def digest_of(path: AnyPath, algorithm: Callable = hashlib.sha256) -> str:
    """Hex checksum of a file, which is read. algorithm: a constructor like those of hashlib. Raises
    FileNotFoundError.
    """
    with path.open("rb", _READ_BYTES) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()  # type: ignore[arg-type]


def chunk_digests(path: AnyPath) -> np.ndarray:
    """uint64, XXH3-64 of each CHUNK_BYTES of a file. Raises FileNotFoundError."""
    with path.open("rb", _READ_BYTES) as file:
        chunks: Iterator[bytes] = iter(partial(file.read, CHUNK_BYTES), b"")
        return np.array([xxhash.xxh3_64_intdigest(chunk) for chunk in chunks], "<u8")


class CheckedFile(io.RawIOBase):
    """A file to read, of which each chunk is compared with its checksum when it is first read."""

    def __init__(self, path: AnyPath, digests: np.ndarray, remedy: str) -> None:
        """digests: `chunk_digests` of the file. Raises OSError; reading raises UserError, which ends in `remedy`."""
        self._path, self._digests, self._remedy = path, digests, remedy
        self._is_checked, self._position = bytearray(len(digests)), 0
        self._read_at: Callable[[int, int], bytes | memoryview]
        if isinstance(path, Path):
            with path.open("rb") as file:
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._size, self._read_at = len(content), lambda offset, size: content[offset : offset + size]
        else:
            reader = path.reader()
            self._size, self._read_at = reader.size(), reader.read_at
        if -(-self._size // CHUNK_BYTES) != len(digests):
            raise self._damage()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes | memoryview:
        left = max(self._size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        chunks = range(self._position // CHUNK_BYTES, -(-(self._position + size) // CHUNK_BYTES))
        first = chunks.start * CHUNK_BYTES
        data = memoryview(self._read_at(first, min(chunks.stop * CHUNK_BYTES, self._size) - first)) if size else b""
        for chunk in chunks:
            if not self._is_checked[chunk]:
                begin = chunk * CHUNK_BYTES - first
                if xxhash.xxh3_64_intdigest(data[begin : begin + CHUNK_BYTES]) != self._digests[chunk]:
                    raise self._damage()
                self._is_checked[chunk] = True
        begin = self._position - first
        self._position += size
        return data[begin : begin + size]

    def _damage(self) -> UserError:
        return UserError(f"{self._path} is damaged: it does not match its checksums. {self._remedy}")
