"""Draws images beside their masks and the predicted classes. Shapes: H, W height and width, K classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from pipeline.base.gallery import MAX_IMAGES, Tile, gallery
from pipeline.evaluate.segmentation.masks import NO_CLASS, MaskClasses

# Sides of the pictures of a sheet, at most; and classes that it explains.
_SIDE, _MAX_NAMED = 360, 24
_NOTE = "Held-out images, their masks, and what a linear layer on frozen patch tokens predicts. Black: no class."


@dataclass(frozen=True)
class SegmentedImage:
    """An image, uint8 (H, W, 3), with its true classes and the predicted ones, int16 (H, W). caption: over the image."""

    pixels: np.ndarray
    true: np.ndarray
    predicted: np.ndarray
    caption: str

    def small(self) -> "SegmentedImage":
        """With fewer pixels, as many as a sheet shows."""
        step = max(1, -(-max(self.true.shape) // _SIDE))
        pixels, true, predicted = (part[::step, ::step].copy() for part in (self.pixels, self.true, self.predicted))
        return SegmentedImage(pixels, true, predicted, self.caption)


def draw_examples(examples: list[SegmentedImage], classes: MaskClasses, title: str) -> Figure:
    """A row of images, below them their masks and the predictions; at the end the colours of the most frequent classes."""
    colours = classes.colours()
    rows: list[Sequence[Tile]] = []
    for line in range(0, len(examples), MAX_IMAGES):
        part = examples[line : line + MAX_IMAGES]
        rows += [
            [Tile(each.pixels, [each.caption]) for each in part],
            [Tile(_coloured(each.true, colours), ["mask"]) for each in part],
            [Tile(_coloured(each.predicted, colours), [_right(each)]) for each in part],
        ]
    seen = np.bincount(np.concatenate([each.true[each.true >= 0] for each in examples]), minlength=len(colours))
    named = [number for number in np.argsort(-seen, kind="stable")[:_MAX_NAMED].tolist() if seen[number]]
    legend = [(classes.names[number], colours[number] / 255) for number in named]
    return gallery(rows, title, _NOTE, legend=legend)


def _right(example: SegmentedImage) -> str:
    known = example.true != NO_CLASS
    share = (example.true == example.predicted)[known].mean() if known.any() else 0.0
    return f"{share:.0%} right"


def _coloured(numbers: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """int16 (H, W) -> uint8 (H, W, 3); black where there is no class."""
    return np.where((numbers >= 0)[..., None], colours[numbers.clip(min=0)], 0).astype(np.uint8)
