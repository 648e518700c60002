"""Reads and writes state dicts of Hugging Face's transformers, with their config.json and preprocessor_config.json."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import preprocessing
from pipeline.model.convert.entries import Weights
from pipeline.model.convert.names import NAMES, Hints, vit_entries
from pipeline.model.convert.plain import as_plain
from pipeline.model.convert.preprocessing import Json
from pipeline.model.convert.reading import ConfigFiles, assume_imagenet, gelu_of, pair, read_vit, simplify
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

# Names in memory since transformers 5 -> names in its files, which are still the old ones.
_NEW_NAMES = [
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."), (r"attention\.([qkv])_proj\.", r"attention.attention.\1."),
    (r"attention\.attention\.q\.", "attention.attention.query."), (r"attention\.attention\.k\.", "attention.attention.key."),
    (r"attention\.attention\.v\.", "attention.attention.value."), (r"attention\.o_proj\.", "attention.output.dense."),
]  # fmt: skip
_NEW_MLP = [(r"mlp\.fc1\.", "intermediate.dense."), (r"mlp\.fc2\.", "output.dense.")]  # ViT, but not DINOv2

# Model types of config.json that are read, or whose tower for images is.
MODEL_TYPES = (
    "vit", "vit_mae", "vit_msn", "ijepa", "dinov2", "dinov2_with_registers", "siglip", "siglip_vision_model",
)  # fmt: skip


class _Defaults(NamedTuple):
    """What config.json and preprocessor_config.json of a kind of names (NAMES) may leave out."""

    eps: float  # of LayerNorm
    activation: str = "gelu"


_DEFAULTS = {
    "huggingface": _Defaults(1e-12), "dinov2": _Defaults(1e-6), "siglip": _Defaults(1e-6, "gelu_pytorch_tanh"),
}  # fmt: skip


@dataclass(frozen=True)
class _HuggingFaceConfig:
    """The fields of Hugging Face's config.json that are read."""

    model_type: str | None = None
    num_attention_heads: int | None = None
    hidden_act: str | None = None
    layer_norm_eps: float | None = None
    pooler_act: str | None = None
    image_size: int | list[int] | None = None


def from_huggingface(tensors: dict[str, Tensor], kind: str, config_files: ConfigFiles, notes: list[str]) -> Weights:
    """tensors: without a prefix. kind: a key of NAMES, "huggingface" also for DINOv2. Raises UserError."""
    if kind == "huggingface":
        tensors = {_name_in_file(key, _NEW_NAMES): tensor for key, tensor in tensors.items()}
        if "encoder.layer.0.norm1.weight" in tensors:
            kind = "dinov2"
        else:
            tensors = {_name_in_file(key, _NEW_MLP): tensor for key, tensor in tensors.items()}
    content = config_files.config.get("vision_config") or config_files.config
    config: _HuggingFaceConfig = json_record.convert(content, _HuggingFaceConfig, "config.json")
    if not config_files.config:
        notes.append("no config.json: number of heads, GELU and eps taken as Hugging Face's own")
    has_layer_scale = simplify(tensors, notes)
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
    labels = json_record.convert(config_files.config.get("id2label"), dict[str, str] | None, "config.json", "id2label")
    names = _class_names(labels or {}) if "classifier.weight" in tensors else None
    images = preprocessing.from_huggingface(config_files.processor)
    if has_layer_scale and not config_files.processor:
        images = assume_imagenet("preprocessor_config.json", notes)
    usual = _DEFAULTS[kind]
    hints = Hints(
        gelu_of(config.hidden_act or usual.activation), config.layer_norm_eps or usual.eps, config.num_attention_heads,
        pair("image_size", config.image_size),
        kernel="bicubic_antialias" if NAMES["dinov2"].registers in tensors else "bicubic",
    )  # fmt: skip
    return read_vit(tensors, kind, hints, images, {"classes": names} if names else {}, notes)


def _name_in_file(key: str, renames: list[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _class_names(labels: dict[str, str]) -> list[str] | None:
    """The names in order; None if they are Hugging Face's placeholders. Raises UserError for a key that is not a class number."""
    if odd := sorted(labels.keys() - {str(i) for i in range(len(labels))}):
        raise UserError(
            f"config.json: id2label has the key {json_record.quoted(odd[0])}, where {counted(len(labels), 'class')} should have the numbers 0 "
            f"to {len(labels) - 1}."
        )
    names = [labels[str(i)] for i in range(len(labels))]
    return None if not names or names == [f"LABEL_{i}" for i in range(len(names))] else names


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
