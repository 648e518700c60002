"""Number of parameters and FLOPs of a model, computed from its configuration.

Letters as in vit.py: N tokens, D width, M MLP width.
"""

from dataclasses import replace
from functools import cache

import torch

from pipeline.architecture.config import Config, ResNetConfig, ViTConfig
from pipeline.model.build import build
from pipeline.model.vit import VisionTransformer


@cache
def num_parameters(config: Config) -> int:
    """The exact number of parameters, with head and representation layer (ViT paper, Table 1, gives it rounded)."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


@cache
def forward_macs(config: Config) -> int:
    """Multiply-adds of the forward pass of one image.

    Not counted: norms, softmax, activations, biases, weight standardisation, and everything after the last block:
    attention pooling (1 % of ViT-B/16), representation layer and head.
    """
    if isinstance(config, ResNetConfig):
        return _convolutions(replace(config, num_classes=0))[0]
    stem, channels = _convolutions(config) if config.has_stem else (0, config.pixels.num_channels)
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

    The ViT paper counts so (Table 6: L/16, 7 epochs of 303 M images, 783 exaFLOPs). Recomputed activations do not
    count, so that MFU = this * images/s / peak.
    trained_blocks: number of last blocks that are trained, where the others are frozen and have no backward pass; None
    is all.
    """
    macs = forward_macs(config)
    if trained_blocks is None:
        return 3 * 2 * macs
    if not trained_blocks or isinstance(config, ResNetConfig):
        return 2 * macs  # Only the head is trained, which does not count.
    deeper = forward_macs(replace(config, depth=config.depth + 1)) - macs
    return 2 * (macs + 2 * trained_blocks * deeper * config.depth // config.num_blocks)


def _convolutions(config: Config) -> tuple[int, int]:
    """(multiply-adds, output channels) of a ResNet, or of the stem of a hybrid, as torch counts them on the meta
    device.
    """
    from torch.utils.flop_counter import FlopCounterMode  # Late: it imports much.

    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model = build(config)
        images = torch.empty(1, config.pixels.num_channels, *config.image_size)
        output = model.stem(images) if isinstance(model, VisionTransformer) and model.stem else model(images)
    return counter.get_total_flops() // 2, output.shape[1]
