"""Number of parameters and FLOPs of a model, computed from its configuration.

Letters as in vit.py: N tokens, D width, M MLP width.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from pipeline.architecture.config import Config, ResNetConfig, ViTConfig
from pipeline.model.build import build
from pipeline.model.resnet import STEM_WIDTH, stem_channels, unit_shapes


@cache
def num_parameters(config: Config) -> int:
    """The exact number of parameters, with head and representation layer (ViT paper, Table 1, gives it rounded)."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def forward_macs(config: Config) -> int:
    """Multiply-adds of the forward pass of one image.

    Not counted: norms, softmax, activations, biases, weight standardisation, and everything after the last block: attention
    pooling (1 % of ViT-B/16), representation layer and head.
    """
    if isinstance(config, ResNetConfig):
        return _resnet_macs(config.pixels.num_channels, config.units, config.width, config.image_size)
    inputs = config.pixels.num_channels
    stem, channels = 0, inputs
    if config.stem is not None:
        stem, channels = _resnet_macs(inputs, config.stem, STEM_WIDTH, config.image_size), stem_channels(config.stem)
    if config.small_stem is not None:
        stem, channels = _small_stem_macs(inputs, config.small_stem, config.image_size), config.small_stem[-1]
    N, D, M = config.num_tokens, config.width, config.mlp_width
    embedding = config.num_patches * channels * config.patch_size**2 * D
    dense = N * (4 * D**2 + (3 if config.swiglu else 2) * D * M)  # q, k, v, out; MLP
    return stem + embedding + config.num_blocks * dense + attention_macs(config)


def attention_macs(config: ViTConfig) -> int:
    """The part of forward_macs that is quadratic in N: queries with keys, attention weights with values."""
    rows, columns = config.grid
    num_keys = columns + rows if config.axial else config.num_tokens  # per token, in all blocks of one depth
    products = 3 if config.positions == "relative" else 2  # the third: queries with the keys of the offsets
    return config.depth * products * config.num_tokens * num_keys * config.width


def training_flops_per_image(config: Config, trained_blocks: int | None = None) -> int:
    """FLOPs of training on one image: 2 per multiply-add, and the backward pass costs twice the forward pass.

    The ViT paper counts so (Table 6: L/16, 7 epochs of 303 M images, 783 exaFLOPs). Recomputed activations do not count, so that
    MFU = this * images/s / peak.
    trained_blocks: number of last blocks that are trained, where the others are frozen and have no backward pass; None is all.
    """
    macs = forward_macs(config)
    if trained_blocks is None:
        return 3 * 2 * macs
    if not trained_blocks or isinstance(config, ResNetConfig):
        return 2 * macs  # Only the head is trained, which does not count.
    deeper = forward_macs(replace(config, depth=config.depth + 1)) - macs
    return 2 * (macs + 2 * trained_blocks * deeper * config.depth // config.num_blocks)


def _resnet_macs(channels: int, units: tuple[int, ...], width: int, image_size: tuple[int, int]) -> int:
    height, columns = (-(-side // 2) for side in image_size)
    macs = height * columns * 7 * 7 * channels * width  # the root's convolution; its pooling halves the sides again
    sides = [-(-height // 2), -(-columns // 2)]
    for inputs, mid, stride in unit_shapes(units, width):
        before = sides[0] * sides[1]
        sides = [-(-side // stride) for side in sides]
        after = sides[0] * sides[1]
        macs += before * inputs * mid + after * (9 * mid**2 + mid * 4 * mid)
        if stride == 2 or inputs != 4 * mid:
            macs += after * inputs * 4 * mid  # the shortcut
    return macs


def _small_stem_macs(inputs: int, channels: tuple[int, ...], image_size: tuple[int, int]) -> int:
    height, width = image_size
    macs = height * width * 9 * inputs * channels[0]
    for inputs, outputs in pairwise((channels[0], *channels)):
        if outputs > inputs:
            height, width = -(-height // 2), -(-width // 2)
            macs += height * width * inputs * outputs  # the shortcut
        macs += height * width * 9 * (inputs + outputs) * outputs
    return macs
