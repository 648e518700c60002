"""Image preprocessing of weights: other projects' settings in our terms, and ours in theirs.

Ours are fields of AugmentConfig: image_size, eval_crop ("center": center crop after the short side is resized to
eval_resize; "resize": the whole image is resized; "resize_center": center crop after that), resize_filter. Our models
read (x - 0.5) / 0.5 of 8-bit RGB; another mean and deviation are folded into the patch embedding. Models of other
images keep theirs (`Pixels`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.architecture.pixels import PerChannel
from pipeline.base import json_record
from pipeline.base.errors import UserError

Json = Mapping[str, Any]
Plain = dict[str, Any]
HALF = (0.5, 0.5, 0.5)
# DINOv2 and DeiT III were trained with these.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Pillow's filters, by number and by timm's names -> our resize_filter, if it is not "antialias". Lanczos is nearest to
# bicubic.
_FILTERS = {1: "bicubic", 3: "bicubic", "lanczos": "bicubic", "bicubic": "bicubic"}
Size = int | list[int] | dict[str, int | None]


@dataclass(frozen=True)
class SavedPreprocessing:
    """Our settings, as a weights file stores them; None if unknown."""

    image_size: int | None = None
    eval_resize: int | None = None
    eval_crop: Literal["center", "resize", "resize_center"] | None = None
    resize_filter: Literal["linear", "antialias", "bilinear", "bicubic"] | None = None


class Preprocessing(NamedTuple):
    view: Plain  # our settings; {} if unknown
    mean: PerChannel = HALF
    std: PerChannel = HALF


IMAGENET = Preprocessing({}, IMAGENET_MEAN, IMAGENET_STD)
CLIP = Preprocessing({}, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def field(content: Json, where: str, name: str, kind: Any, default: Any = None) -> Any:
    """A field of a JSON object, checked against a type; the default if it is missing or null. Raises UserError.

    where: what the object is called in an error.
    """
    value = content.get(name)
    return default if value is None else json_record.convert(value, kind, where, name)


def from_huggingface(processor: Json) -> Preprocessing:
    """The settings in preprocessor_config.json. Raises UserError for impossible values, and for pixels not scaled to
    [0, 1].
    """
    get = partial(field, processor, "preprocessor_config.json")
    factor = get("rescale_factor", float, 1 / 255) if get("do_rescale", bool, True) else 1.0
    if not abs(factor * 255 - 1) <= 1e-3:
        raise UserError(f"its images are scaled by {factor:g}; only 1/255 is supported.")
    mean, std = get("image_mean", PerChannel, HALF), get("image_std", PerChannel, HALF)
    if not get("do_normalize", bool, True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    size = get("size", Size, 224)
    side = _side(size)
    view: Plain = {"resize_filter": _FILTERS.get(get("resample", int), "antialias")}
    if get("do_center_crop", bool):
        # A number, in files of earlier versions such as OpenAI's CLIP, is the short side.
        is_square = isinstance(size, list) or (isinstance(size, dict) and not size.get("shortest_edge"))
        crop = "resize_center" if is_square else "center"
        view |= {"eval_crop": crop, "eval_resize": side, "image_size": _side(get("crop_size", Size, side))}
    else:
        view |= {"eval_crop": "resize", "image_size": side}
    return Preprocessing(view, mean, std)


def from_timm(cfg: Json) -> Preprocessing:
    """The settings in `pretrained_cfg` of timm's config.json. Raises UserError for impossible values."""
    get = partial(field, cfg, "config.json: pretrained_cfg")
    side = get("input_size", tuple[int, int, int], (3, 224, 224))[1]
    view = {"resize_filter": _FILTERS.get(get("interpolation", str), "antialias"), "image_size": side}
    resize, mode = int(side / get("crop_pct", float, 0.875)), get("crop_mode", str, "center")
    if mode == "center":
        view |= {"eval_crop": "center", "eval_resize": resize}
    elif mode == "squash" and resize > side:
        view |= {"eval_crop": "resize_center", "eval_resize": resize}
    else:
        view |= {"eval_crop": "resize"}
    return Preprocessing(view, get("mean", PerChannel, IMAGENET_MEAN), get("std", PerChannel, IMAGENET_STD))


def from_open_clip(cfg: Json) -> Preprocessing:
    """The settings in `preprocess_cfg` of open_clip_config.json. Raises UserError for impossible values."""
    get = partial(field, cfg, "open_clip_config.json: preprocess_cfg")
    side = _side(get("size", int | list[int], 224))
    is_cropped = get("resize_mode", str, "shortest") == "shortest"
    crop = {"eval_crop": "center", "eval_resize": side} if is_cropped else {"eval_crop": "resize"}
    view = {
        "resize_filter": _FILTERS.get(get("interpolation", str, "bicubic"), "antialias"),
        "image_size": side,
        **crop,
    }
    return Preprocessing(view, get("mean", PerChannel, CLIP.mean), get("std", PerChannel, CLIP.std))


def to_huggingface(view: Json, side: int) -> Plain:
    """The content of preprocessor_config.json. side: of the images, in pixels."""
    crop = {"height": side, "width": side}
    kind = "ViTImageProcessor"
    sizes: Plain = {"size": crop}
    if view.get("eval_crop", "center") != "resize":
        resize = eval_resize(view, (side, side))
        is_square = view.get("eval_crop") == "resize_center"
        size = {"height": resize, "width": resize} if is_square else {"shortest_edge": resize}
        kind = "BitImageProcessor"
        sizes = {"size": size, "do_center_crop": True, "crop_size": crop}
    return {
        "image_processor_type": kind,
        **sizes,
        "do_resize": True,
        "resample": 3 if view.get("resize_filter") == "bicubic" else 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(HALF),
        "image_std": list(HALF),
        "do_convert_rgb": True,
    }


def to_timm(view: Json, image_size: tuple[int, int]) -> Plain:
    """The fields of timm's `pretrained_cfg` about images. image_size: (height, width)."""
    crop, side = view.get("eval_crop", "center"), min(image_size)
    resize = side if crop == "resize" else eval_resize(view, image_size)
    share = side / resize
    return {
        "input_size": [3, *image_size],
        "mean": list(HALF),
        "std": list(HALF),
        "interpolation": "bicubic" if view.get("resize_filter") == "bicubic" else "bilinear",
        # timm divides the side by it and rounds down.
        "crop_pct": share if int(side / share) == resize else side / (resize + 0.5),
        "crop_mode": "center" if crop == "center" else "squash",
    }


def written_filter(view: Json) -> str:
    """Says which filter `to_huggingface` and `to_timm` write in place of one that their programs do not have; "" if
    they have it.

    Both resize by Pillow's filters: "antialias" and "bicubic" are these, "linear" (area to make images smaller) and
    "bilinear" are not.
    """
    own = view.get("resize_filter", "linear")
    if own in ("antialias", "bicubic"):
        return ""
    return (
        f"it resizes images by Pillow's bilinear filter, and evaluation here by resize_filter = {own}, which it does"
        " not have: its scores are those of launch/evaluate.py with resize_filter=antialias"
    )


def eval_resize(view: Json, image_size: tuple[int, int]) -> int:
    """The short side before a center crop, in proportion to the one in `view`, else 8/7 of the crop."""
    short = min(image_size)
    resize = view.get("eval_resize", 0)
    return round(resize * short / view.get("image_size", short)) if resize else round(short * 8 / 7)


def fold_normalisation(
    weight: Tensor,
    bias: Tensor,
    mean: PerChannel,
    std: PerChannel,
    to_mean: PerChannel = HALF,
    to_std: PerChannel = HALF,
) -> None:
    """Change a patch embedding in place from an input of (x - mean) / std to one of y = (x - to_mean) / to_std, x in
    [0, 1].

    weight: (D, C, P, P), bias: (D,). It holds that (x - mean) / std = y * to_std / std + (to_mean - mean) / std.
    """
    wide = weight.double()
    given = (mean, std, to_mean, to_std)
    means, stds, to_means, to_stds = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in given)
    bias += (wide * ((to_means - means) / stds)).sum((1, 2, 3)).to(bias.dtype)
    weight.copy_((wide * (to_stds / stds)).to(weight.dtype))


def _side(size: Size) -> int:
    """The shorter side."""
    if isinstance(size, dict):
        return min(filter(None, (size.get(name) for name in ("height", "width", "shortest_edge"))), default=224)
    return min(size, default=224) if isinstance(size, list) else size
