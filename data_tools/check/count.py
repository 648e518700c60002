"""Statistics of a manifest: histograms of each split, and the class mix of each shard."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset

# Sides are counted by pixel up to this one (JPEG's limit); larger ones count as this.
_MAX_SIDE = 2**16 - 1
# log2 of bytes and of width / height are binned by 1/1024: quantiles are exact to 0.04 %, so that 3:2 is 1.50.
STEPS = 1024
_MAX_LOG_BYTES, _MAX_LOG_ASPECT = 40, 16
_MAX_LABELS = 1000

# Values of the histogram bins: pixels, width / height, bytes.
SIDES = np.arange(_MAX_SIDE + 1)
ASPECTS = np.exp2(np.arange(2 * _MAX_LOG_ASPECT * STEPS + 1) / STEPS - _MAX_LOG_ASPECT)
SIZES = np.exp2(np.arange(_MAX_LOG_BYTES * STEPS + 1) / STEPS)


@dataclass
class SplitCounts:
    """Histograms of one split, int64. classes: (K,) labels of each class. labels: samples by number of labels.

    width, height, short: samples by side length (bins SIDES). aspect: by width / height (ASPECTS). size: by bytes
    (SIZES).
    formats: by file extension.
    """

    classes: np.ndarray
    samples: int
    bytes: int
    labels: np.ndarray
    width: np.ndarray
    height: np.ndarray
    short: np.ndarray
    aspect: np.ndarray
    size: np.ndarray
    formats: Counter[str]


def _count_split(rows: pa.Table, num_classes: int) -> SplitCounts:
    width, height, size = (rows[name].to_numpy() for name in ("width", "height", "size"))
    aspect = np.log2(np.maximum(width, 1) / np.maximum(height, 1)) + _MAX_LOG_ASPECT
    return SplitCounts(
        classes=_class_counts(rows, num_classes),
        samples=len(rows),
        bytes=int(size.sum()),
        labels=_counts(pc.list_value_length(rows["labels"]).to_numpy(), _MAX_LABELS),
        width=_counts(width, _MAX_SIDE),
        height=_counts(height, _MAX_SIDE),
        short=_counts(np.minimum(width, height), _MAX_SIDE),
        aspect=_counts(np.rint(aspect * STEPS), len(ASPECTS) - 1),
        size=_counts(np.rint(np.log2(np.maximum(size, 1)) * STEPS), len(SIZES) - 1),
        formats=Counter({pair["values"]: pair["counts"] for pair in rows["ext"].value_counts().to_pylist()}),
    )


@dataclass(frozen=True)
class ShardMix:
    """How the class distribution of a shard differs from that of its split.

    largest: class with the most labels; largest_share: its share. distance: total variation distance, from 0 (equal) to
    1 (disjoint). excess: chi-squared divided by its degrees of freedom; its expectation for a random sample is 1, for
    any number of classes; a value far above 1 is a badly mixed shard. Of two classes, chance alone exceeds 3.8 in one
    shard of twenty, of ten 1.9.
    """

    classes: int
    largest: int
    largest_share: float
    distance: float
    excess: float


_EMPTY_MIX = ShardMix(0, -1, 0.0, 0.0, 1.0)


def count(dataset: Dataset) -> tuple[dict[str, SplitCounts], list[ShardMix]]:
    """Returns (counts of each split, class mix of each shard in the order of shards.parquet)."""
    columns = ["labels", "width", "height", "size", "ext"]
    tables = {split: pa.concat_tables(dataset.table(split, verify=False).read(columns)) for split in dataset.splits}
    counts = {split: _count_split(rows, dataset.num_classes) for split, rows in tables.items()}
    mixes, first = [], Counter[str]()
    for shard in dataset.shards():
        rows = tables[shard.split].slice(first[shard.split], shard.samples)
        first[shard.split] += shard.samples
        mixes.append(_mix(_class_counts(rows, dataset.num_classes), counts[shard.split].classes))
    return counts, mixes


def _class_counts(rows: pa.Table, num_classes: int) -> np.ndarray:
    values = pc.list_flatten(rows.column("labels")).to_numpy()
    if len(values) and not 0 <= values.min() <= values.max() < num_classes:
        raise UserError(
            f"{SAMPLES_FILE} has labels from {values.min()} to {values.max()}, but there are"
            f" {counted(num_classes, 'class')} (0 to {num_classes - 1}). To see which: python launch/verify.py data=..."
        )
    return np.bincount(values, minlength=num_classes)


def _counts(values: np.ndarray, largest: int) -> np.ndarray:
    """(largest + 1,) int64: counts of the values 0 ... largest; larger values count as the largest."""
    return np.bincount(np.clip(values, 0, largest).astype(np.int64), minlength=largest + 1)


def _mix(of_shard: np.ndarray, of_split: np.ndarray) -> ShardMix:
    """of_shard, of_split: (K,) int64, labels of each class."""
    num, total = int(of_shard.sum()), int(of_split.sum())
    if not num:
        return _EMPTY_MIX
    present = np.flatnonzero(of_shard)
    expected = of_split * (num / total)
    known = np.count_nonzero(of_split)
    # Finite population correction: the samples are drawn without replacement.
    left = (total - num) / max(total - 1, 1)
    chi2 = float((of_shard[present] ** 2 / expected[present]).sum() - num)
    excess = chi2 / ((known - 1) * left) if known > 1 and left else 1.0
    largest = int(of_shard.argmax())
    distance = float(np.abs(of_shard - expected).sum() / (2 * num))
    return ShardMix(len(present), largest, float(of_shard[largest] / num), distance, excess)
