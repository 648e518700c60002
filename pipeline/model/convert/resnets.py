"""Reads the configuration of a ResNet (BiT, or the stem of a hybrid) from tensors of other projects' files."""

import re
from collections.abc import Iterable

from pipeline.architecture.config import ResNetConfig
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.model.convert.entries import Entries, Tensors, key_pattern, model_entries
from pipeline.model.convert.tables import NAMES


def is_bit(tensors: Tensors) -> bool:
    return "resnet/root_block/standardized_conv2d/kernel" in tensors or "stem.conv.weight" in tensors


def find_bit(tensors: Tensors, image_size: tuple[int, int], pixels: Pixels | None = None) -> ResNetConfig:
    """The configuration found in the tensors, which do not tell the image size. Raises UserError for an impossible
    one.
    """
    flax = any(key.startswith("resnet/") for key in tensors)
    root = tensors["resnet/root_block/standardized_conv2d/kernel" if flax else "stem.conv.weight"]
    head = tensors.get("resnet/head/conv2d/bias" if flax else "head.fc.bias")
    if (head is not None and head.ndim != 1) or root.ndim != 4:
        raise UserError("the root's kernel should have 4 axes, and the head's bias 1.")
    width = root.shape[3] if flax else root.shape[0]
    pixels = pixels or Pixels.of_unknown(3 if flax else root.shape[1])
    units = _count_units(tensors, NAMES["bit" if flax else "timm_bit"]["units"])
    return ResNetConfig(units, width, image_size, 0 if head is None else len(head), pixels=pixels)


def bit_entries(config: ResNetConfig, flax: bool) -> Entries:
    """Every tensor of a BiT ResNet, in the authors' layout (flax), which is for 8-bit RGB, or timm's. Raises
    UserError.
    """
    if flax and config.pixels != RGB8:
        raise UserError(f"an .npz cannot hold a ResNet of {config.pixels}; format = safetensors or timm can.")
    return model_entries(config, NAMES["bit" if flax else "timm_bit"])


def find_stem(tensors: Tensors) -> tuple[int, ...] | None:
    """Units of each stage of a hybrid's stem, () for its root alone, or None for a plain ViT."""
    if "conv_root/kernel" in tensors:
        return _count_units(tensors, NAMES["linen"]["units"])
    if any(key.startswith("patch_embed.backbone.") for key in tensors):
        return _count_units(tensors, NAMES["timm"]["units"])
    return None


def _count_units(keys: Iterable[str], template: str) -> tuple[int, ...]:
    pattern = key_pattern(template)
    found = {(int(match[1]), int(match[2])) for key in keys if (match := re.match(pattern, key))}
    stages = sorted({stage for stage, _ in found})
    return tuple(sum(stage == other for other, _ in found) for stage in stages)
