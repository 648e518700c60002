"""Decoded pixels -> the model's view: crops, flips and resizes on uint8, written straight into the batch.

Random numbers come from (seed, epoch, sample, draw), never from a worker's state.
"""

import cv2
import numpy as np

from pipeline.config import AugmentConfig
from pipeline.data import rng
from pipeline.data.distort import distort

# Decoding threads are ours; OpenCV must not start its own inside them.
cv2.setNumThreads(0)

_CROP_TRIES = 100
_DRAWS_PER_TRY = 4
_FLIP_DRAW = _CROP_TRIES * _DRAWS_PER_TRY
_AUGMENT = 3
# A picture of 65500 x 1 must not become one of 16.8 M x 256 on the way to a square of it.
_MAX_ASPECT = 16


def train_view(image: np.ndarray, out: np.ndarray, config: AugmentConfig, seed: int, epoch: int, sample: int) -> None:
    """Write the augmented view of `image`, uint8 (H, W, 3), into `out`, uint8 (S, S, 3)."""
    size = out.shape[0]
    if config.crop == "inception":
        draws = rng.uniform(seed, _AUGMENT, epoch, sample, np.arange(_DRAWS_PER_TRY))
        top, left, height, width = inception_crop(image.shape[0], image.shape[1], config, draws, seed, epoch, sample)
        image = image[top : top + height, left : left + width]
    elif config.crop in ("resize_crop", "resize_small_crop"):
        side = config.resize_to or round(size * 7 / 6)
        if config.crop == "resize_crop":
            image = cv2.resize(image, (side, side), interpolation=cv2.INTER_LINEAR)
        else:
            image = _resize_short(_without_ends(image), side)
        draws = rng.uniform(seed, _AUGMENT, epoch, sample, np.arange(2))
        top, left = (int(draw * (long - size + 1)) for draw, long in zip(draws, image.shape[:2], strict=True))
        image = image[top : top + size, left : left + size]
    _resize_into(image, out, cv2.INTER_LINEAR)
    if config.flip and rng.uniform(seed, _AUGMENT, epoch, sample, _FLIP_DRAW) < 0.5:
        out[:] = out[:, ::-1].copy()
    distort(out, config, seed, epoch, sample)


def inception_crop(
    height: int, width: int, config: AugmentConfig, draws: np.ndarray, seed: int, epoch: int, sample: int
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a crop of random area and aspect, as TensorFlow's sample_distorted_bounding_box.

    The aspect is uniform in its range, then the height is uniform among those that keep the area in its range. The
    whole image when 100 tries give no valid crop. draws: 4 uniforms for the first try; later tries draw their own.
    """
    min_area, max_area = config.area_min * height * width, config.area_max * height * width
    for attempt in range(_CROP_TRIES):
        if attempt:
            first = attempt * _DRAWS_PER_TRY
            draws = rng.uniform(seed, _AUGMENT, epoch, sample, np.arange(first, first + _DRAWS_PER_TRY))
        u_aspect, u_height, u_top, u_left = draws.tolist()
        aspect = config.aspect_min + u_aspect * (config.aspect_max - config.aspect_min)
        low = round((min_area / aspect) ** 0.5)
        high = min(round((max_area / aspect) ** 0.5), int((width + 0.5) / aspect), height)
        low = min(low, high)
        crop_height = low + int(u_height * (high - low + 1))
        crop_width = round(crop_height * aspect)
        # Rounding may have left the range by one row.
        if crop_height * crop_width < min_area:
            crop_height += 1
        elif crop_height * crop_width > max_area:
            crop_height -= 1
        crop_width = round(crop_height * aspect)
        fits = 0 < crop_height <= height and 0 < crop_width <= width
        if fits and min_area <= crop_height * crop_width <= max_area:
            top, left = int(u_top * (height - crop_height + 1)), int(u_left * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    return 0, 0, height, width


def eval_view(image: np.ndarray, out: np.ndarray, config: AugmentConfig) -> None:
    """Write the evaluation view of `image`, uint8 (H, W, 3), into `out`, uint8 (S, S, 3): nothing random.

    "center": short side to eval_resize (area method when shrinking), then the central square. "resize": all of it.
    """
    size = out.shape[0]
    if config.eval_crop == "center":
        image = _resize_short(_without_ends(image), config.eval_resize or round(size * 8 / 7))
        top, left = (image.shape[0] - size) // 2, (image.shape[1] - size) // 2
        image = image[top : top + size, left : left + size]
    _resize_into(image, out, cv2.INTER_AREA if min(image.shape[:2]) > size else cv2.INTER_LINEAR)


def _without_ends(image: np.ndarray) -> np.ndarray:
    """The central part of an image whose long side is more than 16 times its short side."""
    height, width = image.shape[:2]
    longest = _MAX_ASPECT * min(height, width)
    top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
    return image[top : height - top, left : width - left]


def _resize_short(image: np.ndarray, short: int) -> np.ndarray:
    """The image with its short side resized to `short`, its aspect kept; by the area method when it shrinks."""
    height, width = image.shape[:2]
    scale = short / min(height, width)
    new = max(short, round(width * scale)), max(short, round(height * scale))
    if new == (width, height):
        return image
    return cv2.resize(image, new, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)


def _resize_into(image: np.ndarray, out: np.ndarray, interpolation: int) -> None:
    if image.shape == out.shape:
        out[:] = image
    else:
        cv2.resize(image, out.shape[1::-1], dst=out, interpolation=interpolation)
