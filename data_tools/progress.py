"""Progress of a job: a bar on a terminal, else a log line every 10 seconds, and progress.json for other programs."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from pipeline.base.progress import ProgressFile, duration
from pipeline.base.words import significant
from pipeline.data.storage.bucket import AnyPath, file_size

_SECONDS_BETWEEN_FILES = 10.0
_SECONDS_BETWEEN_LINES = 10.0
# What is shorter shows no bar.
_SECONDS_BEFORE_BAR = 1.0


class ProgressMeter:
    """Counts finished images and bytes; shows images/s, MB/s and the remaining time on stderr.

    total: number of images; None while it is unknown. shards: number of shards. done: the operation as a participle,
    such as "sharded". folder: where progress.json is written, or None. A thread replaces the file every ten seconds,
    because a shard may take minutes; it is removed when the block ends, so a file that no longer changes is from a
    killed job. No file is written to an object store: the job may be ending because the store cannot be reached.
    """

    def __init__(self, total: int | None, shards: int = 0, folder: AnyPath | None = None, done: str = "") -> None:
        self.total, self.total_shards = total, shards
        self.file = ProgressFile(folder) if isinstance(folder, Path) else None
        self._done = done
        self.images = self.bytes = self.shards = self.retries = 0
        # What the rates count, and since when: existing shards are only checked, which is faster, and come first.
        self._made_images = self._made_bytes = 0
        self._start = self._shown = self._making_since = time.monotonic()
        is_terminal = sys.stderr.isatty()
        shown = {"desc": done or None, "unit": " images", "delay": _SECONDS_BEFORE_BAR}
        self._bar = tqdm(total=total, **shown) if is_terminal else None
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="progress", daemon=True)
        if self.file is not None:
            self._write()
            self._writer.start()

    def __enter__(self) -> "ProgressMeter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.file is not None:
            self._ended.set()
            self._writer.join()
            self.file.remove()

    def add(self, images: int, num_bytes: int, made: bool = True) -> None:
        """Count one finished shard. made: False (an existing shard) excludes it from the rates."""
        with self._counting:
            self.images += images
            self.bytes += num_bytes
            self.shards += 1
            if made:
                self._made_images += images
                self._made_bytes += num_bytes
            elif not self._made_images:
                self._making_since = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._state()['bytes_per_second'] / 1e6:.1f} MB/s", refresh=False)
            self._bar.update(images)
        elif time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def retried(self, reason: str) -> None:
        """Count and report a retry: a task was lost with its worker or node."""
        self.retries += 1
        tqdm.write(f"{reason} The task is run again; retries so far: {self.retries:,}", file=sys.stderr)
        self._write()

    def _line(self) -> str:
        state = self._state()
        left = "" if state["seconds_left"] is None else f", {duration(state['seconds_left'])} left"
        return (
            f"{self._done} {self.images:,} of {self.total or 'unknown'} images,"
            f" {significant(state['images_per_second'])} images/s, {state['bytes_per_second'] / 1e6:.1f} MB/s{left}"
        )

    def _keep_writing(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_FILES):
            # A full disk, for example, is reported where the job writes its data.
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        if self.file is not None:
            self.file.write(self._state())

    def _state(self) -> dict[str, Any]:
        with self._counting:
            now = time.monotonic()
            seconds = max(now - self._making_since, 1e-3)
            images_per_second = self._made_images / seconds
            left = self.total - self.images if self.total else 0
            return {
                "phase": self._done,
                "images": self.images,
                "total_images": self.total,
                "shards": self.shards,
                "total_shards": self.total_shards,
                "bytes": self.bytes,
                "retries": self.retries,
                "images_per_second": images_per_second,
                "bytes_per_second": self._made_bytes / seconds,
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


def data_size(num_bytes: int) -> str:
    """'12 KB', '3.4 MB'"""
    return f"{num_bytes / 1e3:,.0f} KB" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"
