"""Augmentations after crop and flip: 3-Augment, colour jitter, brightness and contrast of each channel, grey, blur,
solarise, RandAugment, noise, random erasing, dropped channels, in this order.

Each has its own purpose in the random numbers of (seed, epoch, sample), so enabling one does not change the others.
Those of colours are for 8-bit RGB (`AugmentConfig.check_views`), all others for any number of channels and type.
"""

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist

import cv2
import numpy as np

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading import randaugment
from pipeline.data.loading.randaugment import grey
from pipeline.data.loading.values import lowest, store
from pipeline.settings.run import AugmentConfig

_ERASE_TRIES, _DRAWS_PER_TRY = 10, 4
_HUE, _JITTER_CHOICE, _THREE = map(Purpose.named, ("hue", "color_jitter_choice", "three_augment"))
_GREY, _BLUR, _SOLARISE = Purpose.named("grey"), Purpose.named("blur"), Purpose.named("solarise")
_CHANNEL_BRIGHTNESS, _CHANNEL_CONTRAST = map(Purpose.named, ("channel_brightness", "channel_contrast"))
_NOISE, _DROP_CHANNELS = map(Purpose.named, ("noise", "drop_channels"))
_MIN_SIGMA, _MAX_SIGMA, _THRESHOLD = 0.1, 2.0, 128  # BYOL, arXiv 2006.07733; same in DINO and LeJEPA.


def distort(
    image: np.ndarray, config: AugmentConfig, seed: int, epoch: int, sample: int, pixels: Pixels = RGB8
) -> None:
    """Apply the augmentations enabled in `config` to `image`, (H, W, C) of the type of a batch of `pixels`, in
    place.
    """

    def draws(purpose: Purpose) -> Callable[[int], float]:
        return random_numbers.draws(seed, purpose, epoch, sample)

    def happens(probability: float, purpose: Purpose) -> bool:
        return probability > 0 and draws(purpose)(0) < probability

    def numbers(purpose: Purpose, count: int, first: int = 0) -> np.ndarray:
        return random_numbers.uniform(seed, purpose, epoch, sample, np.arange(first, first + count))

    def integers(purpose: Purpose, count: int, kind: str, first: int) -> np.ndarray:
        """`count` numbers of an unsigned type, which the words from `first` on hold."""
        num_words = -(-count * np.dtype(kind).itemsize // 8)
        words = random_numbers.bits(seed, purpose, epoch, sample, np.arange(first, first + num_words))
        return words.astype("<u8").view(kind)[:count]

    channels = image.shape[2]
    if happens(config.three_augment, _THREE):
        draw = draws(_THREE)
        kinds = (
            grey,
            lambda image: randaugment.solarize(image, _THRESHOLD),
            lambda image: blur(image, _sigma(draw(2))),
        )
        image[:] = kinds[int(3 * draw(1))](image)
    jitters = config.color_jitter or config.saturation or config.hue
    if jitters and happens(config.color_jitter_probability, _JITTER_CHOICE):
        of_hue = numbers(_HUE, 2) if config.hue else None
        drawn = numbers(Purpose.COLOR_JITTER, 6)
        image[:] = color_jitter(image, config.color_jitter, drawn, config.saturation, config.hue, of_hue)
    if config.channel_brightness or config.channel_contrast:
        brightness = 1 + config.channel_brightness * (2 * numbers(_CHANNEL_BRIGHTNESS, channels) - 1)
        contrast = 1 + config.channel_contrast * (2 * numbers(_CHANNEL_CONTRAST, channels) - 1)
        scale_channels(image, pixels, brightness, contrast)
    if happens(config.grey, _GREY):
        image[:] = grey(image)
    if happens(config.blur, _BLUR):
        image[:] = blur(image, _sigma(draws(_BLUR)(1)))
    if happens(config.solarise, _SOLARISE):
        image[:] = randaugment.solarize(image, _THRESHOLD)
    if config.randaugment_layers:
        drawn = numbers(Purpose.RANDAUGMENT, config.randaugment_layers * randaugment.DRAWS_PER_LAYER)
        image[:] = randaugment.randaugment(
            image, config.randaugment_layers, config.randaugment_magnitude, drawn, config.randaugment_contrast
        )
    low, high = map(np.array, pixels.batch_range())
    if config.noise:
        share = config.noise * draws(_NOISE)(0)
        std = (share * (high - low)).astype(np.float32)
        normal = _quantiles()[integers(_NOISE, image.size, "<u2", first=1)]
        store(image + std * normal.reshape(image.shape), image)
    if happens(config.erase, Purpose.ERASING):
        num_drawn = _ERASE_TRIES * _DRAWS_PER_TRY
        top, left, height, width = erased_box(image.shape[0], image.shape[1], numbers(Purpose.ERASING, num_drawn, 1))
        box = image[top : top + height, left : left + width]
        kind = "u1" if image.dtype == np.uint8 else "<u2"
        filling = integers(Purpose.ERASING, box.size, kind, first=1 + num_drawn).reshape(box.shape)
        if kind == "u1" and not pixels.is_clipped:
            box[:] = filling
        else:
            store(low + filling * ((high - low) / np.iinfo(kind).max), box)
    if config.drop_channels:
        drawn = numbers(_DROP_CHANNELS, channels)
        dropped = drawn < config.drop_channels
        dropped[drawn.argmax()] = False  # One is always left.
        image[..., dropped] = lowest(pixels)[dropped]


def _sigma(draw: float) -> float:
    return _MIN_SIGMA + draw * (_MAX_SIGMA - _MIN_SIGMA)


def color_jitter(
    image: np.ndarray,
    strength: float,
    draws: np.ndarray,
    saturation: float,
    hue: float,
    of_hue: np.ndarray | None,
) -> np.ndarray:
    """Scale brightness, contrast and saturation of `image`, uint8 (H, W, 3), by factors from 1 - strength to 1 +
    strength.

    In a random order, as torchvision's ColorJitter. draws: 6 uniform numbers: three for the factors, three for the
    order.
    saturation: its own strength; 0 is `strength`. hue: turn hues by -hue to hue of the circle, with `of_hue`: 2 uniform
    numbers, for the angle and for the order.
    """
    change = (randaugment.brightness, randaugment.contrast, randaugment.color, turn_hue)
    turn, place_of_hue = (0, []) if of_hue is None else of_hue
    factors = [
        *(1 + np.array([strength, strength, saturation or strength]) * (2 * draws[:3] - 1)),
        hue * (2 * turn - 1),
    ]
    for i in np.argsort(np.append(draws[3:], place_of_hue)):
        image = change[i](image, factors[i])
    return image


def turn_hue(image: np.ndarray, turn: float) -> np.ndarray:
    """Turn the hues of `image`, uint8 (H, W, 3), by `turn` of the circle, as torchvision's adjust_hue of a tensor.

    In float32: torchvision's of a Pillow image rounds hue and saturation to 256 levels in between.
    """
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_RGB2HSV)
    hsv[..., 0] += 360 * (turn % 1)  # OpenCV reads any angle from 0, none below it.
    return cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB))


def scale_channels(image: np.ndarray, pixels: Pixels, brightness: np.ndarray, contrast: np.ndarray) -> None:
    """Multiply, in place, each channel's values above `low` by its brightness, then their distances from their mean by
    its contrast.

    image: (H, W, C) of the type of a batch. brightness, contrast: factors (C,).
    """
    low = np.array(pixels.batch_range()[0])
    mean = image.mean((0, 1), dtype=np.float64)
    store((image - mean) * (contrast * brightness) + (low + brightness * (mean - low)), image)


@cache
def _quantiles() -> np.ndarray:
    """The normal quantiles of (i + 1/2) / 2**16, float32."""
    inverse, count = NormalDist().inv_cdf, 2**16
    return np.array([inverse((i + 0.5) / count) for i in range(count)], np.float32)


def blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of `image`, (H, W, C), with a standard deviation of `sigma` pixels.

    The kernel ends at about 3 sigma, and the image is mirrored at its border, as in torchvision's gaussian_blur.
    """
    # OpenCV drops the axis of one channel.
    return cv2.GaussianBlur(image, (0, 0), sigma, borderType=cv2.BORDER_REFLECT_101).reshape(image.shape)


def erased_box(image_height: int, image_width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a box of 2 to 33 % of the area, height / width from 0.3 to 3.3, log-uniform.

    Random erasing (Zhong et al. 2017, arXiv 1708.04896); ranges and number of tries as torchvision's RandomErasing.
    Returns an empty box when none of the ten tries fits. draws: 4 uniform numbers per try.
    """
    for u_area, u_aspect, u_top, u_left in draws.reshape(-1, _DRAWS_PER_TRY).tolist():
        area = (0.02 + u_area * (0.33 - 0.02)) * image_height * image_width
        aspect = math.exp(math.log(0.3) + u_aspect * (math.log(3.3) - math.log(0.3)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < image_height and width < image_width:
            top, left = int(u_top * (image_height - height + 1)), int(u_left * (image_width - width + 1))
            return top, left, height, width
    return 0, 0, 0, 0
