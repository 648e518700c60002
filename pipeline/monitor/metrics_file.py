"""metrics.jsonl: every metric of a run, one JSON object per line. Written here; repaired when steps run again; read by
reports.
"""

import contextlib
import functools
import json
import math
import mmap
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from pipeline.base.words import counted

METRICS_FILE = "metrics.jsonl"
# Metrics are numbers of float32; the square of a larger one, or its share in per cent, would be infinite.
_MAX_VALUE = 1e39


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl. time: milliseconds since 1970. metrics: values may be nan or inf; above 1e39 they are
    inf.
    """

    step: int
    time: int
    metrics: dict[str, float]

    def to_line(self) -> bytes:
        # JSON has no nan and no inf: they are written as text that float() reads.
        readable = {
            name: value if abs(value) <= _MAX_VALUE else str(value * math.inf) for name, value in self.metrics.items()
        }
        return json.dumps({"step": self.step, "time": self.time, "metrics": readable}).encode() + b"\n"


def repair(path: Path, last_step: int) -> tuple[dict[str, float], list[str]]:
    """Cut off the records of steps after `last_step`, from which a run continues, and damaged lines among and after
    them. Only this end of the file is read, because records are in the order of their steps.

    Returns (the metrics that this step has, a line for the log that says what was removed).
    """
    logged, removed, end = dict[str, float](), 0, 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb+") as file:
        for start, line in _from_the_end(file):
            record = parse_line(line)
            if record is not None and record.step <= last_step:
                if record.step < last_step:
                    break
                logged = record.metrics | logged
            elif not logged:
                removed += 1
                end = start
        if removed:
            file.truncate(end)
    why = f"damaged or after step {last_step:,}, from which the run continues"
    return logged, [f"{path}: removed {counted(removed, 'line')}, {why}"] if removed else []


def _from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, content) of each line, the last one first."""
    if not (end := file.seek(0, 2)):
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            yield start, data[start:end]
            end = start


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of lines for new ones, after a line break if a kill cut the last line short."""
    file = open(path, "ab+")  # noqa: SIM115  (closed by the caller)
    if file.tell():
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def read_metrics(path: Path) -> tuple[list[Record], int]:
    """Returns (records, number of damaged lines) of a metrics.jsonl. Raises FileNotFoundError."""
    with open(path, "rb") as file:
        parsed = [parse_line(line) for line in file if line.strip()]
    records = [record for record in parsed if record]
    return records, len(parsed) - len(records)


def by_name(records: Iterable[Record]) -> dict[str, dict[int, float]]:
    """Returns metric -> step -> value. If a step was recorded twice, the last value counts."""
    values: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            values.setdefault(name, {})[record.step] = value
    return values


def parse_line(line: bytes) -> Record | None:
    """One line of metrics.jsonl; None if it is damaged, for example cut short by a kill."""
    try:
        found = from_json(line)  # A quarter of the time of json.loads.
        metrics = {name: float(value) for name, value in found["metrics"].items()}
        return Record(operator.index(found["step"]), operator.index(found["time"]), metrics)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


@functools.cache
def accepted_name(name: str) -> str:
    """A metric's name with "_" for what MLflow refuses: one may contain that of a model ("R50+ViT") or of a data folder
    ("photos (2)").
    """
    return re.sub(r"^[./]|[^/\w.\- :]", "_", name)
