"""The views of an image: which ones are drawn, and the functions that decode an image once and write all of them.

The views of an image are numbered over all its groups, in order. View 0 takes its random numbers from (seed, epoch,
sample); the others take theirs from a seed of their own, which is hashed from the seed and the view's number. A group
may take those of another (`Views.repeats`).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.architecture.pixels import ANY_TYPE, RGB8, Pixels
from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.split import Split
from pipeline.data.loading import augment
from pipeline.data.loading.decode import decode, inspect, left_out
from pipeline.data.loading.jpeg_region import Region
from pipeline.data.loading.values import model_values
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig

# Settings of `undistorted`; distortions that are added later are left out, too.
_CROP_AND_FLIP = (
    "crop",
    "area_min",
    "area_max",
    "aspect_min",
    "aspect_max",
    "resize_to",
    "padding",
    "flip",
    "flip_vertical",
    "turns",
    "resize_filter",
    "eval_resize",
    "eval_crop",
)
# Arguments: image file, one array (H, W, C) of `Pixels.batch_type` per view, epoch, row. Writes the views into the
# arrays. Raises DecodeError.
WriteViews = Callable[[bytes, Sequence[np.ndarray], int, int], None]
# Row -> how its file is decoded; None where all are decoded as the pixels of the batch.
ReadAs = Callable[[int], Pixels] | None


@dataclass(frozen=True)
class Views:
    """A group of views of one image that have the same size and settings.

    size: a number is the side of a square. repeats: the number of a view. The group then has the random numbers of that
    view and of those after it: with the same settings of crop, flips and turns it shows the same regions, in its own
    size.
    """

    count: int
    size: ImageSize | int
    augment: AugmentConfig
    repeats: int | None = None


@dataclass(frozen=True)
class ViewWriter:
    """Makes the views of each image. shapes: (views, height, width) of each group. write: writes all groups' views.

    pixels: what the values of the views mean.
    """

    shapes: tuple[tuple[int, int, int], ...]
    write: WriteViews
    pixels: Pixels = RGB8


def view_seed(seed: int, number: int) -> int:
    """Returns the seed of view `number` (from 0) of every image; view 0 has the seed itself."""
    return int(random_numbers.bits(seed, Purpose.VIEW, number)) if number else seed


def read_by(model: Pixels, split: Split) -> tuple[Pixels, ReadAs]:
    """(pixels, read_as) for the functions below, with which a model reads a split. Raises UserError as
    `Pixels.reading`.
    """
    readings = [
        model.reading(part.pixels, "the model", where) for part, where in zip(split.parts, split.set_names, strict=True)
    ]
    if model.type != ANY_TYPE and len({*readings}) == 1:
        return readings[0], None
    firsts = np.cumsum([len(part) for part in split.parts]).tolist()
    return model, lambda row: readings[bisect_right(firsts, row)]


def undistorted(config: AugmentConfig) -> AugmentConfig:
    """The same crops, flips and turns without distortions."""
    return AugmentConfig(**{name: getattr(config, name) for name in _CROP_AND_FLIP})


def train_views(views: Sequence[Views], seed: int, pixels: Pixels = RGB8, read_as: ReadAs = None) -> ViewWriter:
    """Returns a writer of the augmented views of a sample in an epoch. Raises UserError for augmentations that such
    views cannot have.

    Of a JPEG only the part that the views show is decoded, where possible; the pixels are the same.
    """
    for group in views:
        group.augment.check_views(ImageSize.parse(group.size), pixels)
    drawn: list[tuple[AugmentConfig, int]] = []
    for group in views:
        first = len(drawn) if group.repeats is None else group.repeats
        drawn += [(group.augment, view_seed(seed, number)) for number in range(first, first + group.count)]

    def write(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        regions: list[Region] = []

        def choose(height: int, width: int) -> Region:
            regions[:] = [augment.train_region(height, width, config, seed, epoch, row) for config, seed in drawn]
            return bounding_box(regions)

        own = read_as(row) if read_as else pixels
        image = model_values(decode(data, choose, own), own, pixels)
        first_row, first_column, _, _ = bounding_box(regions)
        for out, (top, left, height, width), (config, seed) in zip(outs, regions, drawn, strict=True):
            top, left = top - first_row, left - first_column
            part = image[top : top + height, left : left + width]
            augment.write_train_view_of_region(part, out, config, seed, epoch, row, pixels)

    return ViewWriter(tuple((group.count, *ImageSize.parse(group.size)) for group in views), write, pixels)


def remembering_train_view(
    config: AugmentConfig, seed: int, image_size: int, kept: dict[int, np.ndarray]
) -> ViewWriter:
    """`train_views` of one view of 8-bit RGB for a small split that is read hundreds of times: each image is decoded
    once and cached.

    kept: the cache, row -> image; loaders of the same split, `config` and `image_size` may share it.
    """

    def write(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        image = kept.get(row)
        if image is None:
            image = kept[row] = augment.epoch_invariant_part(decode(data), (image_size, image_size), config)
        augment.write_train_view(image, outs[0], config, seed, epoch, row)

    return ViewWriter(((1, image_size, image_size),), write)


def eval_view(
    config: AugmentConfig, image_size: ImageSize | int, pixels: Pixels = RGB8, read_as: ReadAs = None
) -> ViewWriter:
    """Returns a writer of the evaluation view, the same for every epoch and row."""

    def write(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        own = read_as(row) if read_as else pixels
        augment.write_eval_view(model_values(decode(data, pixels=own), own, pixels), outs[0], config)

    return ViewWriter(((1, *ImageSize.parse(image_size)),), write, pixels)


def noting_left_out(writer: ViewWriter, noted: dict[int, set[str]]) -> ViewWriter:
    """The writer, which also notes for each row what decoding leaves out of the image (`decode.left_out`)."""

    def write(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        writer.write(data, outs, epoch, row)
        noted[row] = left_out(inspect(data), writer.pixels)

    return replace(writer, write=write)


def bounding_box(regions: Sequence[Region]) -> Region:
    """The smallest region that contains all of these."""
    if len(regions) == 1:  # The most frequent case, for which the sums below would take half a percent of decoding.
        return regions[0]
    top, left = min(region[0] for region in regions), min(region[1] for region in regions)
    bottom, right = max(region[0] + region[2] for region in regions), max(region[1] + region[3] for region in regions)
    return top, left, bottom - top, right - left
