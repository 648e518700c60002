"""What other projects call the parts of a ResNet: of BiT, and of the one in front of a hybrid ViT.

official    google-research/big_transfer (BiT), google-research/vision_transformer (hybrids)
timm        resnetv2_*_bit, vit_*_r50_s16_* and its like
"""

import re
from collections.abc import Iterable, Iterator

from pipeline.errors import UserError
from pipeline.model.convert.entries import Entries, Entry, Tensors
from pipeline.model.resnet import unit_shapes
from pipeline.model.variants import ResNetConfig

STEM_WIDTH = 64

# A unit of a stage, both counted as the project counts them.
BIT_UNIT = {"official": r"resnet/block(\d+)/unit(\d+)/", "timm": r"stages\.(\d+)\.blocks\.(\d+)\."}
STEM_UNIT = {"official": r"block(\d+)/unit(\d+)/", "timm": r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\."}


def is_bit(tensors: Tensors) -> bool:
    return "resnet/root_block/standardized_conv2d/kernel" in tensors or "stem.conv.weight" in tensors


def find_bit(tensors: Tensors, image_size: tuple[int, int]) -> ResNetConfig:
    """The configuration, from the tensors; they do not tell the image size. Raises UserError for none that exists."""
    official = any(key.startswith("resnet/") for key in tensors)
    root = tensors["resnet/root_block/standardized_conv2d/kernel" if official else "stem.conv.weight"]
    head = tensors.get("resnet/head/conv2d/bias" if official else "head.fc.bias")
    units = _count_units(tensors, BIT_UNIT["official" if official else "timm"])
    if head is not None and head.ndim != 1:
        raise UserError(f"the head's bias should have 1 axis, but is {tuple(head.shape)}.")
    if root.ndim != 4:
        raise UserError(f"the root's kernel should have 4 axes, but is {tuple(root.shape)}.")
    width = root.shape[3] if official else root.shape[0]
    return ResNetConfig(units, width, image_size, 0 if head is None else len(head))


def bit_entries(config: ResNetConfig, flax: bool) -> Entries:
    """Every tensor of a BiT ResNet; flax: the authors' layout, else timm's."""
    entries = Entries(flax)
    affine = ("gamma", "beta")
    K, C = config.num_classes, config.num_features
    entries.conv("resnet/root_block/standardized_conv2d" if flax else "stem.conv", "root", 3, config.width, 7)
    for stage, number, name, (inputs, mid, stride) in _units(config.units, config.width, "units"):
        unit = f"resnet/block{stage + 1}/unit{number + 1:02d}" if flax else f"stages.{stage}.blocks.{number}"
        sizes = ((inputs, mid, 1), (mid, mid, 3), (mid, 4 * mid, 1))
        for i, (channels, outputs, side) in enumerate(sizes, start=1):
            part = f"{unit}/{'abc'[i - 1]}"
            entries.norm(f"{part}/group_norm" if flax else f"{unit}.norm{i}", f"{name}.norm{i}", channels, affine)
            key = f"{part}/standardized_conv2d" if flax else f"{unit}.conv{i}"
            entries.conv(key, f"{name}.conv{i}", channels, outputs, side)
        if stride > 1 or inputs != 4 * mid:
            key = f"{unit}/a/proj/standardized_conv2d" if flax else f"{unit}.downsample.conv"
            entries.conv(key, f"{name}.shortcut", inputs, 4 * mid, 1)
    entries.norm("resnet/group_norm" if flax else "norm", "norm", C, affine)
    if K:  # a convolution of one cell there
        kernel = ("resnet/head/conv2d/kernel", (1, 1, C, K)) if flax else ("head.fc.weight", (K, C, 1, 1))
        entries.append(Entry(*kernel, "head.weight", (K, C)))
        entries.table("resnet/head/conv2d/bias" if flax else "head.fc.bias", "head.bias", K)
    return entries


def find_stem(tensors: Tensors) -> tuple[int, ...] | None:
    """Units in each stage of a hybrid's ResNet, () for its root alone, or None for a plain ViT."""
    if "conv_root/kernel" in tensors:
        return _count_units(tensors, STEM_UNIT["official"])
    if any(key.startswith("patch_embed.backbone.") for key in tensors):
        return _count_units(tensors, STEM_UNIT["timm"])
    return None


def add_stem(entries: Entries, units: tuple[int, ...]) -> int:
    """Add every tensor of a hybrid's ResNet; -> the number of its output channels."""
    flax = entries.flax
    backbone = "patch_embed.backbone"
    root = f"{backbone}.stem" if units else backbone
    entries.conv("conv_root" if flax else f"{root}.conv", "stem.root", 3, STEM_WIDTH, 7)
    entries.norm("gn_root" if flax else f"{root}.norm", "stem.norm", STEM_WIDTH)
    channels = STEM_WIDTH
    for stage, number, name, (inputs, mid, stride) in _units(units, STEM_WIDTH, "stem.units"):
        unit = f"block{stage + 1}/unit{number + 1}/" if flax else f"{backbone}.stages.{stage}.blocks.{number}."
        sizes = ((inputs, mid, 1), (mid, mid, 3), (mid, 4 * mid, 1))
        for i, (read, outputs, side) in enumerate(sizes, start=1):
            entries.conv(f"{unit}conv{i}", f"{name}.conv{i}", read, outputs, side)
            entries.norm(f"{unit}gn{i}" if flax else f"{unit}norm{i}", f"{name}.norm{i}", outputs)
        if stride > 1 or inputs != 4 * mid:
            entries.conv(f"{unit}{'conv_proj' if flax else 'downsample.conv'}", f"{name}.shortcut", inputs, 4 * mid, 1)
            entries.norm(f"{unit}{'gn_proj' if flax else 'downsample.norm'}", f"{name}.shortcut_norm", 4 * mid)
        channels = 4 * mid
    return channels


def _units(units: tuple[int, ...], width: int, name: str) -> Iterator[tuple[int, int, str, tuple[int, int, int]]]:
    """(stage, number in it, our name, shape) of every unit, counted from 0."""
    shapes = iter(enumerate(unit_shapes(units, width)))
    for stage, count in enumerate(units):
        for number in range(count):
            i, shape = next(shapes)
            yield stage, number, f"{name}.{i}", shape


def _count_units(keys: Iterable[str], pattern: str) -> tuple[int, ...]:
    found = {(int(match[1]), int(match[2])) for key in keys if (match := re.match(pattern, key))}
    stages = sorted({stage for stage, _ in found})
    return tuple(sum(stage == other for other, _ in found) for stage in stages)
