"""Mixup (Zhang et al. 2018, arXiv 1710.09412) and CutMix (Yun et al. 2019, arXiv 1905.04899), on the device.

Positions 2i and 2i + 1 of the global batch are partners, and one draw from (seed, step) applies to the whole batch. Any
number of ranks and micro-batches therefore gives the same images and targets, bit for bit: each micro-batch starts at
an even position and contains both samples of a pair (`make_plan` refuses odd sizes). big_vision also draws once per
step, but rolls the batch of each device by one, so its result depends on the number of devices.

Shapes: B batch, H, W image height and width, K classes.
"""

import math
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig


@dataclass(frozen=True)
class Mixing:
    """How one step mixes pairs. own: weight of a sample's own image and labels, in [0, 1]; the partner has the rest.

    box: CutMix's (top, left, bottom, right) in pixels, which partners swap; None for Mixup.
    """

    own: float
    box: tuple[int, int, int, int] | None


def draw_mixing(config: AugmentConfig, image_size: ImageSize | int, seed: int, step: int) -> Mixing | None:
    """Draw the mixing of a step; None if neither is enabled. If both are, each step uses one, p = 0.5 (as timm).

    image_size: size of the images; a number is the side of a square.
    """
    if not config.mixup and not config.cutmix:
        return None
    if not config.cutmix or (config.mixup and random_numbers.uniform(seed, Purpose.MIX_CHOICE, step) < 0.5):
        share = _beta(config.mixup, seed, Purpose.MIXUP, step)
        return Mixing(max(share, 1 - share), None)  # As big_vision: a sample's own weight is the larger one.
    height, width = ImageSize.parse(image_size)
    share = math.sqrt(1 - _beta(config.cutmix, seed, Purpose.CUTMIX, step))
    centers = random_numbers.uniform(seed, Purpose.CUTMIX_CENTER, step, np.arange(2))
    box = [
        min(max(int(center * side) + half * int(share * side) // 2, 0), side)
        for half in (-1, 1)
        for center, side in zip(centers, (height, width), strict=True)
    ]
    top, left, bottom, right = box
    # The weight follows from the part of the box inside the image, as in the authors' code.
    return Mixing(1 - (bottom - top) * (right - left) / (height * width), (top, left, bottom, right))


def mix_images(images: Tensor, valid: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Returns mixed images (B, 3, H, W), and each sample's own weight, float32 (B,), for `mix_pairs` of the targets.

    valid: bool (B,); a pair with an unreadable sample is not mixed: its weight is 1.
    """
    both_valid = (valid & partner(valid)).float()
    own = 1 - both_valid * (1 - mixing.own)
    if mixing.box is None:
        return mix_pairs(images, own), own
    top, left, bottom, right = mixing.box
    inside = torch.zeros(images.shape[2:], dtype=torch.bool, device=images.device)
    inside[top:bottom, left:right] = True
    return torch.where(inside & both_valid.bool()[:, None, None, None], partner(images), images), own


def mix_pairs(values: Tensor, own: Tensor) -> Tensor:
    """Returns own * values + (1 - own) * values of the partner, for values (B, ...) and own (B,)."""
    own = own.reshape(-1, *[1] * (values.ndim - 1))
    return partner(values).mul_(1 - own).add_(own * values)


def partner(values: Tensor) -> Tensor:
    """Swap rows 0 and 1, 2 and 3, ... of (B, ...)."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _beta(alpha: float, seed: int, purpose: Purpose, step: int) -> float:
    """Draw from Beta(alpha, alpha), alpha at most 1, by Johnk's method (1964).

    In logarithms, because u ** (1 / alpha) underflows for small alpha.
    """
    for attempt in count():
        u, v = (1 - random_numbers.uniform(seed, purpose, step, 2 * attempt + np.arange(2))).tolist()
        x, y = math.log(u) / alpha, math.log(v) / alpha
        if math.exp(x) + math.exp(y) <= 1:
            return 1 / (1 + math.exp(min(y - x, 700)))
    raise AssertionError
