"""How far a job is: a bar on a terminal, a plain line now and then in a file, and a file that other programs read."""

import contextlib
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from pipeline.data.storage.bucket import AnyPath, file_size
from pipeline.progress import ProgressFile, duration

_SECONDS_BETWEEN_FILES = 10.0
_SECONDS_BETWEEN_LINES = 10.0
# Most files are read within less, and need no bar.
_SECONDS_BEFORE_BAR = 1.0


class Progress:
    """Counts images and bytes of `total` images in `shards` shards; shows images/s, MB/s and time left on stderr.

    total: None while a source is being listed, and nobody knows. done: what is done to them, for the line and the file.
    folder: of progress.json, replaced every 10 seconds (by a thread: a shard may take minutes) by what a dashboard wants to
    know, gone when the block ends; None is no file. One that does not change any more was left by a job that was killed. Not
    in a bucket: to tell it that a job failed because the bucket is out of reach would mean to wait for it once more.
    """

    def __init__(self, total: int | None, shards: int = 0, folder: AnyPath | None = None, done: str = "") -> None:
        self.total, self.total_shards = total, shards
        self.file = ProgressFile(folder) if isinstance(folder, Path) else None
        self._done = done
        self.images = self.bytes = self.shards = self.retries = 0
        # What was made now, and since when: shards that are only checked pass faster, and come first.
        self._made_images = self._made_bytes = 0
        self._start = self._shown = self._making_since = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=done or None, unit=" images", unit_scale=True) if is_terminal else None
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._keep_writing, name="progress", daemon=True)
        if self.file is not None:
            self._write()
            self._writer.start()

    def __enter__(self) -> "Progress":
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
        """One more shard is done, of so many images and bytes. made: False leaves it out of the rates."""
        self.images += images
        self.bytes += num_bytes
        self.shards += 1
        if made:
            self._made_images += images
            self._made_bytes += num_bytes
        elif not self._made_images:
            self._making_since = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._rates(time.monotonic())[1] / 1e6:.1f} MB/s", refresh=False)
            self._bar.update(images)
        elif time.monotonic() - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def retried(self, reason: str) -> None:
        """A task was lost with its worker or node, and is run again."""
        self.retries += 1
        tqdm.write(f"{reason} The task is run again; retries so far: {self.retries:,}", file=sys.stderr)
        self._write()

    def _line(self) -> str:
        images_per_second, bytes_per_second = self._rates(time.monotonic())
        line = f"{self._done} {self.images:,}".lstrip()
        if self.total is None:
            return f"{line} images, {images_per_second:,.0f} images/s"
        line += f" of {self.total:,} images ({self.images / self.total:.0%})"
        left = self._left(images_per_second)
        if left is None:
            return line
        return f"{line}, {images_per_second:,.0f} images/s, {bytes_per_second / 1e6:.1f} MB/s, {duration(left)} left"

    def _keep_writing(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_FILES):
            # A disk that is full, say, stops the job where it writes data, with a line of its own.
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        now = time.monotonic()
        images_per_second, bytes_per_second = self._rates(now)
        state = {
            "phase": self._done,
            "images": self.images,
            "total_images": self.total,
            "shards": self.shards,
            "total_shards": self.total_shards,
            "bytes": self.bytes,
            "retries": self.retries,
            "images_per_second": images_per_second,
            "bytes_per_second": bytes_per_second,
            "seconds": now - self._start,
            "seconds_left": self._left(images_per_second),
        }
        self.file.write(state)

    def _rates(self, now: float) -> tuple[float, float]:
        """Images and bytes a second, of what was made until now."""
        seconds = max(now - self._making_since, 1e-3)
        return self._made_images / seconds, self._made_bytes / seconds

    def _left(self, images_per_second: float) -> float | None:
        """Seconds to go; None as long as nothing is made."""
        return (self.total - self.images) / images_per_second if images_per_second and self.total else None


class Reading:
    """A file that is read once, from its start; shows bytes, MB/s and time left on stderr.

    done: what is done to it, for the line. Raises FileNotFoundError.
    """

    def __init__(self, path: AnyPath, done: str) -> None:
        self._name, self._size, self._bytes = f"{done} {path.name}", file_size(path), 0
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


def data_size(num_bytes: int) -> str:
    """'12 KB', '3.4 MB'"""
    return f"{num_bytes / 1e3:,.0f} KB" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f} MB"
