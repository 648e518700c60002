"""Reads and writes state dicts of timm, Hugging Face and DINOv2, with their configuration files.

The defaults of these projects: erf GELU; LayerNorm eps 1e-6, in Hugging Face's ViT 1e-12.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.architecture.config import Config, Gelu, Kernel, ResNetConfig, stem_reduction
from pipeline.architecture.variants import RESNET_UNITS, VARIANTS
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import mae, preprocessing
from pipeline.model.convert.entries import Weights, check_values
from pipeline.model.convert.names import NAMES, Hints, find_config, vit_entries
from pipeline.model.convert.plain import as_plain
from pipeline.model.convert.preprocessing import Json, Preprocessing
from pipeline.model.convert.resnets import bit_entries, find_bit, find_stem, is_bit
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

GELUS: dict[str, Gelu] = {
    "gelu": "erf", "gelu_python": "erf", "gelu_tanh": "tanh", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh",
    "gelu_python_tanh": "tanh",
}  # fmt: skip

# Part of a key -> the unsupported feature that it belongs to.
_UNSUPPORTED = {
    "dist_token": "a distillation token",
    "distillation_token": "a distillation token",
    "fc_norm.": "a norm after pooling (fc_norm)",
    "mlp.w12.": "a SwiGLU MLP",
    "mlp.weights_in.": "a SwiGLU MLP",
    "norm_pre.": "a norm before the blocks",
}

# Names in memory since transformers 5 -> names in its files, which are still the old ones.
_NEW_NAMES = [
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."), (r"attention\.([qkv])_proj\.", r"attention.attention.\1."),
    (r"attention\.attention\.q\.", "attention.attention.query."), (r"attention\.attention\.k\.", "attention.attention.key."),
    (r"attention\.attention\.v\.", "attention.attention.value."), (r"attention\.o_proj\.", "attention.output.dense."),
]  # fmt: skip
_NEW_MLP = [(r"mlp\.fc1\.", "intermediate.dense."), (r"mlp\.fc2\.", "output.dense.")]  # ViT, but not DINOv2

# LayerScale: names of its factors, and the layer whose outputs they scale.
_LAYER_SCALES = [
    (r"(blocks\.\d+\.)(?:ls1\.gamma|gamma_1)", "attn.proj"),
    (r"(blocks\.\d+\.)(?:ls2\.gamma|gamma_2)", "mlp.fc2"),
    (r"(encoder\.layer\.\d+\.)layer_scale1\.lambda1", "attention.output.dense"),
    (r"(encoder\.layer\.\d+\.)layer_scale2\.lambda1", "mlp.fc2"),
]

# timm's names: (our size, patch side) -> its size; stem -> its hybrid; its BiTs.
_TIMM_NAMES = {
    ("Ti", 16): "tiny", ("S", 16): "small", ("S", 32): "small", ("B", 8): "base", ("B", 16): "base", ("B", 32): "base",
    ("L", 16): "large", ("L", 32): "large", ("H", 14): "huge", ("g", 14): "giant", ("G", 14): "gigantic",
}  # fmt: skip
_TIMM_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224", (2, 2, 2, 2): "vit_small_r26_s32_224", (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}  # fmt: skip
_TIMM_BITS = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")

_HUGGINGFACE_KINDS = ("vit", "dinov2", "dinov2_with_registers", "vit_mae")
_ALTERNATIVES = {  # Model type of Hugging Face -> what to do instead.
    "siglip": "Use big_vision's .npz of it, or timm's weights of the same model (vit_*_siglip_*).",
    "clip": "CLIP has a norm before the blocks, which is not supported: there is no way to load it.",
    "deit": "Use timm's weights of the model without a distillation token (deit_*).",
}
_TIMM_KINDS = ("vit", "deit", "flexivit", "resnetv2", "dinov2", "test_vit")


@dataclass(frozen=True)
class _HuggingFaceConfig:
    """The fields of Hugging Face's config.json that are read."""

    model_type: str | None = None
    num_attention_heads: int | None = None
    hidden_act: str | None = None
    layer_norm_eps: float | None = None
    pooler_act: str | None = None
    image_size: int | list[int] | None = None
    id2label: dict[str, str] | None = None


@dataclass(frozen=True)
class _TimmArgs:
    """The fields of `model_args` in timm's config.json that are read."""

    num_heads: int | None = None
    img_size: int | list[int] | None = None
    global_pool: str | None = None
    act_layer: str | None = None
    pos_embed: str | None = None


@dataclass(frozen=True)
class _TimmConfig:
    """The fields of timm's config.json that are read."""

    architecture: str | None = None
    global_pool: str | None = None
    model_args: _TimmArgs | None = None
    pretrained_cfg: dict | None = None
    label_names: list[str] | None = None


@dataclass(frozen=True)
class ConfigFiles:
    """The configuration files in the folder of weights, as plain data; {} for a missing one."""

    config: Json = field(default_factory=dict)  # config.json
    processor: Json = field(default_factory=dict)  # preprocessor_config.json


def from_state_dict(tensors: Mapping[str, Tensor], config_files: ConfigFiles) -> Weights:
    """The weights in our terms; the tensors returned share no memory with the given ones.

    Raises UserError naming the key and the shapes, or the feature of the model that is not supported.
    """
    kind = _text(config_files.config, "model_type")
    if kind and kind not in _HUGGINGFACE_KINDS:
        family = next((name for name in _ALTERNATIVES if kind.startswith(name)), "")
        remedy = _ALTERNATIVES.get(family, "It is another architecture than the plain ViT: there is no way to load it.")
        known = ", ".join(_HUGGINGFACE_KINDS)
        raise UserError(f'its config.json says model_type = "{kind[:100]}"; what can be read is {known}. {remedy}')
    tensors = {key.removeprefix("module."): tensor for key, tensor in tensors.items()}
    tensors, decoder = mae.split(tensors)
    if decoder:
        for key, tensor in decoder.items():
            check_values(key, tensor)
        return mae.with_decoder(from_state_dict(tensors, config_files), decoder, config_files.config)
    for key, tensor in tensors.items():
        check_values(key, tensor)
        for part, feature in _UNSUPPORTED.items():
            if part in key:
                raise UserError(f'it has {feature} ("{key}"), which is not supported.')
    if "patch_embed.proj.weight" in tensors or is_bit(tensors):
        try:
            return _from_timm(tensors, config_files.config)
        except UserError as error:
            architecture = _text(config_files.config, "architecture")
            if architecture and not architecture.startswith(_TIMM_KINDS):
                known = "vit_*, deit_*, deit3_*, flexivit_*, resnetv2_*_bit"
                raise UserError(
                    f'its config.json says architecture = "{architecture[:100]}"; of timm\'s models {known} can be read. '
                    f"The first difference: {error}"
                ) from error
            raise
    if any(key.endswith("embeddings.patch_embeddings.projection.weight") for key in tensors):
        return _from_huggingface(tensors, config_files)
    some = ", ".join(sorted(tensors)[:3]) or "nothing"
    raise UserError(f"its tensors are neither named as timm's nor as Hugging Face's ViT ({some} ...).")


def _from_timm(tensors: dict[str, Tensor], config: Json) -> Weights:
    found: _TimmConfig = json_record.convert(config, _TimmConfig, "config.json")
    args, cfg = found.model_args or _TimmArgs(), found.pretrained_cfg or {}
    notes: list[str] = []
    extra: dict[str, Any] = {"classes": found.label_names} if found.label_names else {}
    images = preprocessing.from_timm(cfg)
    size = _pair("model_args.img_size", args.img_size or images.view.get("image_size"))
    if is_bit(tensors):
        notes.append("BiT's tensors do not tell the image size: " + ("as config.json" if size else "taken as 224"))
        bit = find_bit(tensors, size or (224, 224))
        _check_normalisation(images)
        return Weights(bit, bit_entries(bit, flax=False).read(tensors), _with_view(extra, images), notes)

    kernel = _timm_kernel(tensors)
    if "register_tokens" in tensors:  # the name in facebookresearch/dinov2
        tensors["reg_token"] = tensors.pop("register_tokens")
    pool = args.global_pool or found.global_pool or "token"
    if pool not in ("token", "map") and "cls_token" in tensors:
        raise UserError(f"its head reads global_pool = {pool} beside a class token; only one of them is supported.")
    has_layer_scale = _simplify(tensors, notes)
    if "cls_token" in tensors and _has_no_class_row(tensors, size):
        table = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
        notes.append("the class token has no position in the file: zeros")
    if has_layer_scale and not cfg:
        images = _assume_imagenet("config.json", notes)
    hints = Hints(
        _gelu(args.act_layer or "gelu"), num_heads=args.num_heads, image_size=size,
        without_table="none" if args.pos_embed in ("none", "") else None, kernel=kernel,
    )  # fmt: skip
    return _read(tensors, "timm", hints, images, extra, notes)


def _from_huggingface(tensors: dict[str, Tensor], config_files: ConfigFiles) -> Weights:
    prefix = next(k for k in tensors if k.endswith("embeddings.patch_embeddings.projection.weight"))
    prefix = prefix.removesuffix("embeddings.patch_embeddings.projection.weight")
    tensors = {_name_in_file(key.removeprefix(prefix), _NEW_NAMES): tensor for key, tensor in tensors.items()}
    kind = "dinov2" if "encoder.layer.0.norm1.weight" in tensors else "huggingface"
    if kind == "huggingface":
        tensors = {_name_in_file(key, _NEW_MLP): tensor for key, tensor in tensors.items()}
    config: _HuggingFaceConfig = json_record.convert(config_files.config, _HuggingFaceConfig, "config.json")
    notes: list[str] = []
    if not config_files.config:
        notes.append("no config.json: number of heads, GELU and eps taken as Hugging Face's own")
    has_layer_scale = _simplify(tensors, notes)
    head, norm = tensors.get("classifier.weight"), tensors.get("layernorm.weight")
    if kind == "dinov2" and head is not None and norm is not None and head.shape[-1:] == (2 * norm.numel(),):
        for name in ("classifier.weight", "classifier.bias"):
            tensors.pop(name, None)
        notes.append(
            "its classifier reads the class token beside the mean of patches, which our head cannot: left out, so that these "
            "are weights without a head. Fine-tune them, or use their features"
        )
    if (config.pooler_act or "tanh") != "tanh":
        raise UserError(f"its pooler computes {config.pooler_act}; only tanh is supported.")
    names = _class_names(config.id2label or {}) if "classifier.weight" in tensors else None
    images = preprocessing.from_huggingface(config_files.processor)
    if has_layer_scale and not config_files.processor:
        images = _assume_imagenet("preprocessor_config.json", notes)
    default_eps = 1e-6 if kind == "dinov2" else 1e-12
    eps = default_eps if config.layer_norm_eps is None else config.layer_norm_eps
    hints = Hints(
        _gelu(config.hidden_act or "gelu"), eps, config.num_attention_heads, _pair("image_size", config.image_size),
        kernel="bicubic_antialias" if NAMES["dinov2"].registers in tensors else "bicubic",
    )  # fmt: skip
    return _read(tensors, kind, hints, images, {"classes": names} if names else {}, notes)


def _read(
    tensors: dict[str, Tensor], kind: str, hints: Hints, images: Preprocessing, extra: dict[str, Any], notes: list[str]
) -> Weights:
    config = find_config(tensors, NAMES[kind], hints)
    state = vit_entries(config, NAMES[kind]).read(tensors)
    if config.positions == "learned" and not images.view and mae.has_fixed_positions(config, state["positions"]):
        notes.append("positions of MAE: images taken as normalised by ImageNet's mean")
        images = Preprocessing({}, preprocessing.IMAGENET_MEAN, preprocessing.IMAGENET_STD)
        config = replace(config, kernel="bicubic")
    if (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        if config.stem is not None:
            _check_normalisation(images)
        weight, bias = state["patch_embedding.weight"], state["patch_embedding.bias"]
        preprocessing.fold_normalisation(weight, bias, images.mean, images.std)
        notes.append(f"mean {images.mean} and deviation {images.std} of its images folded into the patch embedding")
    return Weights(config, state, _with_view(extra, images), notes, images.mean, images.std)


def _assume_imagenet(missing: str, notes: list[str]) -> Preprocessing:
    notes.append(
        f"LayerScale and no {missing}: images taken as normalised by ImageNet's mean, as in DINOv2 and DeiT III"
    )
    return Preprocessing({}, preprocessing.IMAGENET_MEAN, preprocessing.IMAGENET_STD)


def _simplify(tensors: dict[str, Tensor], notes: list[str]) -> bool:
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


def to_timm(
    model: VisionTransformer | ResNet, classes: list[str] | None, view: Json
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(state dict, config.json) as timm.create_model("local-dir:FOLDER", pretrained=True) reads them.

    Raises UserError for a model that timm does not have.
    """
    if isinstance(model, ResNet):
        tensors = bit_entries(model.config, flax=False).write(model.state_dict())
    else:
        config, state = as_plain(model, "timm's ViT", ("token", "gap", "map"), hybrids=True, representation=False)
        tensors = vit_entries(config, NAMES["timm"]).write(state)
    architecture, args = timm_architecture(model.config)
    found = {
        "architecture": architecture,
        "num_classes": model.config.num_classes,
        "num_features": model.config.num_features if isinstance(model, ResNet) else model.config.width,
        "model_args": args,
        "pretrained_cfg": {
            **preprocessing.to_timm(view, model.config.image_size), "num_classes": model.config.num_classes,
            "custom_load": False,
        },
    }  # fmt: skip
    return tensors, {**found, **({"label_names": classes} if classes else {})}


def timm_architecture(config: Config) -> tuple[str, dict[str, Any]]:
    """(name of a timm model, arguments that change it to this model). Raises UserError if timm has none."""
    if isinstance(config, ResNetConfig):
        layers = next((layers for layers, units in RESNET_UNITS.items() if units == config.units), 0)
        if (name := f"{layers}x{config.width / 64:g}") not in _TIMM_BITS:
            known = ", ".join(_TIMM_BITS)
            raise UserError(f"timm has no BiT of units {config.units} and width {config.width}; it has {known}.")
        return f"resnetv2_{name}_bit", {}
    D, M = config.width, config.mlp_width
    args: dict[str, Any] = {
        "img_size": list(config.image_size), "patch_size": config.patch_size, "embed_dim": D, "depth": config.depth,
        "num_heads": config.num_heads, "mlp_ratio": M / D if int(D * (M / D)) == M else (M + 0.5) / D,
    }  # fmt: skip
    if config.gelu == "tanh":
        args["act_layer"] = "gelu_tanh"
    if config.pool != "token":
        args |= {"class_token": False, "global_pool": "avg" if config.pool == "gap" else "map", "fc_norm": False}
    if config.stem is not None:
        if config.stem not in _TIMM_HYBRIDS:
            raise UserError(
                f"timm has no hybrid whose ResNet has units {config.stem}; format = safetensors can hold it."
            )
        return _TIMM_HYBRIDS[config.stem], args
    for (letter, patch), size in _TIMM_NAMES.items():
        if VARIANTS[letter][:3] == (D, config.depth, M) and patch == config.patch_size:
            return f"vit_{size}_patch{patch}_224", args
    return "vit_base_patch16_224", args  # any name will do: the arguments override it


def to_huggingface(
    model: VisionTransformer | ResNet, classes: list[str] | None, view: Json
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """(state dict, config.json, preprocessor_config.json) of a ViTForImageClassification, or of a ViTModel without a head.

    The representation layer becomes the pooler of a ViTModel. Raises UserError for a model that these cannot hold.
    """
    if isinstance(model, ResNet):
        raise UserError("Hugging Face's ViT cannot hold a ResNet; format = npz, timm, safetensors, onnx can.")
    has_head = model.config.num_classes > 0
    config, state = as_plain(model, "Hugging Face's ViT", ("token",), hybrids=False, representation=not has_head)
    prefix = "vit." if has_head else ""
    tensors = {
        key if key.startswith("classifier.") else f"{prefix}{key}": tensor
        for key, tensor in vit_entries(config, NAMES["huggingface"]).write(state).items()
    }
    names = classes or [f"LABEL_{i}" for i in range(config.num_classes)]
    height, width = config.image_size
    found = {
        "architectures": ["ViTForImageClassification" if has_head else "ViTModel"], "model_type": "vit",
        "hidden_size": config.width, "num_hidden_layers": config.depth, "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width, "hidden_act": "gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu",
        "layer_norm_eps": config.layer_norm_eps, "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size, "num_channels": 3, "qkv_bias": True, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    if has_head:
        found |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    return tensors, found, preprocessing.to_huggingface(view, config.image_size)


def _name_in_file(key: str, renames: list[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _text(config: Json, name: str) -> str:
    """A text field of config.json; empty if it is missing. Raises UserError for another type."""
    return json_record.convert(config.get(name), str | None, "config.json", name) or ""


def _gelu(name: str) -> Gelu:
    if name not in GELUS:
        raise UserError(f"its MLP computes {name[:100]}; supported are {', '.join(GELUS)}.")
    return GELUS[name]


def _class_names(labels: dict[str, str]) -> list[str] | None:
    """The names in order; None if they are Hugging Face's placeholders. Raises UserError for a key that is not a class number."""
    if odd := sorted(labels.keys() - {str(i) for i in range(len(labels))}):
        raise UserError(
            f"config.json: id2label has the key {json_record.quoted(odd[0])}, where {counted(len(labels), 'class')} should have the numbers 0 "
            f"to {len(labels) - 1}."
        )
    names = [labels[str(i)] for i in range(len(labels))]
    return None if not names or names == [f"LABEL_{i}" for i in range(len(names))] else names


def _timm_kernel(tensors: dict[str, Tensor]) -> Kernel:
    """timm's kernel; or that of DINOv2 and DeiT III as published, whose files have timm's names."""
    last = {key.rpartition(".")[2] for key in tensors}
    published = "mask_token" in last or "gamma_1" in last  # timm has no mask token, and other names for LayerScale
    return "bicubic" if published and "register_tokens" not in last else "bicubic_antialias"


def _has_no_class_row(tensors: dict[str, Tensor], size: tuple[int, int] | None) -> bool:
    """Whether timm's table has positions of patches only: by the image size, else if the number of rows is a square."""
    table, kernel = tensors.get("pos_embed"), tensors["patch_embed.proj.weight"]
    if table is None or table.ndim != 3 or kernel.ndim != 4 or not kernel.numel():
        return False
    rows, side = table.shape[1], kernel.shape[-1] * stem_reduction(find_stem(tensors))
    if size is not None and rows - (patches := (size[0] // side) * (size[1] // side)) in (0, 1):
        return rows == patches
    return rows > 1 and math.isqrt(rows) ** 2 == rows


def _pair(name: str, size: int | list[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = [size, size] if isinstance(size, int) else size
    if len(sides) != 2 or not all(1 <= side <= 2**16 for side in sides):
        raise UserError(f"config.json: {name} = {json_record.quoted(size)} must be a side in pixels, or two.")
    return sides[0], sides[1]


def _with_view(extra: dict[str, Any], images: Preprocessing) -> dict[str, Any]:
    return {**extra, "preprocessing": images.view} if images.view else extra


def _check_normalisation(images: Preprocessing) -> None:
    """Raise UserError for a mean or deviation that is not 0.5: zero padding prevents folding it into a ResNet's kernels."""
    if (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        raise UserError(
            f"its images have mean {images.mean} and deviation {images.std}; for a ResNet only 0.5 and 0.5 are supported."
        )
