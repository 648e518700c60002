"""Progress of a job: a bar on a terminal, else a log line every 10 seconds, and progress.json for other programs."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from pipeline.base.progress import ProgressFile
from pipeline.base.words import si
from pipeline.data.storage.bucket import AnyPath, file_size
from pipeline.process.waits import Work

_SECONDS_BETWEEN_FILES = 10.0
_SECONDS_BETWEEN_LINES = 10.0
# What is shorter shows no bar.
_SECONDS_BEFORE_BAR = 1.0


class ProgressMeter(Work):
    """Counts finished images and bytes; shows images, MB/s and the remaining time on stderr during the block.

    total: number of images; None while it is unknown. shards: number of shards. folder: where progress.json is written,
    or None. done: the operation as a participle, such as "sharded". A thread replaces the file every ten seconds,
    because a shard may take minutes; it is removed when the block ends, so a file that no longer changes is from a
    killed job. No file is written to an object store: the job may be ending because the store cannot be reached.
    """

    def __init__(self, total: int | None, shards: int = 0, folder: AnyPath | None = None, done: str = "") -> None:
        super().__init__(done, total)
        self.file = ProgressFile(folder) if isinstance(folder, Path) else None
        self.total_shards, self.shards, self.retries = shards, 0, 0
        # first_bytes: before what the rates count, as _first for images.
        self.bytes = self._first_bytes = 0
        self._is_making = False
        self._start = self.begin
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="progress", daemon=True)

    def __enter__(self) -> "ProgressMeter":
        if self.file is not None:
            self._write()
            self._writer.start()
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self.file is not None:
            self._ended.set()
            self._writer.join()
            self.file.remove()

    def add(self, images: int, num_bytes: int, made: bool = True) -> None:
        """Count one finished shard. made: False for an existing one; these are only checked, which is faster, and come
        first: the rates do not count them.
        """
        self.bytes += num_bytes
        self.shards += 1
        self._is_making |= made
        self.note = si(self._state()["bytes_per_second"], "B/s")
        self.advance(images)
        if not self._is_making:
            self._first_bytes = self.bytes
            self.restart()

    def retried(self, reason: str) -> None:
        """Count and report a retry: a task was lost with its worker or node."""
        self.retries += 1
        tqdm.write(f"{reason} The task is run again; retries so far: {self.retries:,}", file=sys.stderr)
        self._write()

    def _keep_writing(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_FILES):
            # A full disk, for example, is reported where the job writes its data.
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        if self.file is not None:
            self.file.write(self._state())

    def _state(self) -> dict[str, Any]:
        now = time.monotonic()
        seconds = max(now - self.begin, 1e-3)
        images_per_second = (self.done - self._first) / seconds
        left = self.total - self.done if self.total else 0
        return {
            "phase": self.what,
            "images": self.done,
            "total_images": self.total,
            "shards": self.shards,
            "total_shards": self.total_shards,
            "bytes": self.bytes,
            "retries": self.retries,
            "images_per_second": images_per_second,
            "bytes_per_second": (self.bytes - self._first_bytes) / seconds,
            "seconds": now - self._start,
            "seconds_left": left / images_per_second if images_per_second and self.total else None,
        }


@contextlib.contextmanager
def reading(path: AnyPath, done: str) -> Iterator[BinaryIO]:
    """A file read once, sequentially, whose progress is shown on stderr. done: the operation as a participle, such as
    "unpacked".
    """
    interval = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    with path.open("rb") as file:
        shown = {"total": file_size(path), "desc": f"{done} {path.name}", "unit_scale": True}
        with tqdm.wrapattr(file, "read", delay=_SECONDS_BEFORE_BAR, mininterval=interval, **shown) as wrapped:
            yield wrapped
