"""How far a job is: a bar on a terminal, a plain line now and then in a file, and a file that other programs read."""

import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pipeline.data.bucket import AnyPath
from pipeline.data.manifest import replacing

PROGRESS_FILE = "progress.json"
_SECONDS_BETWEEN_LINES = 10.0
# Most files are read within less, and need no bar.
_SECONDS_BEFORE_BAR = 1.0


class Progress:
    """Counts images and bytes of `total` images in `shards` shards; shows images/s, MB/s and time left on stderr.

    total: None while a source is being listed, and nobody knows. done: what is done to them, for the line.
    folder: of progress.json, replaced every 10 seconds by what a dashboard wants to know, gone when the block ends; None is
    no file. One that does not change any more was left by a job that was killed. Not in a bucket: to tell it that a job
    failed because the bucket is out of reach would mean to wait for it once more.
    """

    def __init__(self, total: int | None, shards: int = 0, folder: AnyPath | None = None, done: str = "") -> None:
        self.total, self.total_shards = total, shards
        self.file = folder / PROGRESS_FILE if isinstance(folder, Path) else None
        self._done = f"{done} " if done else ""
        self.images = self.bytes = self.shards = self.retries = 0
        self._start = self._shown = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=done or None, unit=" images", unit_scale=True) if is_terminal else None
        self._write()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def add(self, images: int, num_bytes: int) -> None:
        """One more shard is done, of so many images and bytes."""
        self.images += images
        self.bytes += num_bytes
        self.shards += 1
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.bytes / 1e6 / self._seconds():.1f} MB/s", refresh=False)
            self._bar.update(images)
        if time.monotonic() - self._shown < _SECONDS_BETWEEN_LINES:
            return
        self._shown = time.monotonic()
        self._write()
        if self._bar is None:
            print(self._line(self._seconds()), file=sys.stderr, flush=True)

    def retried(self, reason: str) -> None:
        """A task was lost with its worker or node, and is run again."""
        self.retries += 1
        tqdm.write(f"{reason} The task is run again; retries so far: {self.retries:,}", file=sys.stderr)
        self._write()

    def _line(self, seconds: float) -> str:
        rate = f"{self.images / seconds:,.0f} images/s"
        if self.total is None:
            return f"{self._done}{self.images:,} images, {rate}"
        share = f"{self._done}{self.images:,} of {self.total:,} images ({self.images / self.total:.0%})"
        return f"{share}, {rate}, {self.bytes / 1e6 / seconds:.1f} MB/s, {duration(self._left(seconds) or 0)} left"

    def _write(self) -> None:
        if self.file is None:
            return
        seconds = self._seconds()
        state = {
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "images": self.images,
            "total_images": self.total,
            "shards": self.shards,
            "total_shards": self.total_shards,
            "bytes": self.bytes,
            "retries": self.retries,
            "images_per_second": self.images / seconds,
            "bytes_per_second": self.bytes / seconds,
            "seconds": seconds,
            "seconds_left": self._left(seconds),
        }
        with replacing(self.file) as file:
            file.write((json.dumps(state, indent=1) + "\n").encode())

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-3)

    def _left(self, seconds: float) -> float | None:
        """Seconds to go after so many; None as long as nothing is done."""
        return seconds / self.images * (self.total - self.images) if self.images and self.total else None


class Reading:
    """A file that is read once, from its start; shows bytes, MB/s and time left on stderr.

    done: what is done to it, for the line. Raises FileNotFoundError.
    """

    def __init__(self, path: AnyPath, done: str) -> None:
        self._name, self._size, self._bytes = f"{done} {path.name}", path.stat().st_size, 0
        self._file = path.open("rb")
        self._start = self._shown = time.monotonic()
        self._bar = (
            tqdm(total=self._size, desc=self._name, unit="B", unit_scale=True, delay=_SECONDS_BEFORE_BAR)
            if sys.stderr.isatty()
            else None
        )

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._bar is not None:
            self._bar.close()

    def read(self, size: int = -1) -> bytes:
        """As of any file."""
        part = self._file.read(size)
        self._bytes += len(part)
        if self._bar is not None:
            self._bar.update(len(part))
        elif part and time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            print(self._line(max(self._shown - self._start, 1e-3)), file=sys.stderr, flush=True)
        return part

    def _line(self, seconds: float) -> str:
        share = f"{self._name}: {self._bytes / 1e6:,.1f} of {self._size / 1e6:,.1f} MB ({self._bytes / self._size:.0%})"
        left = seconds / self._bytes * (self._size - self._bytes)
        return f"{share}, {self._bytes / 1e6 / seconds:.1f} MB/s, {duration(left)} left"


def duration(seconds: float) -> str:
    """'8 s', '4 min', '2.5 h'"""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
