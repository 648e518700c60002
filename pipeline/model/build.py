"""Builds the model of a configuration, and counts its parameters and FLOPs."""

from dataclasses import replace
from functools import cache

import torch

from pipeline.architecture.config import Config, ResNetConfig, ViTConfig
from pipeline.model.resnet import ResNet
from pipeline.model.vit import MaskedViT, VisionTransformer

Model = VisionTransformer | ResNet


def build(config: Config, seed: int = 0) -> Model:
    """A new model of this configuration; `create` builds one by name."""
    if isinstance(config, ResNetConfig):
        return ResNet(config, seed)
    return MaskedViT(config, seed) if config.masked else VisionTransformer(config, seed)


@cache
def num_parameters(config: Config) -> int:
    """The exact number of parameters, with head and representation layer (ViT paper, Table 1, gives it rounded)."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


@cache
def forward_macs(config: Config) -> int:
    """Multiply-adds of the forward pass of one image, as torch counts them on the meta device.

    Not counted: norms, softmax, activations, biases, weight standardisation, and everything after the last block:
    attention pooling (1 % of ViT-B/16), representation layer and head.
    """
    from torch.utils.flop_counter import FlopCounterMode  # Late: it imports much.

    if isinstance(config, ViTConfig) and config.depth > 2:  # Counting all blocks of a deep model takes seconds.
        one, two = (forward_macs(replace(config, depth=depth)) for depth in (1, 2))
        return one + (config.depth - 1) * (two - one)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model, images = build(config).eval(), torch.empty(1, config.pixels.num_channels, *config.image_size)
        if isinstance(model, VisionTransformer):
            model.encode(model.embed(images))
        else:
            model.feature_map(images)
    return counter.get_total_flops() // 2


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
