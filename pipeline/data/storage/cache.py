"""Whole shards of a bucket on a local disk, within a byte limit, shared by the ranks of a node.

A shard is a file named by its checksum, so it is the same for every data set, rank and run, and one that changed in the
bucket is another file. It is downloaded under another name and renamed once its checksum is right. Whoever downloads
holds a lock on that file (flock), which ends with the process: the next one takes over, and nothing is left to clean up.
"""

import contextlib
import hashlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.data.storage.bucket import BucketPath, ObjectReader
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.errors import UserError
from pipeline.locks import FileLock
from pipeline.settings.run import DataConfig

_ATTEMPTS = 2
_READY, _COMING = ".shard", ".part"


class ShardCache:
    """A folder of shards. max_bytes: of all that is in it; the least recently read go first.

    in_use_seconds: a shard read within this time is not evicted. When all are in use, there is no room, and the caller
    reads ranges from the bucket instead: better than to download shards again and again.
    downloads, evictions: of this process.
    """

    def __init__(self, folder: Path, max_bytes: int, in_use_seconds: float = 60.0) -> None:
        self.folder, self.max_bytes, self.in_use_seconds = folder, max_bytes, in_use_seconds
        self.downloads = self.evictions = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"data.cache = {folder} cannot be made ({error.strerror}). Choose another folder."
            ) from None

    def open(self, path: BucketPath, size: int, sha256: str) -> int | None:
        """A file descriptor (the caller's) of the shard at `path`, downloaded if need be; None when there is no room.

        What is open stays readable when it is evicted. Raises OSError when the object is not there, or is not the one
        that the manifest knows by `size` and `sha256` (hex), twice in a row; StorageError when the folder fails.
        """
        try:
            return self._open(path, size, sha256)
        except OSError as error:
            # Errors of the object have no number, or name it. All others are of this disk, and no sample's fault.
            if error.errno is None or error.filename == str(path):
                raise
            raise StorageError(
                f"data.cache = {self.folder} cannot hold shards ({error.strerror}). Choose another folder, or a smaller "
                "data.cache_gb."
            ) from None

    def _open(self, path: BucketPath, size: int, sha256: str) -> int | None:
        ready, coming = (self.folder / f"{sha256}{ending}" for ending in (_READY, _COMING))
        while True:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(ready, os.O_RDONLY)
                os.utime(file)
                return file
            with FileLock(coming) as lock:
                # While we waited, another process may have finished the download, or evicted the unfinished file.
                if ready.exists() or not lock.is_current():
                    continue
                try:
                    if not self._make_room(lock.file, size):
                        coming.unlink()
                        return None
                    self._download(path, lock.file, size, sha256)
                    os.rename(coming, ready)
                except BaseException:
                    coming.unlink(missing_ok=True)
                    raise

    def has(self, sha256: str) -> bool:
        """Whether a shard is there already."""
        return (self.folder / f"{sha256}{_READY}").exists()

    def _make_room(self, file: int, size: int) -> bool:
        """Evict until `size` more bytes fit, and take them for `file`. One process at a time."""
        if size > self.max_bytes:
            return False
        with FileLock(self.folder / "lock"):
            used, ready = 0, []
            for entry in os.scandir(self.folder):
                with contextlib.suppress(FileNotFoundError):  # It was renamed or evicted meanwhile.
                    stat = entry.stat()
                    if entry.name.endswith(_READY):
                        ready.append((stat.st_mtime, stat.st_size, entry.path))
                    elif entry.name.endswith(_COMING) and (
                        os.path.samestat(stat, os.fstat(file)) or _remove_abandoned(Path(entry.path))
                    ):
                        continue
                    used += stat.st_size
            newest = time.time() - self.in_use_seconds
            for read_at, num_bytes, path in sorted(ready):
                if used + size <= self.max_bytes or read_at > newest:
                    break
                os.unlink(path)
                used -= num_bytes
                with self._lock:
                    self.evictions += 1
            if used + size > self.max_bytes:
                return False
            # Others see these bytes as taken; and a full disk is met here, not in the middle.
            os.ftruncate(file, 0)
            os.posix_fallocate(file, 0, max(size, 1))
            return True

    def _download(self, path: BucketPath, file: int, size: int, sha256: str) -> None:
        for _ in range(_ATTEMPTS):
            found = _fetch(path, file, size)
            if found == sha256:
                with self._lock:
                    self.downloads += 1
                return
        raise OSError(
            f"{path} is not the shard that the manifest knows (sha256 {found[:12]}, not {sha256[:12]}): it was replaced "
            "or damaged. Copy it again, or run the same launch/shard.py again to re-make it."
        )


def _fetch(path: BucketPath, file: int, size: int) -> str:
    """Write the object into a file; hex sha256 of what came. Raises OSError when it has another size."""
    reader = ObjectReader(path)
    if (there := reader.size()) != size:
        raise OSError(f"{path} has {there} bytes, but {size} in the manifest: it was replaced or damaged.")
    reader.copy_to(file)
    os.ftruncate(file, size)
    with open(os.dup(file), "rb") as content:
        content.seek(0)
        return hashlib.file_digest(content, "sha256").hexdigest()


def _remove_abandoned(path: Path) -> bool:
    """Remove a partial download whose process has ended; returns whether it was one."""
    lock = FileLock(path, create=False)
    try:
        if is_abandoned := lock.acquire(wait=False):
            path.unlink()
        return is_abandoned
    finally:
        lock.close()


@dataclass(frozen=True)
class Storage:
    """How the files of a data set are reached; shared by all its readers."""

    retry: Retry = field(default_factory=Retry)
    cache: ShardCache | None = None

    @classmethod
    def of(cls, config: DataConfig) -> "Storage":
        """As the settings of a run say. Makes the cache's folder."""
        cache = ShardCache(Path(config.cache).expanduser(), int(config.cache_gb * 1e9)) if config.cache else None
        return cls(Retry(config.retry_minutes * 60), cache)
