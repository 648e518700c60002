"""Reads and writes state dicts of timm, with its config.json, and those of facebookresearch under the same names.

Their defaults: erf GELU, LayerNorm eps 1e-6.
"""

import math
import re
from functools import partial

import torch

from pipeline.architecture.config import Config, Positions, Size, ViTConfig, stem_reduction
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import preprocessing
from pipeline.model.convert.layouts import (
    NAMES,
    TABLES,
    State,
    Weights,
    as_plain,
    read_model,
    write_model,
)
from pipeline.model.convert.preprocessing import Json, Plain, field
from pipeline.model.convert.reading import (
    HIDDEN_ACTS,
    find_bit,
    find_stem,
    gelu_of,
    is_bit,
    join,
    pair,
    read_vit,
    rename,
    with_images,
)
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

# Names of facebookresearch's and of timm's other models -> those of timm's ViT.
_PUBLISHED = [
    (r"^(register|storage)_tokens$", "reg_token"),
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"attn\.([qv])_bias$", r"attn.\1.bias"),
    (r"mlp\.w12\.", "mlp.fc1."),
    (r"mlp\.w3\.", "mlp.fc2."),
]
# Layers of theirs -> the layer with the rows of these.
_JOINED = {("w1", "w2"): "fc1", ("fc1_g", "fc1_x"): "fc1", ("q", "v"): "qkv"}
# Beginnings of the names of what only pre-training uses: projection heads, DINOv3's norm for small views.
_LEFT_OUT = ("fc.", "local_cls_norm.")


# What is in the names of timm's models with RoPE -> its base, and the side of `rope_side`, None for DINOv3's. These
# rotate two neighbouring channels at a time, but DINOv3 two that are half a head apart, as ours. The last are
# naver-ai/rope-vit's, which have x before y.
_ROPES: dict[str, tuple[float, int | None]] = {
    "dinov3|lingbot": (100.0, None),
    r"^eva02_|_rope_reg\d": (10000.0, 16),
    r"_rope_(ape_)?\d": (100.0, 0),
}


# timm's SigLIP 2 models whose names say that they are not SigLIP 1, which has the exact GELU in timm.
_BY_TANH = "base_patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt"


def from_timm(tensors: State, config: Json, notes: list[str]) -> Weights:
    """config: the content of config.json. Raises UserError."""
    get = partial(field, config, "config.json")
    args = partial(field, get("model_args", dict, {}), "config.json: model_args")
    classes, cfg = get("label_names", list[str]), get("pretrained_cfg", dict)
    extra: Plain = {"classes": classes} if classes else {}
    images = preprocessing.from_timm(cfg) if cfg else None
    size = pair("model_args.img_size", args("img_size", int | list[int], images and images.view["image_size"]))
    if is_bit(tensors):
        notes.append("BiT's tensors do not tell the image size: " + ("as config.json" if size else "taken as 224"))
        bit, names = find_bit(tensors, size or (224, 224))
        return with_images(bit, read_model(tensors, bit, names), images, extra, notes)

    name = architecture = get("architecture", str, "")
    if other := next((part for key, part in TABLES["unsupported_names"].items() if key in name), None):
        raise UserError(f"{name[:100]} has {other}, which is not supported.")
    # DINOv2 and DeiT III as published, whose files have timm's names but for these two.
    last = {key.rpartition(".")[2] for key in tensors}
    is_published = last & {"mask_token", "gamma_1"} and "register_tokens" not in last
    is_dinov3 = "storage_tokens" in tensors or any(key.startswith("rope_embed.") for key in tensors)
    if is_dinov3:
        # DINOv3 as published multiplies the biases of keys by 0.
        for key in [key for key in tensors if key.endswith("attn.qkv.bias")]:
            q, _, v = tensors[key].chunk(3)
            tensors[key] = torch.cat([q, v])
        name = name or "dinov3"
    gates = {f"blocks.0.mlp.{part}.weight" for part in ("w1", "w12", "fc1_g")}
    if gates & tensors.keys() and {"blocks.0.attn.q_bias", "pos_embed"} <= tensors.keys():
        name = name or "eva02_"  # no other published model has these three
    tensors = rename(tensors, _PUBLISHED)
    for parts, joined in _JOINED.items():
        join(tensors, parts, joined)
    tensors.pop("rope_embed.periods", None)  # of the base 100 in all of DINOv3's models
    base, side = next((rope for pattern, rope in _ROPES.items() if re.search(pattern, name)), (None, None))
    changed = [key for key in get("model_args", dict, {}) if key.startswith(("rope_", "ref_feat_"))]
    if base and changed:
        raise UserError(f"its model_args change the rotation ({changed[0][:100]}), which is not supported.")

    pools = args("global_pool", str), get("global_pool", str)
    pool = pools[0] or pools[1] or "token"
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
    _place_positions(tensors, size, notes)
    if "fc_norm.weight" in tensors and pool == "token" and "cls_token" in tensors:
        if "token" in pools:  # of one token, so that it is the last norm as well
            tensors = rename(tensors, [(r"^fc_norm\.", "norm.")])
        else:
            pool = "avg"
    activation = "quick_gelu" if "quickgelu" in name else "gelu_tanh" if re.search(_BY_TANH, name) else "gelu"
    is_of_timm = base and architecture  # though with other names than those of its ViT
    told = {
        "gelu": gelu_of(args("act_layer", str, activation)),
        "layer_norm_eps": 1e-5 if re.search("dinov3|lingbot", name) or "norm_pre.weight" in tensors else 1e-6,
        "num_heads": args("num_heads", int, 16 if name == "vit_base_patch16_gap_224" else None),
        "image_size": size,
        "kernel": "bicubic" if is_published and not is_of_timm else "bicubic_antialias",
        "rope_base": base,
        "rope_side": side,
        "layer_scale": args("init_values", float, 1.0),
        "pool": "mean" if pool == "avg" else "token",
    }
    without_table: Positions | None = "none" if base or args("pos_embed", str) in ("none", "") else None
    weights = read_vit(tensors, NAMES["timm"], told, images, extra, notes, without_table)
    if side is not None:
        _exchange_channels(weights.state, weights.config)
    return weights


def _exchange_channels(state: State, config: Config) -> None:
    """Put the channels of queries and keys that are rotated together half a head apart, in place, and those of y first.

    Their order does not change what the attention computes.
    """
    assert isinstance(config, ViTConfig)
    pairs = torch.arange(config.head_dim // 2).roll(config.head_dim // 4 if config.rope_side == 0 else 0)
    head = torch.cat([2 * pairs, 2 * pairs + 1])
    rows = (torch.arange(0, config.width, config.head_dim)[:, None] + head).flatten()
    for name, tensor in state.items():
        if name.endswith((".query_norm.weight", ".query_norm.bias", ".key_norm.weight", ".key_norm.bias")):
            state[name] = tensor[head]
        elif name.endswith((".qkv.weight", ".qkv.bias")):
            parts = list(tensor.split(config.width))  # of the biases, two or three
            turned = [part[rows] for part in parts[: max(1, len(parts) - 1)]]
            state[name] = torch.cat([*turned, parts[-1]])


def _place_positions(tensors: State, size: Size | None, notes: list[str]) -> None:
    """Make the table of positions, in place, that of class token and patches: rows of registers are added to these, and
    the row of a class token that has none is zeros.

    Patches are those of the image size; without one, a class token has no row if the number of rows is a square.
    """
    table, registers, kernel = (tensors.get(key) for key in ("pos_embed", "reg_token", "patch_embed.proj.weight"))
    if table is None or kernel is None or table.ndim != 3:
        return
    side = kernel.shape[-1] * stem_reduction(find_stem(tensors, NAMES["timm"]))
    has_token = int("cls_token" in tensors)
    patches = None if size is None else math.prod(pixels // side for pixels in size)
    extra = 0 if registers is None else registers.shape[1]
    if patches and extra and table.shape[1] == has_token + extra + patches:
        token, own, rest = table.split([has_token, extra, patches], dim=1)
        table = torch.cat([token, rest], dim=1)
        tensors |= {"reg_token": tensors["reg_token"] + own, "pos_embed": table}
    rows = table.shape[1]
    is_square = rows > 1 and math.isqrt(rows) ** 2 == rows
    if has_token and (rows == patches if patches in (rows, rows - 1) else is_square):
        tensors["pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
        notes.append("the class token has no position in the file: zeros")


def to_timm(model: VisionTransformer | ResNet, classes: list[str] | None, view: Json) -> tuple[State, Plain]:
    """(state dict, config.json) as timm.create_model("local-dir:FOLDER", pretrained=True) reads them.

    Raises UserError for a model that timm's ViT cannot hold.
    """
    holds = frozenset({"layer_scale", "registers", "qk_norm", "pool_norm"})
    config, state = as_plain(model, "timm's ViT", ("token", "gap", "map", "mean"), holds=holds)
    tensors = write_model(state, config, NAMES["timm"])
    # timm adds none to the class token of such a model
    if config.registers and config.has_class_token:
        positions = tensors["pos_embed"]
        tensors |= {"cls_token": tensors["cls_token"] + positions[:, :1], "pos_embed": positions[:, 1:].clone()}
    args = {
        "img_size": list(config.image_size),
        "patch_size": config.patch_size,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": (config.mlp_width + 0.5) / config.width,  # timm rounds the product with the width down
        "init_values": config.layer_scale,
        "reg_tokens": config.registers,
        "no_embed_class": config.registers > 0,
        "qk_norm": config.qk_norm,
        "class_token": config.has_class_token,
        "global_pool": {"gap": "avg", "mean": "avg"}.get(config.pool, config.pool),
        "fc_norm": config.pool_norm,
        "act_layer": (HIDDEN_ACTS | {"tanh": "gelu_tanh"})[config.gelu],
    }
    found = {
        "architecture": "vit_base_patch16_224",  # any ViT: the arguments override it
        "num_classes": config.num_classes,
        "num_features": config.width,
        "model_args": args,
        "pretrained_cfg": {
            **preprocessing.to_timm(view, config.image_size),
            "num_classes": config.num_classes,
            "custom_load": False,
        },
    }
    return tensors, {**found, **({"label_names": classes} if classes else {})}
