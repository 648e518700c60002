"""Families of published ViTs as random models of transformers, and how far ours are from them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from model_parts import randomised

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}


class Family(NamedTuple):
    model: str  # class of transformers
    config: dict[str, Any]  # fields of its configuration beside SIZES
    expected: dict[str, Any]  # fields of ours
    any_size: dict[str, Any] | None = None  # argument of their forward pass for another image size


INTERPOLATE = {"interpolate_pos_encoding": True}
LAYER_SCALE = {"layerscale_value": 0.5}
SWIGLU = {"use_swiglu_ffn": True, "mlp_ratio": 2}
NO_BIASES = {"query_bias": False, "value_bias": False, "mlp_bias": False, "proj_bias": False}
FAMILIES = {
    "ViT": Family("ViTModel", {}, {"representation": True}, INTERPOLATE),
    "MSN": Family("ViTMSNModel", {}, {"pool": "token"}, INTERPOLATE),
    "I-JEPA": Family("IJepaModel", {}, {"pool": "gap"}, INTERPOLATE),
    "DINOv2": Family("Dinov2Model", {"mlp_ratio": 2} | LAYER_SCALE, {"layer_scale": 0.5}, {}),
    "DINOv2 g": Family("Dinov2Model", SWIGLU, {"swiglu": True, "mlp_width": 48}, {}),
    "DINOv2 g with registers": Family("Dinov2WithRegistersModel", SWIGLU, {"swiglu": True, "registers": 4}, {}),
    "DINOv3": Family(
        "DINOv3ViTModel", {"num_register_tokens": 4}, {"qkv_bias": "qv", "rope_base": 100.0, "registers": 4}, {}
    ),
    "DINOv3, gated": Family(
        "DINOv3ViTModel",
        {"use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 50.0} | NO_BIASES,
        {"swiglu": True, "qkv_bias": "none", "mlp_bias": False, "out_bias": False, "rope_base": 50.0},
        {},
    ),
    "SigLIP": Family("SiglipVisionModel", {}, {"pool": "map", "gelu": "tanh"}, INTERPOLATE),
    "CLIP": Family("CLIPVisionModel", {}, {"embedding_norm": True, "gelu": "quick"}, INTERPOLATE),
    "MetaCLIP 2": Family(
        "MetaClip2VisionModel", {"hidden_act": "gelu"}, {"embedding_norm": True, "gelu": "erf"}, INTERPOLATE
    ),
}


def random_family(transformers: Any, family: Family, folder: Path, deviation: float = 0.2, **changes: Any) -> Any:
    """A random model of the family, saved in the folder with a processor that reads images in [-1, 1]. changes: of its
    sizes.
    """
    cls = getattr(transformers, family.model)
    model = randomised(cls(cls.config_class(**SIZES | family.config | changes)), deviation)
    model.save_pretrained(folder)
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 32, "width": 32}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


@torch.no_grad()
def difference(theirs: Any, ours: Any, size: tuple[int, int], **forward: Any) -> float:
    """The largest difference of features and patch tokens, as a part of the largest."""
    shape = 2, ours.config.pixels.num_channels, *size
    images = torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 2 - 1
    expected = theirs(images, **forward)
    tokens = expected.last_hidden_state
    pooled = expected.get("pooler_output")
    if pooled is None:
        pooled = tokens[:, 0] if ours.config.pool == "token" else tokens.mean(1)
    patches = ours.eval().patch_features(images).flatten(1, 2)
    pairs = [(ours(images), pooled)]
    if not ours.config.embedding_norm:  # CLIP normalises the class token only
        pairs.append((patches, tokens[:, -patches.shape[1] :]))
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)
