"""Scores of a segmentation by its counts of pixels, and of resamples of its images or groups. Shapes: n images, K classes. Needs numpy, and scipy for groups."""

import io
from dataclasses import asdict, dataclass, field

import numpy as np

from pipeline.base import npz, random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.evaluate.intervals import freedom_of_groups, quantile

FILE = "pixel_counts.npz"
_NAMES = ("rows", "right", "predicted", "true")

# Resamples that are drawn at a time: 8 bytes of each for each image or group.
_BLOCK = 50
_RESAMPLES = 1000
_BOOTSTRAP = Purpose.named("segmentation bootstrap")


@dataclass(frozen=True)
class PixelCounts:
    """Pixels of n images in K classes, int64 (n, K) each, of the pixels that have a class: right, predicted as it, and truly of it.

    rows: int64 (n,), the number of each image among those that were to be scored. groups: int64 (n,), the group of each, such as a
    video; empty without.
    """

    rows: np.ndarray
    right: np.ndarray
    predicted: np.ndarray
    true: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def only(self, images: np.ndarray) -> "PixelCounts":
        """The counts of these images, by their places."""
        kept = {name: array[images] if len(array) else array for name, array in vars(self).items()}
        return PixelCounts(**kept)

    @property
    def num_units(self) -> int:
        """Number of what resamples draw: groups, or images without."""
        return len(np.unique(self.groups)) if len(self.groups) else len(self.rows)

    @property
    def freedom(self) -> float:
        """Degrees of freedom of an error over them."""
        if not len(self.groups):
            return len(self.rows) - 1
        return freedom_of_groups(np.bincount(np.unique(self.groups, return_inverse=True)[1], weights=self.true.sum(1)))

    def of_units(self) -> list[np.ndarray]:
        """(right, predicted, true) of each unit, float64 (units, K)."""
        # Products of float64 are many times faster than of int64, and exact below 2**53 pixels.
        parts = [part.astype(np.float64) for part in (self.right, self.predicted, self.true)]
        if not len(self.groups):
            return parts
        order = np.argsort(self.groups, kind="stable")
        starts = np.flatnonzero(np.diff(self.groups[order], prepend=-1))
        return [np.add.reduceat(part[order], starts) for part in parts]


@dataclass(frozen=True)
class SegmentationScores:
    """Shares in [0, 1]. miou: the mean of `iou` over the classes that occur. low, high: its 95 % interval over images, or groups of
    them; NaN for one.

    iou, recall: float64 (K,), NaN for a class that is neither predicted nor true, and for one that is not true.
    """

    miou: float
    low: float
    high: float
    pixel_accuracy: float
    mean_recall: float
    iou: np.ndarray
    recall: np.ndarray


def scores_of(counts: PixelCounts) -> SegmentationScores:
    """The scores of the images together: intersection over union of each class, over all pixels of all images.

    The interval is of 1,000 resamples: it holds for other images like these, not for another training.
    """
    low, high = bootstrap_interval(counts, resampled_miou(counts)) if counts.num_units > 1 else (np.nan, np.nan)
    right, true, iou = counts.right.sum(0), counts.true.sum(0), _iou(counts)
    recall = _ratio(right, true)
    accuracy = _ratio(right.sum(), true.sum())
    return SegmentationScores(float(_mean(iou)), low, high, float(accuracy), float(_mean(recall)), iou, recall)


def miou_of(counts: PixelCounts) -> float:
    """The mIoU of the images together."""
    return float(_mean(_iou(counts)))


def bootstrap_interval(counts: PixelCounts, resampled: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a mIoU over images, or over groups of them, of which there are at least two. resampled: of `resampled_miou`.

    Over images it is the resamples' percentiles. Groups are often few, of which percentiles say too much: Student's t on their deviation.
    """
    if not len(counts.groups):
        low, high = np.quantile(resampled, [0.025, 0.975])
        return float(low), float(high)
    num_groups, value = counts.num_units, miou_of(counts)
    half = quantile(counts.freedom) * float(np.std(resampled)) * (num_groups / (num_groups - 1)) ** 0.5
    return max(0.0, value - half), min(1.0, value + half)


def resampled_miou(counts: PixelCounts) -> np.ndarray:
    """float64 (1000,), the mIoU of n images, or groups, drawn with replacement, which depend on n alone: two models are scored on the same ones.

    Means little for one.
    """
    num_units, parts = counts.num_units, counts.of_units()
    found = []
    for first in range(0, _RESAMPLES, _BLOCK):
        resamples = np.arange(first, first + _BLOCK)[:, None]
        rows = random_numbers.bits(0, _BOOTSTRAP, resamples, np.arange(num_units)) % np.uint64(num_units)
        times = np.stack([np.bincount(row, minlength=num_units) for row in rows.astype(np.int64)]).astype(np.float64)
        right, predicted, true = (times @ part for part in parts)
        found.append(_mean(_ratio(right, predicted + true - right)))
    return np.concatenate(found)


def as_file(counts: PixelCounts) -> bytes:
    """The content of pixel_counts.npz; `parse_counts` reads it."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **asdict(counts))
    return buffer.getvalue()


def parse_counts(content: bytes, where: str) -> PixelCounts:
    """The counts in a file's content. Raises UserError for a damaged one."""
    found = npz.read_arrays(content, where, _NAMES, optional=("groups",))
    return PixelCounts(**found)


def _iou(counts: PixelCounts) -> np.ndarray:
    """float64 (K,), the intersection over union of each class, NaN for one that is neither predicted nor true."""
    right, predicted, true = (part.sum(0) for part in (counts.right, counts.predicted, counts.true))
    return _ratio(right, predicted + true - right)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, NaN where that is 0."""
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def _mean(values: np.ndarray) -> np.ndarray:
    """The mean over the last axis, without NaN; 0 where all are."""
    known = ~np.isnan(values)
    return np.where(known, values, 0).sum(-1) / np.maximum(known.sum(-1), 1)
