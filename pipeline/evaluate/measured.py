"""Scores that an objective defines: means over a split of what it measures of each image, exact on any number of
ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch
from pipeline.evaluate.classify import each_sample
from pipeline.evaluate.split_reader import SplitReader


@dataclass(frozen=True)
class Means:
    """values: means over the readable samples, by name."""

    values: dict[str, float]
    num_samples: int
    num_unreadable: int

    def to_dict(self) -> dict[str, float]:
        return {**self.values, "num_samples": self.num_samples, "num_unreadable": self.num_unreadable}

    def __str__(self) -> str:
        bad = f", {self.num_unreadable:,} unreadable (not scored)" if self.num_unreadable else ""
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.values.items())
        return f"{values} on {counted(self.num_samples, 'image')}{bad}"


def means(measure: Callable[[Batch], dict[str, Tensor]], reader: SplitReader) -> Means:
    """Measure the whole split; see `each_sample`. measure: batch -> values of its images, (B,) by name."""
    names: list[str] = []

    def columns(batch: Batch) -> list[Tensor]:
        found = measure(batch)
        names[:] = found
        return [column.double() for column in found.values()]

    values, readable, _ = each_sample(columns, reader)
    num_samples, num_readable = len(reader.split), int(readable.sum())
    found = [float(column[readable].mean()) if num_readable else float("nan") for column in values]
    return Means(dict(zip(names, found, strict=True)), num_samples, num_samples - num_readable)
