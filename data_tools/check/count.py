"""Statistics of a manifest: the images of each split, and the class mix of each shard."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset


@dataclass
class SplitCounts:
    """The images of one split. classes: (K,) int64, labels of each class. labels: int64, samples by number of labels.

    width, height, size: (samples,) pixels and bytes of each. formats: samples by file extension. targets: name ->
    (samples,) float32, numbers to predict, NaN for a missing one.
    """

    classes: np.ndarray
    labels: np.ndarray
    width: np.ndarray
    height: np.ndarray
    size: np.ndarray
    formats: Counter[str]
    targets: dict[str, np.ndarray]

    @property
    def short(self) -> np.ndarray:
        return np.minimum(self.width, self.height)

    @property
    def aspect(self) -> np.ndarray:
        return np.maximum(self.width, 1) / np.maximum(self.height, 1)


def count(dataset: Dataset) -> tuple[dict[str, SplitCounts], list[dict[str, Any]]]:
    """Returns (counts of each split, a row for each shard in the order of shards.parquet, with the keys of `_mix`)."""
    counts, tables = {}, {}
    for split in dataset.splits:
        columns = ["labels", "width", "height", "size", "ext"]
        rows = tables[split] = pa.concat_tables(dataset.table(split).read(columns))
        width, height, size = (rows[name].to_numpy() for name in ("width", "height", "size"))
        counts[split] = SplitCounts(
            _class_counts(rows, dataset.num_classes),
            np.bincount(pc.list_value_length(rows["labels"]).to_numpy()),
            width,
            height,
            size,
            Counter({pair["values"]: pair["counts"] for pair in rows["ext"].value_counts().to_pylist()}),
            dict(zip(dataset.targets, dataset.index(split).targets[:].T, strict=True)),
        )
    mixed, first = [], Counter[str]()
    for shard in dataset.shards():
        rows = tables[shard.split].slice(first[shard.split], shard.samples)
        first[shard.split] += shard.samples
        about = {"shard": shard.name, "split": shard.split, "samples": shard.samples, "bytes": shard.bytes}
        mix = _mix(_class_counts(rows, dataset.num_classes), counts[shard.split].classes, dataset.classes)
        mixed.append(about | mix)
    return counts, mixed


def _class_counts(rows: pa.Table, num_classes: int) -> np.ndarray:
    values = pc.list_flatten(rows.column("labels")).to_numpy()
    if len(values) and not 0 <= values.min() <= values.max() < num_classes:
        raise UserError(
            f"{SAMPLES_FILE} has labels from {values.min()} to {values.max()}, but there are"
            f" {counted(num_classes, 'class')} (0 to {num_classes - 1}). To see which: python launch/verify.py data=..."
        )
    return np.bincount(values, minlength=num_classes)


def _mix(of_shard: np.ndarray, of_split: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """How the class distribution of a shard differs from that of its split. of_shard, of_split: (K,) int64, labels of
    each class, whose names are `names`.

    largest_class: with the most labels; largest_share: its share. distance: total variation distance, from 0 (equal) to
    1 (disjoint). excess: chi-squared divided by its degrees of freedom; its expectation for a random sample is 1, for
    any number of classes; a value far above 1 is a badly mixed shard. Of two classes, chance alone exceeds 3.8 in one
    shard of twenty, of ten 1.9.
    """
    num, total = int(of_shard.sum()), int(of_split.sum())
    if not num:
        return {"classes": 0, "largest_class": "", "largest_share": 0.0, "distance": 0.0, "excess": 1.0}
    present = np.flatnonzero(of_shard)
    expected = of_split * (num / total)
    known = np.count_nonzero(of_split)
    # Finite population correction: the samples are drawn without replacement.
    left = (total - num) / max(total - 1, 1)
    chi2 = float((of_shard[present] ** 2 / expected[present]).sum() - num)
    excess = chi2 / ((known - 1) * left) if known > 1 and left else 1.0
    largest = int(of_shard.argmax())
    distance = float(np.abs(of_shard - expected).sum() / (2 * num))
    return {
        "classes": len(present),
        "largest_class": names[largest],
        "largest_share": float(of_shard[largest] / num),
        "distance": distance,
        "excess": excess,
    }
