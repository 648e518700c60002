"""Segments whole images by overlapping windows, and scores them by their mIoU with its interval.

Shapes: H, W height and width, C channels, S side of a window, n images, K classes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading.augment import resize, resize_method
from pipeline.evaluate.intervals import freedom_of_groups, quantile
from pipeline.evaluate.loaded_model import LoadedModel
from pipeline.evaluate.segmentation.linear import between_centres, logits_of, scaled
from pipeline.settings.commands.segment import SegmentConfig

# Windows begin at multiples of this share of their side: 341 of 512 pixels in DINOv3
# (dinov3/eval/segmentation/config.py).
_STRIDE = 2 / 3
# Logits that are interpolated to an image's own size at a time: 256 MiB.
_MAX_LOGITS = 2**26
# Resamples of the interval, and how many are drawn at a time: 8 bytes of each for each image or group.
_RESAMPLES, _BLOCK = 1000, 50
_BOOTSTRAP = Purpose.named("segmentation bootstrap")


@torch.no_grad()
def segment(image: np.ndarray, loaded: LoadedModel, head: nn.Module, config: SegmentConfig) -> np.ndarray:
    """(H, W, C) of the type of a batch -> int16 (H, W), the class of each pixel.

    The image is resized to a short side of short_side, or S; logits are means over the windows of S x S pixels that
    cover a place, then interpolated to H x W.
    """
    side = min(loaded.image_size)
    size = image.shape[0], image.shape[1]
    height, width = scaled(*size, config.short_side or side)
    image = resize(image, (width, height), resize_method(image, (height, width), loaded.view))
    places = [(top, left) for top in _starts(height, side) for left in _starts(width, side)]
    total, covered = torch.zeros(()), torch.zeros(height, width, device=loaded.device)
    for first in range(0, len(places), config.batch):
        part = places[first : first + config.batch]
        windows = torch.from_numpy(np.stack([image[top : top + side, left : left + side] for top, left in part]))
        logits = logits_of(loaded, head, windows)
        if not first:
            total = logits.new_zeros(logits.shape[1], height, width)
        for (top, left), of_window in zip(part, logits, strict=True):
            total[:, top : top + side, left : left + side] += of_window
            covered[top : top + side, left : left + side] += 1
    return _largest(total / covered, size).to(torch.int16).cpu().numpy()


def _starts(length: int, side: int) -> list[int]:
    """Where windows begin along a side of the image; the last ends with it."""
    stride = round(side * _STRIDE)
    number = -(-(length - side) // stride) + 1
    return [min(i * stride, length - side) for i in range(number)]


def _largest(logits: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(K, h, w) -> int64 `size`: the class with the largest logit after interpolation, a few rows of pixels at a
    time.
    """
    rows, columns = (
        between_centres(long, (torch.arange(few) + 0.5) * long / few - 0.5).to(logits)
        for long, few in zip(size, logits.shape[1:], strict=True)
    )
    step = max(1, _MAX_LOGITS // (len(logits) * size[1]))
    return torch.cat([(part @ logits @ columns.T).argmax(0) for part in rows.split(step)])


def count(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 (3, K): of the pixels that have a class, those of each class that are right, predicted as it, and truly of
    it.
    """
    known = true >= 0
    parts = true[known & (true == predicted)], predicted[known], true[known]
    return np.stack([np.bincount(classes, minlength=num_classes) for classes in parts])


@dataclass(frozen=True)
class SegmentationScore:
    """The mIoU in [0, 1], and its 95 % interval over images, or over groups of them; NaN for one. num_groups: None
    without groups.
    """

    miou: float
    low: float
    high: float
    num_groups: int | None


def score(counts: np.ndarray, groups: np.ndarray) -> SegmentationScore:
    """The score of images together. counts: (n, 3, K) of `count`. groups: (n,), the group of each, such as a video;
    empty without.

    The interval is of 1,000 resamples: it holds for other images like these, not for another training. Over images it
    is the resamples' percentiles. Groups are often few, of which percentiles say too much: Student's t on their
    deviation.
    """
    value = float(miou(counts.sum(0)))
    # Products of float64 are many times faster than of int64, and exact below 2**53 pixels.
    units, num_groups = counts.astype(np.float64), None
    if len(groups):
        numbers = np.unique(groups, return_inverse=True)[1]
        num_groups = int(numbers.max()) + 1
        units = np.zeros((num_groups, *counts.shape[1:]))
        np.add.at(units, numbers, counts)
    if len(units) < 2:
        return SegmentationScore(value, np.nan, np.nan, num_groups)
    resampled = _resampled(units)
    if num_groups is None:
        low, high = np.quantile(resampled, [0.025, 0.975])
        return SegmentationScore(value, float(low), float(high), None)
    half = quantile(freedom_of_groups(units[:, 2].sum(1))) * float(np.std(resampled))
    half *= (num_groups / (num_groups - 1)) ** 0.5
    return SegmentationScore(value, max(0.0, value - half), min(1.0, value + half), num_groups)


def miou(counts: np.ndarray) -> np.ndarray:
    """(..., 3, K) -> float64 (...): the mean over the classes that occur of intersection over union."""
    right, predicted, true = np.moveaxis(counts, -2, 0)
    union = predicted + true - right
    return (right / np.maximum(union, 1)).sum(-1) / np.maximum((union > 0).sum(-1), 1)


def _resampled(units: np.ndarray) -> np.ndarray:
    """float64 (1000,), the mIoU of u images, or groups, drawn with replacement. units: (u, 3, K)."""
    num_units, found = len(units), []
    for first in range(0, _RESAMPLES, _BLOCK):
        resamples = np.arange(first, first + _BLOCK)[:, None]
        rows = random_numbers.bits(0, _BOOTSTRAP, resamples, np.arange(num_units)) % np.uint64(num_units)
        times = np.stack([np.bincount(row, minlength=num_units) for row in rows.astype(np.int64)]).astype(np.float64)
        found.append(miou(np.tensordot(times, units, 1)))
    return np.concatenate(found)
