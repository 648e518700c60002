"""Reads and writes state dicts of timm, with its config.json, and those of facebookresearch under the same names.

Their defaults: erf GELU, LayerNorm eps 1e-6.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.architecture.config import Config, Kernel, ResNetConfig
from pipeline.architecture.resnets import stem_reduction
from pipeline.architecture.variants import RESNET_UNITS, VARIANTS
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import preprocessing
from pipeline.model.convert.entries import Weights
from pipeline.model.convert.names import NAMES, Hints, vit_entries
from pipeline.model.convert.plain import as_plain, move_patch_bias
from pipeline.model.convert.preprocessing import Json, Preprocessing
from pipeline.model.convert.reading import check_normalisation, gelu_of, join, pair, read_vit, rename, with_view
from pipeline.model.convert.resnets import bit_entries, find_bit, find_stem, is_bit
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

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

TIMM_KINDS = ("vit", "deit", "flexivit", "resnetv2", "dinov2", "eva_giant", "test_vit")


# Names of facebookresearch's and of timm's other models -> those of timm's ViT.
_PUBLISHED = [
    (r"^(register|storage)_tokens$", "reg_token"), (r"\.gamma_([12])$", r".ls\1.gamma"), (r"attn\.([qv])_bias$", r"attn.\1.bias"),
]  # fmt: skip
# Layers of theirs -> the layer with the rows of these.
_JOINED = {("w1", "w2"): "w12", ("q", "v"): "qkv"}
# Beginnings of the names of what only pre-training uses: projection heads, DINOv3's norm for small views and its table of periods.
_LEFT_OUT = ("fc.", "local_cls_norm.", "rope_embed.")


@dataclass(frozen=True)
class _TimmArgs:
    """The fields of `model_args` in timm's config.json that are read."""

    num_heads: int | None = None
    img_size: int | list[int] | None = None
    global_pool: str | None = None
    act_layer: str | None = None
    pos_embed: str | None = None
    init_values: float | None = None


@dataclass(frozen=True)
class _TimmConfig:
    """The fields of timm's config.json that are read."""

    architecture: str | None = None
    global_pool: str | None = None
    model_args: _TimmArgs | None = None
    pretrained_cfg: dict | None = None
    label_names: list[str] | None = None


def from_timm(tensors: dict[str, Tensor], config: Json, notes: list[str]) -> Weights:
    """config: the content of config.json. Raises UserError."""
    found: _TimmConfig = json_record.convert(config, _TimmConfig, "config.json")
    args, cfg = found.model_args or _TimmArgs(), found.pretrained_cfg or {}
    extra: dict[str, Any] = {"classes": found.label_names} if found.label_names else {}
    images = preprocessing.from_timm(cfg) if cfg else None
    size = pair("model_args.img_size", args.img_size or (images.view["image_size"] if images else None))
    if is_bit(tensors):
        notes.append("BiT's tensors do not tell the image size: " + ("as config.json" if size else "taken as 224"))
        bit = find_bit(tensors, size or (224, 224))
        images = images or Preprocessing({})
        check_normalisation(images)
        return Weights(bit, bit_entries(bit, flax=False).read(tensors), with_view(extra, images), notes)

    kernel = _timm_kernel(tensors)
    is_dinov3 = "storage_tokens" in tensors or any(key.startswith("rope_embed.") for key in tensors)
    if is_dinov3:
        _without_key_bias(tensors)
    is_dinov3 |= "dinov3" in (found.architecture or "")
    tensors = rename(tensors, _PUBLISHED)
    for parts, joined in _JOINED.items():
        join(tensors, parts, joined)
    up, down = (tensors.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    if up is not None and down is not None and len(up) == 2 * down.shape[-1]:  # timm's packed SwiGLU
        tensors = rename(tensors, [(r"mlp\.fc1\.", "mlp.w12."), (r"mlp\.fc2\.", "mlp.w3.")])

    pool = args.global_pool or found.global_pool or "token"
    if pool not in ("token", "map", "avg") and "cls_token" in tensors:
        raise UserError(f"its head reads global_pool = {pool}; only token, avg and map are supported.")
    unused = [key for key in tensors if key.startswith(_LEFT_OUT)]
    for key in unused:
        del tensors[key]
    if unused:
        notes.append(f"{counted(len(unused), 'tensor')} that only pre-training uses left out, such as {unused[0]}")
    if any(key.startswith("fc.") for key in unused) and images is None:
        images = preprocessing.IMAGENET
        notes.append("a projection head as MSN's: images taken as normalised by ImageNet's mean")
    if "cls_token" in tensors and _has_no_class_row(tensors, size):
        table = tensors["pos_embed"]
        tensors["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
        notes.append("the class token has no position in the file: zeros")
    name = found.architecture or ""
    activation = (
        "quick_gelu" if "quickgelu" in name else "gelu_tanh" if "so400m" in name or "giantopt" in name else "gelu"
    )
    hints = Hints(
        gelu_of(args.act_layer or activation), 1e-5 if is_dinov3 or "norm_pre.weight" in tensors else 1e-6, args.num_heads, size,
        "none" if is_dinov3 or args.pos_embed in ("none", "") else None, kernel, rope_base=100.0 if is_dinov3 else None,
        layer_scale=1.0 if args.init_values is None else args.init_values, pool="mean" if pool == "avg" else "token",
    )  # fmt: skip
    return read_vit(tensors, NAMES["timm"], hints, images, extra, notes)


def _without_key_bias(tensors: dict[str, Tensor]) -> None:
    """DINOv3 as published multiplies the biases of keys by 0."""
    for key in [key for key in tensors if key.endswith("attn.qkv.bias")]:
        q, _, v = tensors[key].chunk(3)
        tensors[key] = torch.cat([q, v])


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


def to_timm(
    model: VisionTransformer | ResNet, classes: list[str] | None, view: Json
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(state dict, config.json) as timm.create_model("local-dir:FOLDER", pretrained=True) reads them.

    Raises UserError for a model that timm does not have.
    """
    if isinstance(model, ResNet):
        tensors = bit_entries(model.config, flax=False).write(model.state_dict())
    else:
        config, state = as_plain(
            model, "timm's ViT", ("token", "gap", "map", "mean"), hybrids=True, representation=False,
            holds=frozenset({"layer_scale", "registers", "embedding_norm", "qk_norm"}),
        )  # fmt: skip
        if config.embedding_norm:
            move_patch_bias(state, config.num_patches)
        tensors = vit_entries(config, NAMES["timm"]._replace(patch_bias=not config.embedding_norm)).write(state)
        if config.registers and config.has_class_token:  # timm adds no position to the class token of such a model
            positions = tensors["pos_embed"]
            tensors |= {"cls_token": tensors["cls_token"] + positions[:, :1], "pos_embed": positions[:, 1:].clone()}
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
    if config.gelu != "erf":
        args["act_layer"] = "gelu_tanh" if config.gelu == "tanh" else "quick_gelu"
    if config.layer_scale is not None:
        args["init_values"] = config.layer_scale
    if config.registers:
        args |= {"reg_tokens": config.registers, "no_embed_class": True}
    if config.qk_norm:
        args["qk_norm"] = True
    if config.pool == "mean":
        args |= {"global_pool": "avg", "fc_norm": False}
    elif config.pool != "token":
        args |= {"class_token": False, "global_pool": "avg" if config.pool == "gap" else "map", "fc_norm": False}
    if config.stem is not None:
        if config.stem not in _TIMM_HYBRIDS:
            raise UserError(
                f"timm has no hybrid whose ResNet has units {config.stem}; format = safetensors can hold it."
            )
        return _TIMM_HYBRIDS[config.stem], args
    if config.embedding_norm:
        return "vit_base_patch16_clip_224", args  # which has such a norm, and an eps of 1e-5
    for (letter, patch), size in _TIMM_NAMES.items():
        if VARIANTS[letter][:3] == (D, config.depth, M) and patch == config.patch_size:
            return f"vit_{size}_patch{patch}_224", args
    return "vit_base_patch16_224", args  # any name will do: the arguments override it
