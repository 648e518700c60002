"""Segments whole images by overlapping windows, and counts their right pixels. Shapes: H, W height and width, S side of a window, n images, K classes."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.data.loading.augment import resize, resize_method
from pipeline.evaluate.segmentation.counts import PixelCounts
from pipeline.evaluate.segmentation.crops import scaled
from pipeline.evaluate.segmentation.linear import LinearHead, PatchTokens, between_centres, enlarged
from pipeline.evaluate.segmentation.pairs import PairReader, in_order
from pipeline.settings.commands.segment import SegmentConfig

# Windows begin at multiples of this share of their side: 341 of 512 pixels in DINOv3 (dinov3/eval/segmentation/config.py).
_STRIDE = 2 / 3
# Logits that are interpolated to an image's own size at a time: 256 MiB.
_MAX_LOGITS = 2**26


@torch.no_grad()
def segment(pixels: np.ndarray, tokens: PatchTokens, head: LinearHead, config: SegmentConfig) -> np.ndarray:
    """uint8 (H, W, 3) -> int16 (H, W), the class of each pixel.

    The image is resized to a short side of short_side, or S; logits are means over the windows of S x S pixels that cover a place, then
    interpolated to H x W.
    """
    side = min(tokens.loaded.image_size)
    height, width = scaled(pixels.shape[0], pixels.shape[1], config.short_side or side)
    image = resize(pixels, (width, height), resize_method(pixels, (height, width), tokens.loaded.view))
    places = [(top, left) for top in _starts(height, side) for left in _starts(width, side)]
    total: Tensor | None = None
    covered = torch.zeros(height, width, device=tokens.loaded.device)
    for first in range(0, len(places), config.batch):
        part = places[first : first + config.batch]
        windows = torch.from_numpy(np.stack([image[top : top + side, left : left + side] for top, left in part]))
        logits = enlarged(head(tokens(windows)), tokens.model.config)
        if total is None:
            total = logits.new_zeros(logits.shape[1], height, width)
        for (top, left), of_window in zip(part, logits, strict=True):
            total[:, top : top + side, left : left + side] += of_window
            covered[top : top + side, left : left + side] += 1
    assert total is not None
    return _largest(total / covered, (pixels.shape[0], pixels.shape[1])).to(torch.int16).cpu().numpy()


def _starts(length: int, side: int) -> list[int]:
    """Where windows begin along a side of the image; the last ends with it."""
    stride = round(side * _STRIDE)
    number = -(-(length - side) // stride) + 1
    return [min(i * stride, length - side) for i in range(number)]


def _largest(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, h, w) -> int64 `size`: the class with the largest logit after interpolation, a few classes at a time."""
    best: Tensor | None = None
    places = torch.zeros(size, dtype=torch.int64, device=logits.device)
    step = max(1, _MAX_LOGITS // (size[0] * size[1]))
    rows, columns = (
        between_centres(long, (torch.arange(few) + 0.5) * long / few - 0.5).to(logits)
        for long, few in zip(size, logits.shape[1:], strict=True)
    )
    for first in range(0, len(logits), step):
        of_part = rows @ logits[first : first + step] @ columns.T
        values, numbers = of_part.max(0)
        is_better = values > best if best is not None else torch.ones_like(places, dtype=torch.bool)
        places = torch.where(is_better, numbers + first, places)
        best = values if best is None else torch.maximum(best, values)
    return places


def count(
    reader: PairReader, tokens: PatchTokens, head: LinearHead, config: SegmentConfig, done: Callable[[], object],
    keep: Callable[[int, np.ndarray, np.ndarray, np.ndarray], object],
) -> tuple[PixelCounts, dict[int, str]]:  # fmt: skip
    """(counts of the pairs that can be read, number of a pair -> why it cannot be read).

    done: called after each pair. keep: called with (number, pixels, true classes, predicted classes) of each that can be read.
    """
    num_pairs, num_classes = len(reader.pairs), len(reader.classes.values)
    zeros = partial(np.zeros, (num_pairs, num_classes), np.int64)
    counts = PixelCounts(np.arange(num_pairs), zeros(), zeros(), zeros(), reader.pairs.group_numbers())
    problems: dict[int, str] = {}
    head.eval()
    for number, found in enumerate(in_order(reader.read, range(num_pairs), config.threads, 2 * config.threads)):
        if isinstance(found, str):
            problems[number] = found
        else:
            pixels, true = found
            predicted = segment(pixels, tokens, head, config)
            _add(counts, number, true, predicted)
            keep(number, pixels, true, predicted)
        done()
    return counts.only(np.array([number for number in range(num_pairs) if number not in problems], np.int64)), problems


def _add(counts: PixelCounts, number: int, true: np.ndarray, predicted: np.ndarray) -> None:
    num_classes, known = counts.true.shape[1], true >= 0
    for array, classes in ((counts.true, true[known]), (counts.predicted, predicted[known]),
                           (counts.right, true[known & (true == predicted)])):  # fmt: skip
        array[number] = np.bincount(classes, minlength=num_classes)
