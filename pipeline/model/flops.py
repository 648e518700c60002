"""What a model costs: parameters and arithmetic, from its configuration alone.

Letters as in vit.py: N tokens, D width, L depth, M MLP width, P patch side, C channels.
"""

from functools import cache

import torch

from pipeline.model.build import build
from pipeline.model.resnet import unit_shapes
from pipeline.model.variants import Config, ResNetConfig, ViTConfig


@cache
def num_parameters(config: Config) -> int:
    """The exact number of parameters, head and representation layer included (ViT paper, Table 1, rounded)."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def forward_macs(config: Config) -> int:
    """Multiply-adds of one image's forward pass.

    Not counted: norms, softmax, activations, biases, the standardisation of kernels, and what follows the last block:
    attention pooling (1 % of ViT-B/16), representation layer and head.
    """
    if isinstance(config, ResNetConfig):
        return _resnet_macs(config.units, config.width, config.image_size)
    stem, channels = 0, 3
    if config.stem is not None:
        stem = _resnet_macs(config.stem, 64, config.image_size)
        channels = 64 * 2 ** (len(config.stem) + 1) if config.stem else 64
    N, D, M = config.num_tokens, config.width, config.mlp_width
    rows, columns = config.grid
    embedding = rows * columns * channels * config.patch_size**2 * D
    dense = N * (4 * D**2 + 2 * D * M)  # q, k, v, out; MLP
    return stem + embedding + config.num_blocks * dense + attention_macs(config)


def attention_macs(config: ViTConfig) -> int:
    """Those of the forward pass that grow with the square of the tokens: queries with keys, weights with values."""
    rows, columns = config.grid
    num_keys = columns + rows if config.axial else config.num_tokens  # that a token meets, in all blocks of one depth
    products = 3 if config.positions == "relative" else 2  # the third: queries with the offsets' keys
    return config.depth * products * config.num_tokens * num_keys * config.width


def training_flops_per_image(config: Config) -> int:
    """FLOPs of one image in training: 2 a multiply-add, and the backward pass costs twice the forward.

    This is how the ViT paper counts (Table 6: L/16, 7 epochs of 303 M images, 783 exaFLOPs). Recomputation of
    activations does not add to it, so that MFU = this * images/s / peak.
    """
    return 3 * 2 * forward_macs(config)


def _resnet_macs(units: tuple[int, ...], width: int, image_size: tuple[int, int]) -> int:
    def halved(size: tuple[int, int]) -> tuple[int, int]:
        return -(-size[0] // 2), -(-size[1] // 2)

    size = halved(image_size)
    macs = size[0] * size[1] * 7 * 7 * 3 * width  # the root
    size = halved(size)
    for inputs, mid, stride in unit_shapes(units, width):
        macs += size[0] * size[1] * inputs * mid
        size = halved(size) if stride == 2 else size
        macs += size[0] * size[1] * (9 * mid**2 + mid * 4 * mid)
        if stride == 2 or inputs != 4 * mid:
            macs += size[0] * size[1] * inputs * 4 * mid  # the shortcut
    return macs
