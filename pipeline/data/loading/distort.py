"""Augmentations after crop and flip: colour jitter, RandAugment, random erasing, in this order.

Each has its own purpose in the random numbers of (seed, epoch, sample), so enabling one does not change the others.
"""

import math

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading import randaugment
from pipeline.settings.run import AugmentConfig

_ERASE_TRIES, _DRAWS_PER_TRY = 10, 4


def distort(image: np.ndarray, config: AugmentConfig, seed: int, epoch: int, sample: int) -> None:
    """Apply the augmentations enabled in `config` to `image`, uint8 (H, W, 3), in place."""
    if config.color_jitter:
        draws = random_numbers.uniform(seed, Purpose.COLOR_JITTER, epoch, sample, np.arange(6))
        image[:] = color_jitter(image, config.color_jitter, draws)
    if config.randaugment_layers:
        count = config.randaugment_layers * randaugment.DRAWS_PER_LAYER
        draws = random_numbers.uniform(seed, Purpose.RANDAUGMENT, epoch, sample, np.arange(count))
        image[:] = randaugment.randaugment(
            image, config.randaugment_layers, config.randaugment_magnitude, draws, config.randaugment_contrast
        )
    if config.erase and random_numbers.uniform(seed, Purpose.ERASING, epoch, sample, 0) < config.erase:
        draws = random_numbers.uniform(
            seed, Purpose.ERASING, epoch, sample, np.arange(1, 1 + _ERASE_TRIES * _DRAWS_PER_TRY)
        )
        top, left, height, width = erased_box(image.shape[0], image.shape[1], draws)
        noise = random_numbers.bits(
            seed, Purpose.ERASING, epoch, sample, 1 + len(draws) + np.arange(-(-height * width * 3 // 8))
        )
        noise = noise.astype("<u8").view(np.uint8)[: height * width * 3]
        image[top : top + height, left : left + width] = noise.reshape(height, width, 3)


def color_jitter(image: np.ndarray, strength: float, draws: np.ndarray) -> np.ndarray:
    """Scale brightness, contrast and saturation of `image`, uint8 (H, W, 3), by factors from 1 - strength to 1 + strength.

    In a random order, as torchvision's ColorJitter. draws: 6 uniform numbers: three for the factors, three for the order.
    """
    change = (randaugment.brightness, randaugment.contrast, randaugment.color)
    for i in np.argsort(draws[3:]):
        image = change[i](image, 1 + strength * (2 * draws[i] - 1))
    return image


def erased_box(image_height: int, image_width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a box of 2 to 33 % of the area, height / width from 0.3 to 3.3, log-uniform.

    Random erasing (Zhong et al. 2017, arXiv 1708.04896); ranges and number of tries as torchvision's RandomErasing. Returns an
    empty box when none of the ten tries fits. draws: 4 uniform numbers per try.
    """
    for u_area, u_aspect, u_top, u_left in draws.reshape(-1, _DRAWS_PER_TRY).tolist():
        area = (0.02 + u_area * (0.33 - 0.02)) * image_height * image_width
        aspect = math.exp(math.log(0.3) + u_aspect * (math.log(3.3) - math.log(0.3)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < image_height and width < image_width:
            top, left = int(u_top * (image_height - height + 1)), int(u_left * (image_width - width + 1))
            return top, left, height, width
    return 0, 0, 0, 0
