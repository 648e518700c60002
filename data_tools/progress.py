"""How far a job is: a bar on a terminal, a plain line now and then in a file."""

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts images and bytes of `total` images; shows images/s, MB/s and time left on stderr.

    total: None while a source is being listed, and nobody knows. done: what is done to them, for the line.
    """

    def __init__(self, total: int | None, done: str = "") -> None:
        self.total = total
        self._done = f"{done} " if done else ""
        self.images = self.bytes = 0
        self._start = self._shown = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=done or None, unit=" images", unit_scale=True) if is_terminal else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, images: int, num_bytes: int) -> None:
        """So many more images of so many bytes are done."""
        self.images += images
        self.bytes += num_bytes
        now = time.monotonic()
        seconds = max(now - self._start, 1e-3)
        megabytes = self.bytes / 1e6 / seconds
        if self._bar is not None:
            self._bar.set_postfix_str(f"{megabytes:.1f} MB/s", refresh=False)
            self._bar.update(images)
        elif now - self._shown >= _SECONDS_BETWEEN_LINES:
            self._shown = now
            print(self._line(seconds, megabytes), file=sys.stderr, flush=True)

    def _line(self, seconds: float, megabytes: float) -> str:
        rate = f"{self.images / seconds:,.0f} images/s"
        if self.total is None:
            return f"{self._done}{self.images:,} images, {rate}"
        left = seconds / self.images * (self.total - self.images) if self.images else 0
        share = f"{self._done}{self.images:,} of {self.total:,} images ({self.images / self.total:.0%})"
        return f"{share}, {rate}, {megabytes:.1f} MB/s, {duration(left)} left"


def duration(seconds: float) -> str:
    """'8 s', '4 min', '2.5 h'"""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
