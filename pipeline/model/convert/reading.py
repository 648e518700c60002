"""What the readers of state dicts share: from tensors under the names of a project to our ViT, and the fields of its files."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.architecture.config import Gelu
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import mae, preprocessing
from pipeline.model.convert.entries import Weights
from pipeline.model.convert.names import NAMES, Hints, find_config, vit_entries
from pipeline.model.convert.preprocessing import Json, Preprocessing

GELUS: dict[str, Gelu] = {
    "gelu": "erf", "gelu_python": "erf", "gelu_tanh": "tanh", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}  # fmt: skip

# LayerScale: names of its factors, and the layer whose outputs they scale.
_LAYER_SCALES = [
    (r"(blocks\.\d+\.)(?:ls1\.gamma|gamma_1)", "attn.proj"),
    (r"(blocks\.\d+\.)(?:ls2\.gamma|gamma_2)", "mlp.fc2"),
    (r"(encoder\.layer\.\d+\.)layer_scale1\.lambda1", "attention.output.dense"),
    (r"(encoder\.layer\.\d+\.)layer_scale2\.lambda1", "mlp.fc2"),
]


@dataclass(frozen=True)
class ConfigFiles:
    """The configuration files in the folder of weights, as plain data; {} for a missing one."""

    config: Json = field(default_factory=dict)  # config.json
    processor: Json = field(default_factory=dict)  # preprocessor_config.json


def read_vit(
    tensors: dict[str, Tensor], kind: str, hints: Hints, images: Preprocessing, extra: dict[str, Any], notes: list[str]
) -> Weights:
    config = find_config(tensors, NAMES[kind], hints)
    state = vit_entries(config, NAMES[kind]).read(tensors)
    if config.positions == "learned" and not images.view and mae.has_fixed_positions(config, state["positions"]):
        notes.append("fixed positions of MAE and I-JEPA: images taken as normalised by ImageNet's mean")
        images = Preprocessing({}, preprocessing.IMAGENET_MEAN, preprocessing.IMAGENET_STD)
        config = replace(config, kernel="bicubic")
    if (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        if config.stem is not None:
            check_normalisation(images)
        weight, bias = state["patch_embedding.weight"], state["patch_embedding.bias"]
        preprocessing.fold_normalisation(weight, bias, images.mean, images.std)
        notes.append(f"mean {images.mean} and deviation {images.std} of its images folded into the patch embedding")
    return Weights(config, state, with_view(extra, images), notes, images.mean, images.std)


def assume_imagenet(missing: str, notes: list[str]) -> Preprocessing:
    notes.append(f"no {missing}: images taken as normalised by ImageNet's mean, as in DINOv2, DeiT III and MSN")
    return Preprocessing({}, preprocessing.IMAGENET_MEAN, preprocessing.IMAGENET_STD)


def simplify(tensors: dict[str, Tensor], notes: list[str]) -> bool:
    """Convert, in place, what our ViT expresses otherwise: LayerScale, and q, k, v without biases; drop the mask token.

    Returns whether there was LayerScale.
    """
    folded = 0
    for pattern, layer in _LAYER_SCALES:
        for key in [key for key in tensors if re.fullmatch(pattern, key)]:
            name = re.sub(pattern, rf"\1{layer}", key)
            factors = tensors.pop(key)
            own = [tensors.get(f"{name}.{part}", factors[:0]) for part in ("weight", "bias")]
            if own[0].ndim != 2 or not factors.shape == own[1].shape == own[0].shape[:1]:
                raise UserError(f'"{key}" {tuple(factors.shape)} has no "{name}" of its size to scale.')
            scale = factors.double()
            tensors[f"{name}.weight"] = (tensors[f"{name}.weight"].double() * scale[:, None]).float()
            tensors[f"{name}.bias"] = (tensors[f"{name}.bias"].double() * scale).float()
            folded += 1
    if folded:
        notes.append(f"LayerScale's {counted(folded, 'tensor')} folded into the layers that they scale")
    for name in ("mask_token", "embeddings.mask_token"):
        if tensors.pop(name, None) is not None:
            notes.append("the mask token, which only pre-training uses, is left out")
    kernels = [key for key in tensors if re.search(r"attn\.qkv\.weight$|attention\.(query|key|value)\.weight$", key)]
    biases = [key.removesuffix("weight") + "bias" for key in kernels]
    if kernels and not any(bias in tensors for bias in biases):
        for kernel, bias in zip(kernels, biases, strict=True):
            tensors[bias] = torch.zeros(tensors[kernel].shape[:1])
        notes.append("query, key and value have no biases in the file: zeros")
    return folded > 0


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
    """Raise UserError for a mean or deviation that is not 0.5: zero padding prevents folding it into a ResNet's kernels."""
    if (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        raise UserError(
            f"its images have mean {images.mean} and deviation {images.std}; for a ResNet only 0.5 and 0.5 are supported."
        )
