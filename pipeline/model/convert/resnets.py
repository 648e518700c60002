"""Names of the parts of a ResNet in other projects' files, for BiT and for the stem of a hybrid ViT.

official    google-research/big_transfer (BiT), google-research/vision_transformer (hybrids); Flax's axes
timm        resnetv2_*_bit, vit_*_r50_s16_* and similar
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.architecture.config import ResNetConfig
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.model.convert.entries import Entries, Entry, Tensors, key_pattern
from pipeline.model.resnet import STEM_WIDTH, stem_channels, unit_shapes


class UnitNames(NamedTuple):
    """Names of the parts of a bottleneck unit. {i} is the number of a convolution, {letter} its letter: a, b, c."""

    unit: str  # with the numbers {stage} and {unit}
    first: int  # the number of the first stage and unit
    conv: str
    norm: str
    shortcut: str
    shortcut_norm: str | None = None  # None: BiT's pre-activation unit, which has no such norm


_BIT = {
    True: UnitNames(
        "resnet/block{stage}/unit{unit:02d}/",
        1,
        "{letter}/standardized_conv2d",
        "{letter}/group_norm",
        "a/proj/standardized_conv2d",
    ),
    False: UnitNames("stages.{stage}.blocks.{unit}.", 0, "conv{i}", "norm{i}", "downsample.conv"),
}
_STEM = {
    True: UnitNames("block{stage}/unit{unit}/", 1, "conv{i}", "gn{i}", "conv_proj", "gn_proj"),
    False: UnitNames(
        "patch_embed.backbone.stages.{stage}.blocks.{unit}.",
        0,
        "conv{i}",
        "norm{i}",
        "downsample.conv",
        "downsample.norm",
    ),
}
_BIT_SUFFIXES = ("gamma", "beta")


def is_bit(tensors: Tensors) -> bool:
    return "resnet/root_block/standardized_conv2d/kernel" in tensors or "stem.conv.weight" in tensors


def find_bit(tensors: Tensors, image_size: tuple[int, int], pixels: Pixels | None = None) -> ResNetConfig:
    """The configuration found in the tensors, which do not tell the image size. Raises UserError for an impossible one."""
    flax = any(key.startswith("resnet/") for key in tensors)
    root = tensors["resnet/root_block/standardized_conv2d/kernel" if flax else "stem.conv.weight"]
    head = tensors.get("resnet/head/conv2d/bias" if flax else "head.fc.bias")
    if head is not None and head.ndim != 1:
        raise UserError(f"the head's bias should have 1 axis, but is {tuple(head.shape)}.")
    if root.ndim != 4:
        raise UserError(f"the root's kernel should have 4 axes, but is {tuple(root.shape)}.")
    width = root.shape[3] if flax else root.shape[0]
    pixels = pixels or Pixels.of_unknown(3 if flax else root.shape[1])
    return ResNetConfig(
        _count_units(tensors, _BIT[flax]), width, image_size, 0 if head is None else len(head), pixels=pixels
    )


def bit_entries(config: ResNetConfig, flax: bool) -> Entries:
    """Every tensor of a BiT ResNet, in the authors' layout (flax), which is for 8-bit RGB, or timm's. Raises UserError."""
    if flax and config.pixels != RGB8:
        raise UserError(f"an .npz cannot hold a ResNet of {config.pixels}; format = safetensors or timm can.")
    entries = Entries(flax)
    K, C = config.num_classes, config.num_features
    root = "resnet/root_block/standardized_conv2d" if flax else "stem.conv"
    entries.conv(root, "root", config.pixels.num_channels, config.width, 7)
    _add_units(entries, _BIT[flax], "units", config.units, config.width)
    entries.norm("resnet/group_norm" if flax else "norm", "norm", C, _BIT_SUFFIXES)
    if K:  # a 1 x 1 convolution in the file
        kernel = ("resnet/head/conv2d/kernel", (1, 1, C, K)) if flax else ("head.fc.weight", (K, C, 1, 1))
        entries.append(Entry(*kernel, "head.weight", (K, C)))
        entries.table("resnet/head/conv2d/bias" if flax else "head.fc.bias", "head.bias", K)
    return entries


def find_stem(tensors: Tensors) -> tuple[int, ...] | None:
    """Units of each stage of a hybrid's stem, () for its root alone, or None for a plain ViT."""
    if "conv_root/kernel" in tensors:
        return _count_units(tensors, _STEM[True])
    if any(key.startswith("patch_embed.backbone.") for key in tensors):
        return _count_units(tensors, _STEM[False])
    return None


def stem_root(units: tuple[int, ...]) -> str:
    """What timm's names of the convolution and norm of a stem's root begin with."""
    return "patch_embed.backbone.stem." if units else "patch_embed.backbone."


def add_stem(entries: Entries, units: tuple[int, ...], inputs: int) -> int:
    """Add every tensor of a hybrid's stem of `inputs` channels. Returns the number of its output channels."""
    flax, root = entries.flax, stem_root(units)
    entries.conv("conv_root" if flax else f"{root}conv", "stem.root", inputs, STEM_WIDTH, 7)
    entries.norm("gn_root" if flax else f"{root}norm", "stem.norm", STEM_WIDTH)
    _add_units(entries, _STEM[flax], "stem.units", units, STEM_WIDTH)
    return stem_channels(units)


def _add_units(entries: Entries, names: UnitNames, prefix: str, units: tuple[int, ...], width: int) -> None:
    """Add every tensor of the units. prefix: of our parameters' names."""
    numbers = [(stage, unit) for stage, count in enumerate(units) for unit in range(count)]
    for index, ((stage, unit), shape) in enumerate(zip(numbers, unit_shapes(units, width), strict=True)):
        inputs, mid, stride = shape
        key, name = names.unit.format(stage=stage + names.first, unit=unit + names.first), f"{prefix}.{index}"
        sizes = ((inputs, mid, 1), (mid, mid, 3), (mid, 4 * mid, 1))
        for i, (channels, outputs, side) in enumerate(sizes, start=1):
            conv, norm = (key + part.format(i=i, letter="_abc"[i]) for part in (names.conv, names.norm))
            if names.shortcut_norm is None:
                entries.norm(norm, f"{name}.norm{i}", channels, _BIT_SUFFIXES)
            entries.conv(conv, f"{name}.conv{i}", channels, outputs, side)
            if names.shortcut_norm is not None:
                entries.norm(norm, f"{name}.norm{i}", outputs)
        if stride > 1 or inputs != 4 * mid:
            entries.conv(key + names.shortcut, f"{name}.shortcut", inputs, 4 * mid, 1)
            if names.shortcut_norm is not None:
                entries.norm(key + names.shortcut_norm, f"{name}.shortcut_norm", 4 * mid)


def _count_units(keys: Iterable[str], names: UnitNames) -> tuple[int, ...]:
    pattern = key_pattern(names.unit)
    found = {(int(match[1]), int(match[2])) for key in keys if (match := re.match(pattern, key))}
    stages = sorted({stage for stage, _ in found})
    return tuple(sum(stage == other for other, _ in found) for stage in stages)
