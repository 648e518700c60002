"""What the files beside weights say of the images: read into our words, and ours written in theirs.

Ours are those of AugmentConfig: image_size, eval_crop ("center" after its short side is resized to eval_resize, "resize"
of all of it, or "resize_center" after that), resize_filter. Our models read (x - 0.5) / 0.5; another mean and deviation are folded into the
patch embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pipeline import json_record
from pipeline.errors import UserError

Json = Mapping[str, Any]
HALF = (0.5, 0.5, 0.5)
# ImageNet's, which DINOv2 and DeiT III were trained with.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


_LARGEST_SIDE = 2**16
Three = tuple[float, float, float]


@dataclass(frozen=True)
class View:
    """Ours, as weights keep it; None where nothing is known."""

    image_size: int | None = None
    eval_resize: int | None = None
    eval_crop: Literal["center", "resize", "resize_center"] | None = None
    resize_filter: Literal["linear", "antialias", "bilinear"] | None = None

    def check(self) -> None:
        """Raise UserError for sizes that no image has."""
        for name, least in (("image_size", 1), ("eval_resize", 0)):
            value = getattr(self, name)
            if value is not None:
                _in_range("extra", f"preprocessing.{name}", value, least, _LARGEST_SIDE)


@dataclass(frozen=True)
class _Processor:
    """What we read of preprocessor_config.json."""

    do_center_crop: bool | None = None
    do_rescale: bool | None = None
    rescale_factor: float | None = None
    do_normalize: bool | None = None
    image_mean: Three | None = None
    image_std: Three | None = None
    size: int | list[int] | dict[str, int | None] | None = None
    crop_size: int | list[int] | dict[str, int | None] | None = None
    resample: int | None = None


@dataclass(frozen=True)
class _Pretrained:
    """What we read of the `pretrained_cfg` in timm's config.json."""

    input_size: tuple[int, int, int] | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    mean: Three | None = None
    std: Three | None = None


class Preprocessing(NamedTuple):
    view: dict[str, Any]  # our words; {} where nothing is known
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF


def from_huggingface(processor: Json) -> Preprocessing:
    """Of preprocessor_config.json. Raises UserError for values that no images have, and pixels not scaled to [0, 1]."""
    if not processor:
        return Preprocessing({})
    where = "preprocessor_config.json"
    found: _Processor = json_record.convert(processor, _Processor, where)
    if found.resample is not None:
        _in_range(where, "resample", found.resample, 0, 5)  # Pillow's filters
    for name, size in (("size", found.size), ("crop_size", found.crop_size)):
        _check_size(where, name, size)
    factor = 1 / 255 if found.rescale_factor is None else found.rescale_factor
    factor = 1.0 if found.do_rescale is False else factor
    if not abs(factor * 255 - 1) <= 1e-3:
        raise UserError(f"its images are scaled by {factor:g}, not by 1/255; only that can be read.")
    mean, std = _statistics(where, "image_", found.image_mean or HALF, found.image_std or HALF)
    if found.do_normalize is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    size = 224 if found.size is None else found.size
    short = size.get("shortest_edge") if isinstance(size, dict) else None
    view: dict[str, Any] = {"resize_filter": "antialias"}
    if found.do_center_crop and short:
        view |= {"eval_crop": "center", "eval_resize": short, "image_size": _side(found.crop_size or short)}
    else:
        view |= {"eval_crop": "resize", "image_size": _side(size)}
    return Preprocessing(view, mean, std)


def from_timm(cfg: Json) -> Preprocessing:
    """Of the `pretrained_cfg` in timm's config.json. Raises UserError for values that no images have."""
    if not cfg:
        return Preprocessing({})
    where = "config.json: pretrained_cfg"
    found: _Pretrained = json_record.convert(cfg, _Pretrained, where)
    _check_size(where, "input_size", list(found.input_size or ()))
    side = found.input_size[1] if found.input_size else 224
    view: dict[str, Any] = {"resize_filter": "antialias", "image_size": side}
    if (found.crop_mode or "center") == "center":
        share = 0.875 if found.crop_pct is None else found.crop_pct
        _in_range(where, "crop_pct", share, 0.05, 2)
        view |= {"eval_crop": "center", "eval_resize": int(side / share)}
    else:
        view |= {"eval_crop": "resize"}
    return Preprocessing(view, *_statistics(where, "", found.mean or IMAGENET_MEAN, found.std or IMAGENET_STD))


def to_huggingface(view: Json, image_size: tuple[int, int]) -> dict[str, Any]:
    """preprocessor_config.json of a model that reads images of this (height, width)."""
    height_width = {"height": image_size[0], "width": image_size[1]}
    common = {
        "do_resize": True, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(HALF), "image_std": list(HALF), "do_convert_rgb": True,
    }  # fmt: skip
    if view.get("eval_crop", "center") == "resize":
        return {"image_processor_type": "ViTImageProcessor", "size": height_width, **common}
    side = eval_resize(view, image_size)
    squash = view.get("eval_crop") == "resize_center"
    size = {"height": side, "width": side} if squash else {"shortest_edge": side}
    crop = {"do_center_crop": True, "crop_size": height_width}
    return {"image_processor_type": "BitImageProcessor", "size": size, **crop, **common}


def to_timm(view: Json, image_size: tuple[int, int]) -> dict[str, Any]:
    """The part of timm's `pretrained_cfg` that is about images."""
    crop = view.get("eval_crop", "center")
    return {
        "input_size": [3, *image_size], "mean": list(HALF), "std": list(HALF), "interpolation": "bilinear",
        "crop_pct": 1.0 if crop == "resize" else min(image_size) / eval_resize(view, image_size),
        "crop_mode": "center" if crop == "center" else "squash",
    }  # fmt: skip


def eval_resize(view: Json, image_size: tuple[int, int]) -> int:
    """The short side before a central crop, in the proportion that the weights were evaluated with, else 8/7."""
    short = min(image_size)
    told = view.get("eval_resize", 0)
    return round(told * short / view.get("image_size", short)) if told else round(short * 8 / 7)


def fold_normalisation(weight: Tensor, bias: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Change a patch embedding in place, from one of (x - mean) / std to one of (x - 0.5) / 0.5, x in [0, 1].

    weight: (D, 3, P, P), bias: (D,). With y what it will read, (x - mean) / std = y * 0.5 / std + (0.5 - mean) / std.
    """
    wide = weight.double()
    scale, shift = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in _of_halves(mean, std))
    bias += (wide * shift).sum((1, 2, 3)).to(bias.dtype)
    weight.copy_((wide * scale).to(weight.dtype))


def _of_halves(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[list[float], list[float]]:
    pairs = list(zip(mean, std, strict=True))
    return [0.5 / s for _, s in pairs], [(0.5 - m) / s for m, s in pairs]


def _side(size: int | list[int] | dict[str, int | None]) -> int:
    if isinstance(size, dict):
        return size.get("height") or size.get("shortest_edge") or 224
    return size[0] if isinstance(size, list) else size


def _check_size(where: str, name: str, size: int | list[int] | dict[str, int | None] | None) -> None:
    if isinstance(size, list) and not size and name != "input_size":
        raise UserError(f"{where}: {name} = [] must be a size in pixels.")
    sides = list(size.values()) if isinstance(size, dict) else size if isinstance(size, list) else [size]
    for side in sides:
        if side is not None:
            _in_range(where, name, side, 1, _LARGEST_SIDE)


def _statistics(where: str, prefix: str, mean: Three, std: Three) -> tuple[Three, Three]:
    for value in mean:
        _in_range(where, f"{prefix}mean", value, -1000, 1000)
    for value in std:
        _in_range(where, f"{prefix}std", value, 1e-4, 1000)  # They are divided by.
    return mean, std


def _in_range(where: str, name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UserError(f"{where}: {name} = {json_record.quoted(value)} must be from {least:g} to {most:,g}.")
