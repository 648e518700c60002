"""Random crops of images and their masks for training. Shapes: B crops, S the side of a crop, C channels, H, W height
and width.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading.augment import resize, resize_method
from pipeline.evaluate.segmentation.masks import NO_CLASS
from pipeline.evaluate.segmentation.pairs import PairReader, in_order
from pipeline.settings.commands.segment import SegmentConfig
from pipeline.settings.run import AugmentConfig

_ORDER, _CROP = Purpose.named("segmentation order"), Purpose.named("segmentation crop")
# The short side of an image over short_side, in DINOv3 (dinov3/eval/segmentation/configs).
SCALES = (0.5, 2.0)
# Batches that are read ahead.
_AHEAD = 2


def batches(
    reader: PairReader, config: SegmentConfig, view: AugmentConfig, side: int, problems: dict[int, str]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the crops of all steps: images (B, S, S, C) of the type of a batch, and their classes, int16 (B, S, S),
    NO_CLASS where there is none. Each is a function of (seed, epoch, pair) alone.

    problems: number of a pair -> why it cannot be read, filled while reading; its crop has no class.
    """
    low, high = (np.array(limits) for limits in reader.pairs.model.batch_range())
    outside = ((low + high) / 2).astype(reader.pairs.model.batch_type)
    order = cache(lambda epoch: random_numbers.permutation(len(reader.pairs), config.seed, _ORDER, epoch))

    def crop(position: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, place = divmod(position, len(reader.pairs))
        number = int(order(epoch)[place])
        found = reader.read(number)
        if isinstance(found, str):
            problems[number] = found
            return np.tile(outside, (side, side, 1)), np.full((side, side), NO_CLASS, np.int16)
        draw = random_numbers.draws(config.seed, _CROP, epoch, number)
        return random_crop(*found, outside, config.short_side, view, side, draw)

    batch = config.train_batch
    found = in_order(crop, range(config.steps * batch), config.threads, _AHEAD * batch)
    while part := list(islice(found, batch)):
        images, classes = (torch.from_numpy(np.stack(parts)) for parts in zip(*part, strict=True))
        yield images, classes


def random_crop(
    image: np.ndarray,
    classes: np.ndarray,
    outside: np.ndarray,
    short_side: int,
    view: AugmentConfig,
    side: int,
    draw: Callable[[int], float],
) -> tuple[np.ndarray, np.ndarray]:
    """A square of a randomly scaled image, mirrored by half: (H, W, C) and int16 (H, W) -> (S, S, C) and int16 (S, S).

    The short side of the image becomes short_side (S, if that is 0) times a number of `SCALES`. Where the image ends
    before the square, pixels are `outside`, (C,), and have no class. draw: uniform numbers of this crop.
    """
    scale = SCALES[0] + draw(0) * (SCALES[1] - SCALES[0])
    height, width = scaled(classes.shape[0], classes.shape[1], max(1, int((short_side or side) * scale)))
    image = resize(image, (width, height), resize_method(image, (height, width), view))
    top, left = (int(draw(1 + axis) * (max(long - side, 0) + 1)) for axis, long in enumerate((height, width)))
    image = image[top : top + side, left : left + side]
    # The class of the pixel at the centre of each new one.
    rows = ((np.arange(top, top + len(image)) + 0.5) * classes.shape[0] / height).astype(np.int64)
    columns = ((np.arange(left, left + image.shape[1]) + 0.5) * classes.shape[1] / width).astype(np.int64)
    out, out_classes = np.tile(outside, (side, side, 1)), np.full((side, side), NO_CLASS, np.int16)
    out[: len(rows), : len(columns)] = image
    out_classes[: len(rows), : len(columns)] = classes[rows[:, None], columns]
    if draw(3) < 0.5:
        return out[:, ::-1], out_classes[:, ::-1]
    return out, out_classes


def scaled(height: int, width: int, short: int) -> tuple[int, int]:
    """(height, width) of an image of this size when its short side becomes `short`."""
    if height > width:
        return int(short * height / width + 0.5), short
    return short, int(short * width / height + 0.5)
