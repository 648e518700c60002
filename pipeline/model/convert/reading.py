"""Shared by readers of state dicts: a ViT from tensors under a project's names, and the fields of its files."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.architecture.config import Gelu, ViTConfig
from pipeline.architecture.pixels import RGB8
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.model.convert import mae, preprocessing
from pipeline.model.convert.layouts import Names, Tensors, Weights, read_model
from pipeline.model.convert.names import Hints, find_config
from pipeline.model.convert.preprocessing import Preprocessing

GELUS: dict[str, Gelu] = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
    "quick_gelu": "quick",
}


def read_vit(
    tensors: dict[str, Tensor],
    names: Names,
    hints: Hints,
    images: Preprocessing | None,
    extra: dict[str, Any],
    notes: list[str],
) -> Weights:
    """The ViT with these names. images: None if no file tells how they are normalised. Raises UserError."""
    for name in ("mask_token", "embeddings.mask_token"):
        if tensors.pop(name, None) is not None:
            notes.append("the mask token, which only pre-training uses, is left out")
    patch = names["patch_embedding"]
    if f"{patch}.bias" not in tensors and f"{patch}.weight" in tensors:
        tensors[f"{patch}.bias"] = torch.zeros(len(tensors[f"{patch}.weight"]))
    config = find_config(tensors, names, hints)
    state = read_model(tensors, config, names)
    pixels, images = preprocessing.read_by(config.pixels, images)
    if pixels != RGB8:
        return Weights(replace(config, pixels=pixels), state, with_view(extra, images or Preprocessing({})), notes)
    if images is None:
        images, config = _assumed(config, state, notes)
    if (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        if config.has_stem:
            check_normalisation(images)
        weight, bias = state["patch_embedding.weight"], state["patch_embedding.bias"]
        preprocessing.fold_normalisation(weight, bias, images.mean, images.std)
        notes.append(f"mean {images.mean} and deviation {images.std} of its images folded into the patch embedding")
    return Weights(config, state, with_view(extra, images), notes, images.mean, images.std)


def _assumed(config: ViTConfig, state: dict[str, Tensor], notes: list[str]) -> tuple[Preprocessing, ViTConfig]:
    """(preprocessing, configuration with the resampling kernel) of the family of a file without image settings."""
    if config.positions == "learned" and mae.has_fixed_positions(config, state["positions"]):
        family, images, config = (
            "MAE and I-JEPA, by their fixed positions,",
            preprocessing.IMAGENET,
            replace(config, kernel="bicubic"),
        )
    elif config.embedding_norm:
        family, images = "CLIP, by its norm before the blocks,", preprocessing.CLIP
    elif config.layer_scale is not None:
        family, images = "DINOv2, DINOv3 and DeiT III, by their LayerScale,", preprocessing.IMAGENET
    else:
        notes.append(
            "no file tells the mean of its images: taken as 0.5, that of the official weights; for those of DINO or"
            " DeiT, say so in a config.json (docs/weights.md)"
        )
        return Preprocessing({}), config
    notes.append(f"no file tells the mean of its images: taken as that of {family} {images.mean}")
    return images, config


def join(tensors: dict[str, Tensor], parts: tuple[str, ...], joined: str) -> None:
    """Put the rows of several layers of each block into one, in place: such as query, key and value."""
    for key in [key for key in tensors if f".{parts[0]}." in key]:
        keys = [key.replace(f".{parts[0]}.", f".{part}.") for part in parts]
        if all(k in tensors for k in keys):
            tensors[key.replace(f".{parts[0]}.", f".{joined}.")] = torch.cat([tensors.pop(k) for k in keys])


def rename(tensors: Tensors, renames: list[tuple[str, str]]) -> dict[str, Tensor]:
    """The tensors with each pattern in their keys replaced, in order."""
    renamed = {}
    for key, tensor in tensors.items():
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        renamed[key] = tensor
    return renamed


def gelu_of(name: str) -> Gelu:
    if name not in GELUS:
        raise UserError(f"its MLP computes {name[:100]}; supported are {', '.join(GELUS)}.")
    return GELUS[name]


def pair(name: str, size: int | list[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = [size, size] if isinstance(size, int) else size
    if len(sides) != 2 or not all(1 <= side <= 2**16 for side in sides):
        raise UserError(f"config.json: {name} = {json_record.quoted(size)} must be a side in pixels, or two.")
    return sides[0], sides[1]


def with_view(extra: dict[str, Any], images: Preprocessing) -> dict[str, Any]:
    return {**extra, "preprocessing": images.view} if images.view else extra


def check_normalisation(images: Preprocessing) -> None:
    """Raise UserError for a mean or deviation that is not 0.5: zero padding prevents folding it into a ResNet's
    kernels.
    """
    if (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        raise UserError(
            f"its images have mean {images.mean} and deviation {images.std}; for a ResNet only 0.5 and 0.5 are"
            " supported."
        )
