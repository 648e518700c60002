"""Reads samples by offset from the shards of a split: local files, or objects of a bucket, cached or by range
requests.
"""

import contextlib
import os
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.base.errors import is_outage
from pipeline.data.dataset.manifest import Split
from pipeline.data.storage.bucket import BucketPath, to_path
from pipeline.data.storage.content import content_hash
from pipeline.data.storage.retry import StorageError
from pipeline.process.launcher import ranks_on_host

Request = TypeVar("Request", bound=tuple)

# Ranks read few shards at a time; the limit keeps long runs below the usual limit of 1,024 open files.
_MAX_OPEN_SHARDS = 256
# Interval of marking a cached shard as in use; well below ShardCache.in_use_seconds.
_SECONDS_BETWEEN_TOUCHES = 10.0
# When the cache has no room for a shard, it is read from the bucket for this long before the cache is tried again.
_SECONDS_WITHOUT_CACHE = 30.0
# Prefetching of shards into the cache: fraction of the rank's share of the cache, concurrent downloads, and the largest
# number of rows to look ahead.
_SHARE_AHEAD, _DOWNLOADS_AHEAD, _MAX_ROWS_AHEAD = 0.5, 2, 2**17


class ShardReader:
    """Reads the encoded bytes of samples of one split. Thread-safe."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.cache = split.storage.cache
        self._opened: OrderedDict[int, _OpenFile | _Ranges] = OrderedDict()
        # Errors of shards that were found changed: retrying for each of their samples would take hours.
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        self._ahead: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._downloaders: list[threading.Thread] = []

    def read(self, row: int) -> bytes:
        """Returns the image file of sample `row`.

        Raises OSError when its shard is truncated or (in a bucket) was replaced, and when the bytes do not match the
        hash in the manifest: damaged data, which costs these samples. Raises StorageError when the shard is missing or
        cannot be read (permission; a disk or a file server that fails longer than `Retry.seconds`), or the bucket or
        the cache is not usable: the images are not at fault.
        """
        shard = int(self.split.shard_of(row))
        part, own = self.split.part_of(row)
        try:
            read = partial(self._read, shard, *part.place_of(own))
            name, data = self.split.storage.retry.read_file(self.split.shard_paths[shard], read)
        except OSError as error:
            if error.errno is None:  # Only errors of the operating system and of the store have a number.
                raise
            raise StorageError(
                f"{self.split.shard_paths[shard]} cannot be read: {error.strerror or error}. When that is mended, the"
                " same command continues."
            ) from None
        expected = part.hash_of(own)
        if expected is not None and content_hash(data) != expected:
            raise OSError(f"its bytes in {name} are not those of the manifest (xxh128)")
        return data

    def _read(self, shard: int, offset: int, size: int) -> tuple[str, bytes]:
        """Returns (name of the shard, bytes). Raises OSError."""
        try:
            opened = self._shard(shard)
            return opened.name, opened.read_at(offset, size)
        except OSError as error:
            if is_outage(error):  # Its handle may be stale for good.
                with self._lock:
                    self._opened.pop(shard, None)
            raise

    def ahead(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the same requests, (rows, ...) each; with a cache, shards of later ones are downloaded in the
        background.
        """
        in_bucket = np.array(["://" in path for path in self.split.shard_paths])
        if self.cache is None or not in_bucket.any():
            yield from requests
            return
        # Daemon threads, so that a download does not delay the exit of a failed process.
        for _ in range(_DOWNLOADS_AHEAD - len(self._downloaders)):
            thread = threading.Thread(target=self._download, name="shards ahead", daemon=True)
            self._downloaders.append(thread)
            thread.start()
        limit = _SHARE_AHEAD * self.cache.max_bytes / ranks_on_host()
        waiting: deque[tuple[Request, list[int]]] = deque()
        uses: Counter[int] = Counter()  # By requests that wait.

        def next_request() -> Iterator[Request]:
            nonlocal uses
            request, shards = waiting.popleft()
            yield request
            uses -= Counter(shards)

        for request in requests:
            shards = np.unique(self.split.shard_of(request[0]))
            shards = shards[in_bucket[shards]].tolist()
            for shard in shards:
                if shard not in uses:
                    self._ahead.put(shard)
            uses.update(shards)
            waiting.append((request, shards))
            while waiting and (
                self.split.shard_bytes[[*uses]].sum() >= limit or len(waiting) * len(request[0]) >= _MAX_ROWS_AHEAD
            ):
                yield from next_request()
        while waiting:
            yield from next_request()

    def close(self) -> None:
        for _ in self._downloaders:
            self._ahead.put(None)
        self._downloaders = []
        self._opened.clear()

    def _shard(self, shard: int) -> "_OpenFile | _Ranges":
        with self._lock:
            if shard in self._bad:
                raise OSError(self._bad[shard])
            opened = self._opened.get(shard)
            if opened is not None and time.monotonic() < opened.until:
                self._opened.move_to_end(shard)
                return opened
        # Two threads may open the same shard; a thread that still reads a dropped object keeps a reference to it.
        opened = self._open(shard)
        with self._lock:
            self._opened[shard] = opened
            self._opened.move_to_end(shard)
            for other in [other for other, file in self._opened.items() if file.is_evicted()]:
                del self._opened[other]
            while len(self._opened) > _MAX_OPEN_SHARDS:
                self._opened.popitem(last=False)
        return opened

    def _open(self, shard: int) -> "_OpenFile | _Ranges":
        path = self._path(shard)
        if isinstance(path, Path):
            return _OpenFile(os.open(path, os.O_RDONLY), str(path))
        size = int(self.split.shard_bytes[shard])
        try:
            if self.cache and (file := self._open_cached(shard)) is not None:
                return _OpenFile(file, f"{path} (its copy in {self.cache.folder})", cached=True)
            return _Ranges(path, size, time.monotonic() + _SECONDS_WITHOUT_CACHE if self.cache else float("inf"))
        except OSError as error:
            if error.errno is None:
                self._bad[shard] = str(error)
            raise

    def _path(self, shard: int) -> Path | BucketPath:
        return to_path(self.split.shard_paths[shard], self.split.storage.retry)

    def _open_cached(self, shard: int) -> int | None:
        path, sha256 = self._path(shard), self.split.shard_sha256[shard].as_py()
        assert self.cache is not None
        assert isinstance(path, BucketPath)
        return self.cache.open(path, int(self.split.shard_bytes[shard]), sha256)

    def _download(self) -> None:
        """Download the shards of the queue into the cache, until None is read."""
        while (shard := self._ahead.get()) is not None:
            # The thread that reads the shard meets the same error and reports it.
            with contextlib.suppress(Exception):
                if shard not in self._bad and (file := self._open_cached(shard)) is not None:
                    os.close(file)


class _OpenFile:
    """An open local file, closed when the last reference to it is gone."""

    until = float("inf")

    def __init__(self, file: int, name: str, cached: bool = False) -> None:
        self._file, self.name, self._cached = file, name, cached
        self._touched = time.monotonic()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # The file server may fail.
            os.close(self._file)

    def read_at(self, offset: int, size: int) -> bytes:
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise OSError(f"{self.name} ends before byte {offset + size}")
        if self._cached and time.monotonic() - self._touched > _SECONDS_BETWEEN_TOUCHES:
            self._touched = time.monotonic()
            os.utime(self._file)
        return data

    def is_evicted(self) -> bool:
        """Whether the cache has deleted the file, which uses disk space as long as it is open."""
        try:
            return self._cached and os.fstat(self._file).st_nlink == 0
        except OSError:
            # Another host has deleted it, if the cache is on a file server: opened again, the shard is downloaded.
            return True


class _Ranges:
    """A shard in a bucket, read by range requests. until: time at which the cache is tried again."""

    def __init__(self, path: BucketPath, size: int, until: float) -> None:
        self.read_at, self.name, self.until = path.reader(size).read_at, str(path), until

    def is_evicted(self) -> bool:
        return False
