"""What the files beside weights say of the images: read into our words, and ours written in theirs.

Ours are those of AugmentConfig: image_size, eval_crop ("center" after its short side is resized to eval_resize, "resize"
of all of it, or "resize_center" after that), resize_filter. Our models read (x - 0.5) / 0.5; another mean and deviation are folded into the
patch embedding.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.errors import UserError

Json = Mapping[str, Any]
HALF = (0.5, 0.5, 0.5)
# ImageNet's, which DINOv2 and DeiT III were trained with.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Preprocessing(NamedTuple):
    view: dict[str, Any]  # our words; {} where nothing is known
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF


def from_huggingface(processor: Json) -> Preprocessing:
    """Of preprocessor_config.json. Raises UserError for pixels that it does not scale to [0, 1]."""
    if not processor:
        return Preprocessing({})
    size, crop = processor.get("size", 224), processor.get("crop_size")
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0
    if abs(factor * 255 - 1) > 1e-3:
        raise UserError(f"its images are scaled by {factor:g}, not by 1/255; only that can be read.")
    normalises = processor.get("do_normalize", True)
    mean = tuple(processor.get("image_mean", HALF)) if normalises else (0.0, 0.0, 0.0)
    std = tuple(processor.get("image_std", HALF)) if normalises else (1.0, 1.0, 1.0)
    short = size.get("shortest_edge") if isinstance(size, Mapping) else None
    view: dict[str, Any] = {"resize_filter": "antialias"}
    if processor.get("do_center_crop") and short:
        view |= {"eval_crop": "center", "eval_resize": short, "image_size": _side(crop or short)}
    else:
        view |= {"eval_crop": "resize", "image_size": _side(size)}
    return Preprocessing(view, mean, std)


def from_timm(cfg: Json) -> Preprocessing:
    """Of the `pretrained_cfg` in timm's config.json."""
    if not cfg:
        return Preprocessing({})
    side = cfg.get("input_size", (3, 224, 224))[1]
    view: dict[str, Any] = {"resize_filter": "antialias", "image_size": side}
    if cfg.get("crop_mode", "center") == "center":
        view |= {"eval_crop": "center", "eval_resize": int(side / cfg.get("crop_pct", 0.875))}
    else:
        view |= {"eval_crop": "resize"}
    return Preprocessing(view, tuple(cfg.get("mean", IMAGENET_MEAN)), tuple(cfg.get("std", IMAGENET_STD)))


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


def _side(size: Any) -> int:
    if isinstance(size, Mapping):
        return int(size.get("height") or size.get("shortest_edge") or 224)
    return int(size[0] if isinstance(size, (list, tuple)) else size)
