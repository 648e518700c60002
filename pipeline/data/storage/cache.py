"""Whole shards of a bucket on a local disk, within a byte limit, shared by the ranks of a node.

The file of a shard is named by its SHA-256, so it serves every data set, rank and run, and a shard that changed in the
bucket is another file. A shard is downloaded to a file `.part`, which is locked by the downloading process and renamed
once its checksum is right. When that process is killed, the lock ends with it and the next process takes over.
"""

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base.locks import FileLock, locked
from pipeline.data.storage.bucket import BucketPath
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.data.storage.tars import TarsToCheck
from pipeline.process.waits import waiting

_ATTEMPTS = 2
_READY, _COMING = ".shard", ".part"


class ShardCache:
    """A folder of shards. max_bytes: limit for everything in it; the least recently read shards are evicted first.

    in_use_seconds: a shard read within this time is not evicted. When all shards are in use, there is no room, and the
    caller reads byte ranges from the bucket instead, which is better than to download shards again and again.
    """

    def __init__(self, folder: Path, max_bytes: int, in_use_seconds: float = 60.0) -> None:
        self.folder, self.max_bytes, self.in_use_seconds = folder, max_bytes, in_use_seconds
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, path: BucketPath, size: int, sha256: str) -> int | None:
        """A file descriptor of the shard at `path`, downloaded if needed; None without room. The caller closes it.

        An open file stays readable when it is evicted. Raises OSError when the object is missing, or twice in a row
        differs from `size` and `sha256` (hex), which the manifest has; StorageError when the folder fails.
        """
        try:
            return self._open(path, size, sha256)
        except OSError as error:
            # Errors of the object have no number, or its name. All others are of this disk, and no fault of a sample.
            if error.errno is None or error.filename == str(path):
                raise
            raise StorageError(
                f"data.cache = {self.folder} cannot store shards ({error.strerror}). Choose another folder, or a"
                " smaller data.cache_gb."
            ) from None

    def _open(self, path: BucketPath, size: int, sha256: str) -> int | None:
        ready, coming = (self.folder / f"{sha256}{ending}" for ending in (_READY, _COMING))
        while True:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(ready, os.O_RDONLY)
                os.utime(file)
                return file
            # One process downloads, the others wait for it.
            downloaded = waiting(f"{path} to be downloaded", path.retry.seconds, path.retry.setting, kind="a shard")
            with downloaded, locked(coming) as lock:
                # While we waited, another process may have finished the download, or removed the partial file.
                if ready.exists() or not lock.is_current():
                    continue
                try:
                    if not self._make_room(lock.file, size):
                        coming.unlink()
                        return None
                    self._download(path, lock.file, size, sha256)
                    # The bytes before the name: after a power failure the file would have its size, and zeros in place
                    # of images.
                    os.fsync(lock.file)
                    os.rename(coming, ready)
                except BaseException:
                    coming.unlink(missing_ok=True)
                    raise

    def _make_room(self, file: int, size: int) -> bool:
        """Evict shards until `size` more bytes fit, and allocate them to `file`; returns whether they fit."""
        if size > self.max_bytes:
            return False
        with locked(self.folder / "lock"):  # One process at a time.
            used, ready = 0, []
            for entry in os.scandir(self.folder):
                with contextlib.suppress(FileNotFoundError):  # Renamed or evicted since scandir saw it.
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
            if used + size > self.max_bytes:
                return False
            # Other processes count these bytes as used; and a full disk fails here, not in the middle of the download.
            os.ftruncate(file, 0)
            os.posix_fallocate(file, 0, max(size, 1))
            return True

    def _download(self, path: BucketPath, file: int, size: int, sha256: str) -> None:
        """Write the shard to `file`. Raises OSError when it differs from the manifest."""
        for _ in range(_ATTEMPTS):
            path.reader(size).copy_to(file)
            os.ftruncate(file, size)
            with open(os.dup(file), "rb") as content:
                content.seek(0)
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            if digest == sha256:
                return
        raise OSError(
            f"{path} is not the shard in the manifest (sha256 {digest[:12]}, not {sha256[:12]}): it was replaced or"
            " damaged. Copy it again, or run the same launch/shard.py again to re-make it."
        )


def _remove_abandoned(path: Path) -> bool:
    """Remove a partial download whose process has ended; returns whether it was one."""
    with contextlib.closing(FileLock(path, create=False)) as lock:
        if is_abandoned := lock.acquire(wait=False):
            path.unlink()
        return is_abandoned


@dataclass(frozen=True)
class Storage:
    """How the files of a data set are read; shared by all its readers.

    unchecked: tars of the splits that are opened (`TarsToCheck`), which ranks check together later; None: each process
    checks them when it opens a split.
    """

    retry: Retry = field(default_factory=Retry)
    cache: ShardCache | None = None
    unchecked: list[TarsToCheck] | None = None

    @classmethod
    def create(cls, retry_minutes: float, cache: str, cache_gb: float, num_ranks: int = 1) -> "Storage":
        """From the settings data.retry_minutes, data.cache (a folder, created here; "" for none) and data.cache_gb.

        num_ranks: how many check tars together.
        """
        retry = Retry(retry_minutes * 60, "data.retry_minutes")
        shards = ShardCache(Path(cache), int(cache_gb * 1e9)) if cache else None
        return cls(retry, shards, [] if num_ranks > 1 else None)
