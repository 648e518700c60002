"""How far a sweep is: a line for each cell that ends, a bar on a terminal, and a table for other programs."""

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pipeline.console import duration
from pipeline.files import write_text

PROGRESS_FILE = "progress.json"


class Board:
    """Counts the cells of each task: how many there are, were done before, end well and fail.

    folder: of progress.json, replaced when a cell ends, gone when the block ends. One that does not change any more was left
    by a driver that was killed.
    """

    def __init__(self, tasks: list[str], done: list[str], folder: Path) -> None:
        """tasks: of every cell, so one of four cells stands here four times. done: of those that were done before."""
        self.total, self.done, self.failed = Counter(tasks), Counter(done), Counter[str]()
        self.file, self.retries = folder / PROGRESS_FILE, 0
        self._begin, self._new, self._seconds = time.monotonic(), 0, list[float]()
        self._bar = tqdm(total=len(tasks), initial=len(done), unit=" cells") if sys.stderr.isatty() else None
        self._write()

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self.file.unlink(missing_ok=True)

    def ended(self, task: str, what: str, outcome: dict[str, Any]) -> None:
        """A cell is done. what: in words."""
        self.done[task] += 1
        self._seconds.append(outcome["seconds"])
        diverged = f", diverged by step {outcome['diverged']}" if "diverged" in outcome else ""
        self._tell(
            f"{what}: {outcome['accuracy']:.2%} of {outcome['num_images']:,} images{diverged}, {outcome['seconds']:.0f} s"
        )

    def gave_up(self, task: str, what: str, reason: str) -> None:
        """A cell failed, and is not tried any more now."""
        self.failed[task] += 1
        self._tell(f"FAILED: {what}: {reason}")

    def retried(self, reason: str) -> None:
        """A cell is run again."""
        self.retries += 1
        tqdm.write(f"{reason} The cell is run again; retries so far: {self.retries:,}", file=sys.stderr)
        self._write()

    def _tell(self, line: str) -> None:
        self._new += 1
        failed = f", {self.failed.total():,} failed" if self.failed else ""
        left = f", {duration(self._left())} left" if self._left() else ""
        tqdm.write(f"[{self.done.total():,} of {self.total.total():,} cells{failed}{left}] {line}", file=sys.stdout)
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.update(1)
        self._write()

    def _left(self) -> float:
        """Seconds to go, as fast as until now."""
        left = self.total.total() - self.done.total() - self.failed.total()
        return (time.monotonic() - self._begin) / max(self._new, 1) * left

    def _write(self) -> None:
        state = {
            "updated": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "cells": self.total.total(), "done": self.done.total(), "failed": self.failed.total(), "retries": self.retries,
            "seconds": round(time.monotonic() - self._begin, 1),
            "seconds_left": round(self._left(), 1) if self._new else None,
            "median_cell_seconds": statistics.median(self._seconds) if self._seconds else None,
            "tasks": {task: {"cells": count, "done": self.done[task], "failed": self.failed[task]} for task, count in self.total.items()},
        }  # fmt: skip
        write_text(self.file, json.dumps(state, indent=1) + "\n", durable=False)
