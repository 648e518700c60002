"""Progress of a VTAB sweep or a study: a line for each cell that ends, a bar on a terminal, and progress.json for other programs."""

import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from pipeline.base.progress import ProgressFile, duration
from pipeline.base.words import counted


class SweepProgress:
    """Counts the cells of each task (of a study: of each model): all, done, failed. progress.json is written when a cell ends."""

    def __init__(self, tasks: list[str], done: list[str], folder: Path) -> None:
        """tasks: task names of all cells, one for each cell. done: of the cells done before. folder: of progress.json."""
        self.total, self.done, self.failed = Counter(tasks), Counter(done), Counter[str]()
        self.retries = 0
        self._file = ProgressFile(folder)
        self._begin, self._num_ended, self._cell_seconds = time.monotonic(), 0, list[float]()
        self._bar = tqdm(total=len(tasks), initial=len(done), unit=" cells") if sys.stderr.isatty() else None
        self._write()

    def __enter__(self) -> "SweepProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self._file.remove()

    def ended(self, task: str, line: str, seconds: float) -> None:
        """A cell is done. line: the cell and what came of it. seconds: that it took."""
        self.done[task] += 1
        self._cell_seconds.append(seconds)
        self._print(f"{line}, {duration(seconds)}")

    def gave_up(self, task: str, cell: str, reason: str) -> None:
        """A cell failed and is not retried."""
        self.failed[task] += 1
        self._print(f"FAILED: {cell}: {reason}")

    def retried(self, reason: str) -> None:
        """A cell is run again."""
        self.retries += 1
        tqdm.write(f"{reason} The cell is run again; retries so far: {self.retries:,}", file=sys.stderr)
        self._write()

    def _print(self, line: str) -> None:
        self._num_ended += 1
        failed = f", {self.failed.total():,} failed" if self.failed else ""
        seconds = self._seconds_left()
        left = f", {duration(seconds)} left" if seconds else ""
        tqdm.write(
            f"[{self.done.total():,} of {counted(self.total.total(), 'cell')}{failed}{left}] {line}", file=sys.stdout
        )
        sys.stdout.flush()
        if self._bar is not None:
            self._bar.update(1)
        self._write()

    def _seconds_left(self) -> float | None:
        """At the average rate of this start; None before the first cell ends."""
        num_left = self.total.total() - self.done.total() - self.failed.total()
        return (time.monotonic() - self._begin) / self._num_ended * num_left if self._num_ended else None

    def _write(self) -> None:
        seconds_left = self._seconds_left()
        state = {
            "cells": self.total.total(),
            "done": self.done.total(),
            "failed": self.failed.total(),
            "retries": self.retries,
            "seconds": round(time.monotonic() - self._begin, 1),
            "seconds_left": None if seconds_left is None else round(seconds_left, 1),
            "median_cell_seconds": statistics.median(self._cell_seconds) if self._cell_seconds else None,
            "tasks": {
                task: {"cells": count, "done": self.done[task], "failed": self.failed[task]}
                for task, count in self.total.items()
            },
        }
        self._file.write(state)
