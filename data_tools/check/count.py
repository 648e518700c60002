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

    values: short_side (in pixels), aspect_ratio, bytes_per_image, (samples,) each. formats: samples by file extension.
    targets: name -> (samples,) float32, numbers to predict, NaN for a missing one.
    """

    classes: np.ndarray
    labels: np.ndarray
    values: dict[str, np.ndarray]
    formats: Counter[str]
    targets: dict[str, np.ndarray]


def count(dataset: Dataset) -> dict[str, SplitCounts]:
    """The counts of each split."""
    counts = {}
    for split in dataset.splits:
        rows = pa.concat_tables(dataset.table(split).read(["labels", "width", "height", "size", "ext"]))
        width, height, size = (rows[name].to_numpy() for name in ("width", "height", "size"))
        counts[split] = SplitCounts(
            np.bincount(pc.list_flatten(rows["labels"]).to_numpy(), minlength=dataset.num_classes),
            np.bincount(pc.list_value_length(rows["labels"]).to_numpy()),
            {
                "short_side": np.minimum(width, height),
                "aspect_ratio": np.maximum(width, 1) / np.maximum(height, 1),
                "bytes_per_image": size,
            },
            Counter({pair["values"]: pair["counts"] for pair in rows["ext"].value_counts().to_pylist()}),
            dict(zip(dataset.targets, dataset.index(split).targets[:].T, strict=True)),
        )
    return counts
