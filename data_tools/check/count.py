"""Statistics of a manifest: the images of each split."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.dataset.manifest import Dataset


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


def count(dataset: Dataset) -> dict[str, SplitCounts]:
    """The counts of each split."""
    counts = {}
    for split in dataset.splits:
        rows = pa.concat_tables(dataset.table(split).read(["labels", "width", "height", "size", "ext"]))
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
    return counts


def _class_counts(rows: pa.Table, num_classes: int) -> np.ndarray:
    return np.bincount(pc.list_flatten(rows.column("labels")).to_numpy(), minlength=num_classes)
