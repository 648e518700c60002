"""The views of an image: which ones are drawn, and the functions that decode an image once and write all of them.

A view is cropped, flipped and resized in the type of the batch, directly into it. Random numbers are hashed from (seed,
epoch, sample, draw); no worker has a state. The region of the image that a view needs depends on the image's size only,
so it is known before decoding.

The views of an image are numbered over all its groups, in order. View 0 takes its random numbers from (seed, epoch,
sample); the others take theirs from a seed of their own, which is hashed from the seed and the view's number. A group
may take those of another (`Views.repeats`).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch

from pipeline.architecture.pixels import ANY_TYPE, FULL_RANGE, RGB8, Pixels
from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.split import Split
from pipeline.data.loading.decode import decode, inspect, left_out
from pipeline.data.loading.distort import distort
from pipeline.data.loading.jpeg_region import Region
from pipeline.data.loading.values import model_values
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig

# The loader has its own threads; OpenCV must not start more inside them.
cv2.setNumThreads(0)

_FLIP_VERTICAL, _TURNS = Purpose.named("flip_vertical"), Purpose.named("turns")
_CROP_TRIES = 100
_DRAWS_PER_TRY = 4
_FLIP_DRAW = _CROP_TRIES * _DRAWS_PER_TRY
# Limits the size of intermediate images: 65500 x 1, resized to a short side of 256, would be 16.8 M x 256.
MAX_ASPECT = 16
# Resize methods in addition to OpenCV's (cv2.INTER_...), and torch's names for them; see `resize`.
ANTIALIAS, BICUBIC = -1, -2
_TORCH = {ANTIALIAS: "bilinear", BICUBIC: "bicubic"}
_AREA_CHANNELS = 4  # OpenCV's INTER_AREA takes no more at once.
# As torchvision's RandomResizedCrop.
_RESIZED_CROP_TRIES = 10
# resize_filter -> the method that shrinks a whole image.
_SHRINK = {"linear": cv2.INTER_AREA, "antialias": ANTIALIAS, "bilinear": cv2.INTER_LINEAR, "bicubic": BICUBIC}
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
            regions[:] = [train_region(height, width, config, seed, epoch, row) for config, seed in drawn]
            return bounding_box(regions)

        own = read_as(row) if read_as else pixels
        image = model_values(decode(data, choose, own), own, pixels)
        first_row, first_column, _, _ = bounding_box(regions)
        for out, (top, left, height, width), (config, seed) in zip(outs, regions, drawn, strict=True):
            top, left = top - first_row, left - first_column
            part = image[top : top + height, left : left + width]
            write_train_view_of_region(part, out, config, seed, epoch, row, pixels)

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
            image = kept[row] = epoch_invariant_part(decode(data), (image_size, image_size), config)
        write_train_view(image, outs[0], config, seed, epoch, row)

    return ViewWriter(((1, image_size, image_size),), write)


def eval_view(
    config: AugmentConfig, image_size: ImageSize | int, pixels: Pixels = RGB8, read_as: ReadAs = None
) -> ViewWriter:
    """Returns a writer of the evaluation view, the same for every epoch and row."""

    def write(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        own = read_as(row) if read_as else pixels
        write_eval_view(model_values(decode(data, pixels=own), own, pixels), outs[0], config)

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


def write_train_view(
    image: np.ndarray, out: np.ndarray, config: AugmentConfig, seed: int, epoch: int, sample: int, pixels: Pixels = RGB8
) -> None:
    """Write the augmented view of `image`, (H, W, C) of the type of a batch of `pixels`, into `out`, (height, width, C)
    of the same.
    """
    top, left, height, width = train_region(image.shape[0], image.shape[1], config, seed, epoch, sample)
    part = image[top : top + height, left : left + width]
    write_train_view_of_region(part, out, config, seed, epoch, sample, pixels)


def train_region(height: int, width: int, config: AugmentConfig, seed: int, epoch: int, sample: int) -> Region:
    """Returns the region of an image of this size that the augmented view shows."""
    choose = {"inception": inception_crop, "random_resized": random_resized_crop}.get(config.crop)
    if choose is None:
        return 0, 0, height, width
    return choose(height, width, config, random_numbers.draws(seed, Purpose.CROP_AND_FLIP, epoch, sample))


def write_train_view_of_region(
    image: np.ndarray, out: np.ndarray, config: AugmentConfig, seed: int, epoch: int, sample: int, pixels: Pixels = RGB8
) -> None:
    """Write the augmented view into `out`, as `write_train_view`. image: the region that `train_region` returned."""
    view = out.shape[:2]
    draw = random_numbers.draws(seed, Purpose.CROP_AND_FLIP, epoch, sample)
    method = _train_method(config)
    if config.crop in ("resize_crop", "resize_small_crop"):
        image = epoch_invariant_part(image, view, config)
        if pad := config.padding:
            padded = image.shape[0] + 2 * pad, image.shape[1] + 2 * pad, -1  # OpenCV drops the axis of one channel.
            image = cv2.copyMakeBorder(image, pad, pad, pad, pad, cv2.BORDER_REFLECT_101).reshape(padded)
        top, left = _placed(image.shape[0] - view[0], image.shape[1] - view[1], draw(0), draw(1))
        image = image[top : top + view[0], left : left + view[1]]
    _resize_into(image, out, method)
    if config.flip and draw(_FLIP_DRAW) < 0.5:
        cv2.flip(out, 1, dst=out)
    if config.flip_vertical and random_numbers.draws(seed, _FLIP_VERTICAL, epoch, sample)(0) < 0.5:
        cv2.flip(out, 0, dst=out)
    if config.turns:
        out[:] = np.rot90(out, int(4 * random_numbers.draws(seed, _TURNS, epoch, sample)(0)))
    distort(out, config, seed, epoch, sample, pixels)


def epoch_invariant_part(image: np.ndarray, view: tuple[int, int], config: AugmentConfig) -> np.ndarray:
    """The part of the preprocessing that is the same in all epochs: `image` resized to the size it is cropped from.

    The training view of the result equals the view of `image`, (H, W, C), bit for bit. Crops that do not begin with
    such a resize return `image` itself.
    """
    usual = min(view) if config.padding else round(min(view) * 7 / 6)
    frame = enlarged(view, config.resize_to or usual)
    if config.crop == "resize_small_crop":
        return _cover(image, frame, config)
    if config.crop == "none":
        frame = view
    elif config.crop != "resize_crop":
        return image
    return image if image.shape[:2] == frame else resize(image, frame[::-1], _train_method(config))


def _train_method(config: AugmentConfig) -> int:
    return {"antialias": ANTIALIAS, "bicubic": BICUBIC}.get(config.resize_filter, cv2.INTER_LINEAR)


def inception_crop(height: int, width: int, config: AugmentConfig, draw: Callable[[int], float]) -> Region:
    """(top, left, height, width) of a crop of random area and aspect, as TensorFlow's sample_distorted_bounding_box.

    The aspect is uniform in its range; then the height is uniform among those that keep the area in its range. Returns
    the whole image when 100 tries give no valid crop. draw: uniform numbers of this sample; each try uses the next 4.
    """
    min_area, max_area = config.area_min * height * width, config.area_max * height * width
    for attempt in range(_CROP_TRIES):
        first = attempt * _DRAWS_PER_TRY
        u_aspect, u_height, u_top, u_left = map(draw, range(first, first + _DRAWS_PER_TRY))
        aspect = config.aspect_min + u_aspect * (config.aspect_max - config.aspect_min)
        low = round((min_area / aspect) ** 0.5)
        high = min(round((max_area / aspect) ** 0.5), int((width + 0.5) / aspect), height)
        low = min(low, high)
        crop_height = low + int(u_height * (high - low + 1))
        crop_width = round(crop_height * aspect)
        # Rounding may exceed the range by one row.
        if crop_height * crop_width < min_area:
            crop_height += 1
        elif crop_height * crop_width > max_area:
            crop_height -= 1
        crop_width = round(crop_height * aspect)
        fits = 0 < crop_height <= height and 0 < crop_width <= width
        if fits and min_area <= crop_height * crop_width <= max_area:
            return *_placed(height - crop_height, width - crop_width, u_top, u_left), crop_height, crop_width
    return 0, 0, height, width


def random_resized_crop(height: int, width: int, config: AugmentConfig, draw: Callable[[int], float]) -> Region:
    """(top, left, height, width) of a crop as torchvision's RandomResizedCrop: uniform area, log-uniform aspect.

    After 10 tries that do not fit, the largest central crop with an aspect in its range. draw: as of `inception_crop`.
    """
    least, most = math.log(config.aspect_min), math.log(config.aspect_max)
    for first in range(0, _RESIZED_CROP_TRIES * _DRAWS_PER_TRY, _DRAWS_PER_TRY):
        u_area, u_aspect, u_top, u_left = map(draw, range(first, first + _DRAWS_PER_TRY))
        area = (config.area_min + u_area * (config.area_max - config.area_min)) * height * width
        aspect = math.exp(least + u_aspect * (most - least))
        crop_height, crop_width = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
        if 0 < crop_height <= height and 0 < crop_width <= width:
            return *_placed(height - crop_height, width - crop_width, u_top, u_left), crop_height, crop_width
    # The sides are at least 1: an image of 1 x 1000 has no pixel to lose.
    crop_height = min(height, max(1, round(width / config.aspect_min)))
    crop_width = min(width, max(1, round(height * config.aspect_max)))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def write_eval_view(image: np.ndarray, out: np.ndarray, config: AugmentConfig) -> None:
    """Write the deterministic evaluation view of `image`, (H, W, C), into `out`, (height, width, C) of the same type.

    eval_crop "center": resize the short side to eval_resize, crop the centre. "resize": resize the whole image.
    "resize_center": resize the whole image to a frame whose short side is eval_resize, crop its centre. Shrinking is by
    area (resize_filter=linear), antialiased or bilinear; enlarging is bilinear.
    """
    view = height, width = out.shape[:2]
    if config.eval_crop != "resize":
        frame = enlarged(view, config.eval_resize or default_eval_resize(view))
        if config.eval_crop == "center":
            image = _cover(image, frame, config)
        else:
            image = resize(image, frame[::-1], resize_method(image, frame, config))
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        image = image[top : top + height, left : left + width]
    _resize_into(image, out, resize_method(image, view, config))


def _placed(rows_left: int, columns_left: int, u_top: float, u_left: float) -> tuple[int, int]:
    """(top, left) of a crop that leaves so many rows and columns. u_top, u_left: uniform numbers."""
    return int(u_top * (rows_left + 1)), int(u_left * (columns_left + 1))


def default_eval_resize(view: tuple[int, int]) -> int:
    """The short side to which images are resized for a view (height, width) if eval_resize is 0."""
    return round(min(view) * 8 / 7)


def enlarged(view: tuple[int, int], short: int) -> tuple[int, int]:
    """(height, width) of a view, scaled to a short side of `short`: the frame that the view is cropped from."""
    height, width = view
    return round(height * short / min(view)), round(width * short / min(view))


def resize_method(image: np.ndarray, size: tuple[int, int], config: AugmentConfig) -> int:
    """Resize method for an evaluation image to (height, width). The antialias filter adapts to each side separately."""
    shrinks = image.shape[0] > size[0] and image.shape[1] > size[1]
    return (
        _SHRINK[config.resize_filter]
        if shrinks or config.resize_filter in ("antialias", "bicubic")
        else cv2.INTER_LINEAR
    )


def _cover(image: np.ndarray, frame: tuple[int, int], config: AugmentConfig) -> np.ndarray:
    """Resize to the smallest size that covers (height, width), keeping the aspect; crop the ends of very long images
    first.
    """
    height, width = image.shape[:2]
    longest = MAX_ASPECT * min(height, width)
    top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
    image = image[top : height - top, left : width - left]
    height, width = image.shape[:2]
    scale = max(frame[0] / height, frame[1] / width)
    new = max(frame[1], round(width * scale)), max(frame[0], round(height * scale))
    if new == (width, height):
        return image
    return resize(
        image,
        new,
        _SHRINK[config.resize_filter] if scale < 1 or config.resize_filter == "bicubic" else cv2.INTER_LINEAR,
    )


def _resize_into(image: np.ndarray, out: np.ndarray, method: int) -> None:
    if image.shape == out.shape:
        out[:] = image
    else:
        resize(image, out.shape[1::-1], method, out)


def resize(image: np.ndarray, size: tuple[int, int], method: int, out: np.ndarray | None = None) -> np.ndarray:
    """(H, W, C) of the type of a batch -> (height, width, C) for size (width, height). method: one of OpenCV's,
    ANTIALIAS or BICUBIC.

    ANTIALIAS is Pillow's bilinear: a triangle filter that widens with the scale; BICUBIC is Pillow's bicubic. Torch's
    uint8 kernel takes a quarter of Pillow's time, is equal to within one level, and releases the GIL as OpenCV does.
    Integers of 16 bits are resized in float32 there, and rounded.
    """
    if method not in _TORCH:
        if method == cv2.INTER_AREA and image.shape[2] > _AREA_CHANNELS:
            firsts = range(0, image.shape[2], _AREA_CHANNELS)
            parts = [np.ascontiguousarray(image[..., first : first + _AREA_CHANNELS]) for first in firsts]
            resized = [cv2.resize(part, size, interpolation=method).reshape(*size[::-1], -1) for part in parts]
            return np.concatenate(resized, axis=2, out=out)
        return cv2.resize(image, size, dst=out, interpolation=method).reshape(*size[::-1], -1)
    # Adding the batch dimension before permuting gives channels_last strides; otherwise torch computes plane by plane
    # and takes twice the time.
    channels_first = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    if image.dtype != np.uint8:  # Its kernel of floats is quicker plane by plane.
        channels_first = channels_first.to(torch.float32, memory_format=torch.contiguous_format)
    filtered = torch.nn.functional.interpolate(channels_first, size[::-1], mode=_TORCH[method], antialias=True)
    if image.dtype == np.float32:
        filtered.clamp_(0, 1)  # A bicubic filter exceeds the range.
    elif image.dtype != np.uint8:
        filtered.round_().clamp_(*FULL_RANGE[image.dtype.name])
    pixels = filtered[0].permute(1, 2, 0).numpy()
    if out is None:
        return pixels.astype(image.dtype, copy=False)
    out[:] = pixels
    return out
