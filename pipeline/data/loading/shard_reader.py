"""Reading samples by offset from the shards of a split: local files, or objects in a bucket, cached or in ranges."""

import contextlib
import os
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipeline.data.dataset.manifest import Split
from pipeline.data.storage.bucket import BucketPath, to_path
from pipeline.data.storage.cache import ShardCache
from pipeline.data.storage.content import content_hash

Request = TypeVar("Request", bound=tuple)

# Ranks read a handful of shards at a time; the limit keeps long runs below the usual 1,024 open files.
_MAX_OPEN_SHARDS = 256
# How often the cache is told that a shard is still read; well below ShardCache.in_use_seconds.
_SECONDS_BETWEEN_TOUCHES = 10.0
# When the cache has no room for a shard, its samples are read from the bucket for so long before it is asked again.
_SECONDS_WITHOUT_CACHE = 30.0
# How much of its share of the cache a rank may fill with the shards of its next samples, by how many downloads at a
# time, and how many samples it may look at to find them.
_SHARE_AHEAD, _DOWNLOADS_AHEAD, _MAX_ROWS_AHEAD = 0.5, 2, 2**17
# A few at a time, so that the first batch need not wait until all of them were looked at.
_REQUESTS_AT_ONCE = 8


class ShardReader:
    """Reads the encoded bytes of samples of one split; safe to call from many threads."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.cache = split.storage.cache
        self._opened: OrderedDict[int, _File | _Ranges] = OrderedDict()
        # What is wrong with shards that were found missing or changed: asking again for each sample would cost hours.
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        self._ahead: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._downloaders: list[threading.Thread] = []

    def read(self, row: int) -> bytes:
        """The image file of sample `row`.

        Raises OSError when its shard is missing, shorter than the manifest says or (in a bucket) another one, and when the
        image's bytes are not those that the manifest has the hash of; StorageError when the bucket or the cache cannot be
        used at all.
        """
        shard = int(self.split.shard_of(np.asarray(row)))
        data = self._shard(shard).read_at(int(self.split.offsets[row]), int(self.split.sizes[row]))
        expected = self.split.hash_of(row)
        if expected is not None and content_hash(data) != expected:
            raise OSError(f"its bytes in {self.split.shard_paths[shard]} are not those of the manifest (xxh128)")
        return data

    def ahead(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The same requests, (rows, ...) each; with a cache, shards of later ones are downloaded in the background."""
        if self.cache is None or not isinstance(self._path(0), BucketPath):
            yield from requests
            return
        self._start_downloaders(self.cache)
        limit = _SHARE_AHEAD * self.cache.max_bytes / _ranks_on_node()
        coming = iter(requests)
        waiting: deque[tuple[Request, np.ndarray]] = deque()
        uses: Counter[int] = Counter()
        num_bytes = num_rows = 0
        while True:
            for _ in range(_REQUESTS_AT_ONCE):
                if waiting and (num_bytes >= limit or num_rows >= _MAX_ROWS_AHEAD):
                    break
                request = next(coming, None)
                if request is None:
                    break
                shards = np.unique(self.split.shard_of(request[0]))
                for shard in shards.tolist():
                    if not uses[shard]:
                        num_bytes += int(self.split.shard_bytes[shard])
                        self._ahead.put(shard)
                    uses[shard] += 1
                num_rows += len(request[0])
                waiting.append((request, shards))
            if not waiting:
                return
            request, shards = waiting.popleft()
            yield request
            num_rows -= len(request[0])
            for shard in shards.tolist():
                uses[shard] -= 1
                if not uses[shard]:
                    del uses[shard]
                    num_bytes -= int(self.split.shard_bytes[shard])

    def close(self) -> None:
        for _ in self._downloaders:
            self._ahead.put(None)
        self._downloaders = []
        self._opened.clear()

    def _shard(self, shard: int) -> "_File | _Ranges":
        with self._lock:
            if shard in self._bad:
                raise OSError(self._bad[shard])
            opened = self._opened.get(shard)
            if opened is not None and time.monotonic() < opened.until:
                self._opened.move_to_end(shard)
                return opened
        # Two threads may open the same one; whoever reads an object that was dropped here still holds it.
        opened = self._open(shard)
        with self._lock:
            self._opened[shard] = opened
            self._opened.move_to_end(shard)
            for other in [other for other, file in self._opened.items() if file.is_evicted()]:
                del self._opened[other]
            while len(self._opened) > _MAX_OPEN_SHARDS:
                self._opened.popitem(last=False)
        return opened

    def _open(self, shard: int) -> "_File | _Ranges":
        path = self._path(shard)
        if isinstance(path, Path):
            return _File(os.open(path, os.O_RDONLY), str(path))
        size = int(self.split.shard_bytes[shard])
        try:
            if self.cache is not None:
                file = self.cache.open(path, size, self._sha256(shard))
                if file is not None:
                    return _File(file, str(path), cached=True)
            return _Ranges(path, size, time.monotonic() + _SECONDS_WITHOUT_CACHE if self.cache else float("inf"))
        except OSError as error:
            self._bad[shard] = str(error)
            raise

    def _path(self, shard: int) -> Path | BucketPath:
        return to_path(self.split.shard_paths[shard], self.split.storage.retry)

    def _sha256(self, shard: int) -> str:
        return self.split.shard_sha256[shard].as_py()

    def _start_downloaders(self, cache: ShardCache) -> None:
        def work() -> None:
            while (shard := self._ahead.get()) is not None:
                # Whatever is wrong, whoever reads the shard will meet it and say it.
                with contextlib.suppress(Exception):
                    self._fetch(cache, shard)

        # Daemons, so that a download does not hold up the end of a process that failed.
        for _ in range(_DOWNLOADS_AHEAD - len(self._downloaders)):
            self._downloaders.append(threading.Thread(target=work, name="shards ahead", daemon=True))
            self._downloaders[-1].start()

    def _fetch(self, cache: ShardCache, shard: int) -> None:
        path, sha256 = self._path(shard), self._sha256(shard)
        assert isinstance(path, BucketPath)
        if shard not in self._bad and not cache.has(sha256):
            file = cache.open(path, int(self.split.shard_bytes[shard]), sha256)
            if file is not None:
                os.close(file)


class _File:
    """An open local file; closed when the last thread that reads it lets it go."""

    until = float("inf")

    def __init__(self, file: int, name: str, cached: bool = False) -> None:
        self._file, self._name, self._cached = file, name, cached
        self._touched = time.monotonic()

    def __del__(self) -> None:
        os.close(self._file)

    def read_at(self, offset: int, size: int) -> bytes:
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise OSError(f"{self._name} ends before byte {offset + size}")
        if self._cached and time.monotonic() - self._touched > _SECONDS_BETWEEN_TOUCHES:
            self._touched = time.monotonic()
            os.utime(self._file)
        return data

    def is_evicted(self) -> bool:
        """Whether the cache has given it up: open, it still takes the disk's space."""
        return self._cached and os.fstat(self._file).st_nlink == 0


class _Ranges:
    """A shard in a bucket, read in ranges. until: when to look again for a better way."""

    def __init__(self, path: BucketPath, size: int, until: float) -> None:
        reader = path.reader()
        if reader.size() != size:
            raise OSError(f"{path} has {reader.size()} bytes, but {size} in the manifest: it was replaced or damaged.")
        self.read_at, self.until = reader.read_at, until

    def is_evicted(self) -> bool:
        return False


def _ranks_on_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
