"""Shared by readers of other projects' files: the configuration that is found in the tensors, and the ViT with it."""

import math
import re
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.architecture.config import (
    Config,
    Gelu,
    Positions,
    QkvBias,
    ResNetConfig,
    Size,
    ViTConfig,
    stem_reduction,
)
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.architecture.variants import VARIANTS
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model import position
from pipeline.model.convert import preprocessing
from pipeline.model.convert.layouts import NAMES, TABLES, Layout, Names, State, Tensors, Weights, read_model
from pipeline.model.convert.preprocessing import Plain, Preprocessing

# Names of activations in configuration files -> our GELU.
GELUS: dict[str, Gelu] = {"gelu": "erf", "gelu_tanh": "tanh", "gelu_pytorch_tanh": "tanh", "quick_gelu": "quick"}
# GELU -> `hidden_act` of Hugging Face's config.json, of two names the last.
HIDDEN_ACTS = {gelu: name for name, gelu in GELUS.items()}
_PARTS = ("", ".weight", ".bias")


def find_config(tensors: Tensors, names: Names, told: Plain, without_table: Positions | None = None) -> ViTConfig:
    """The configuration, from the tensors' shapes. Contradictions between them are found when the tensors are read.

    told: the fields that the tensors do not tell, from the configuration file or the project's defaults. Of these may
    be None: num_heads (from the tensors, else of the named size that they fit) and image_size (the grid is square).
    pool is of a model with a class token, layer_scale of one with LayerScale. without_table: the positions if the file
    has none; None: refused.
    """
    depth = count_blocks(tensors, names)
    layout, stem = Layout(names), find_stem(tensors, names)

    def has(name: str) -> bool:
        """Whether the file has this layer or parameter of ours, in any block for a star."""
        numbered = (name.replace("*", str(number)) + part for number in range(depth or 1) for part in _PARTS)
        return any(key in tensors for found in numbered for key in layout.keys(found)[:1])

    width, _, patch_size, _ = shape_of(tensors, layout, "patch_embedding.weight", 4)
    root = "patch_embedding.weight" if stem is None else "stem.root.weight"
    num_channels = 3 if layout.flax else shape_of(tensors, layout, root, 4)[1]
    has_pool, has_token, rows = has("pool.probe"), has("class_token"), None
    if has("positions") or without_table is None:
        rows = shape_of(tensors, layout, "positions", 2 if names.get("flat") else 3)[-2]
    if layout.flax and not has_pool and rows is not None and math.isqrt(rows) ** 2 != rows:
        has_token = True  # and it is missing, which reading the tensors reports
    up, down = (f"blocks.0.mlp.{name}.weight" for name in ("up", "down"))
    mlp_width = shape_of(tensors, layout, up, 2)[0] * len(layout.keys(up))
    gated = mlp_width == 2 * shape_of(tensors, layout, down, 2)[1]
    mlp_width //= 1 + gated
    qkv = [layout.keys(f"blocks.{number}.attention.qkv.bias") for number in range(depth)]
    num_biases = max((sum(tensors[key].numel() for key in keys if key in tensors) for keys in qkv), default=0)
    biases: dict[int, QkvBias] = {0: "none", 2 * width: "qv"}
    if layout.flax:  # where they are an axis of the kernel
        num_heads = shape_of(tensors, layout, "blocks.0.attention.qkv.weight", 3)[1]
    else:
        num_heads = told.get("num_heads") or _usual_heads(width, depth, mlp_width, gated)
    cell = patch_size * stem_reduction(stem)
    found: Plain = {
        "registers": shape_of(tensors, layout, "registers", 3)[1] if has("registers") else 0,
        "width": width,
        "depth": depth,
        "mlp_width": mlp_width,
        "num_heads": num_heads,
        "patch_size": patch_size,
        "image_size": _image_size(told.get("image_size"), cell, layout, rows, has_token),
        "num_classes": shape_of(tensors, layout, "head.weight", 2)[0] if has("head") else 0,
        "representation": has("representation"),
        "pool": "map" if has_pool else told.get("pool", "token") if has_token else "gap",
        "positions": without_table if rows is None else "learned",
        "stem": stem,
        "swiglu": gated,
        "pixels": Pixels.of_unknown(num_channels),
        "layer_scale": told.get("layer_scale") if has("blocks.*.attention.out.scale") else None,
        "qkv_bias": "qkv" if layout.flax else biases.get(num_biases, "qkv"),
        "out_bias": layout.flax or has("blocks.*.attention.out.bias"),
        "mlp_bias": layout.flax or has("blocks.*.mlp.down.bias"),
        "embedding_norm": has("embedding_norm"),
        "qk_norm": has("blocks.*.attention.query_norm"),
        "pool_norm": has("pool_norm"),
    }
    return ViTConfig(**told | found)


def find_bit(tensors: Tensors, image_size: Size) -> tuple[ResNetConfig, Names]:
    """(configuration, names) of a BiT, whose tensors do not tell the image size. Raises UserError for an impossible
    one.
    """
    names = NAMES["bit" if any(key.startswith("resnet/") for key in tensors) else "timm_bit"]
    layout, units = Layout(names), _count_units(tensors, names)
    width, channels, *_ = shape_of(tensors, layout, "root.weight", 4)
    has_head = layout.keys("head.bias")[0] in tensors
    classes = shape_of(tensors, layout, "head.bias", 1)[0] if has_head else 0
    pixels = Pixels.of_unknown(3 if layout.flax else channels)
    return ResNetConfig(units, width, image_size, classes, pixels=pixels), names


def is_bit(tensors: Tensors) -> bool:
    return any(Layout(NAMES[kind]).keys("root.weight")[0] in tensors for kind in ("bit", "timm_bit"))


def find_stem(tensors: Tensors, names: Names) -> tuple[int, ...] | None:
    """Units of each stage of a hybrid's stem, () for its root alone, or None for a plain ViT."""
    has_stem = any(key.startswith(("conv_root/", "patch_embed.backbone.")) for key in tensors)
    return _count_units(tensors, names) if has_stem else None


def _count_units(tensors: Tensors, names: Names) -> tuple[int, ...]:
    counts = Counter(int(stage) for stage, _ in _numbers(tensors, names["units"]))
    return tuple(counts[stage] for stage in sorted(counts))


def count_blocks(tensors: Tensors, names: Names) -> int:
    return len(_numbers(tensors, names["blocks"]))


def _numbers(tensors: Tensors, template: str) -> set[tuple[str, ...]]:
    """The digits that stand in keys for each {...} of their template."""
    pattern = r"(\d+)".join(map(re.escape, re.split(r"\{.*?\}", template)))
    return {match.groups() for key in tensors if (match := re.match(pattern, key))}


def shape_of(tensors: Tensors, layout: Layout, name: str, num_axes: int) -> tuple[int, ...]:
    """The shape of one of our parameters, whose rows may be in several tensors: that of the first. Raises UserError."""
    key = layout.keys(name)[0]
    if key not in tensors:
        raise UserError(f'"{key}" is missing; is this a ViT?')
    shape = found = tuple(tensors[key].shape)
    if len(found) != num_axes:
        raise UserError(f'"{key}" should have {num_axes} axes, but is {found}.')
    if layout.flax and name.endswith("weight"):
        shape = (found[3], found[2], *found[:2]) if len(found) == 4 else found[::-1]
    return shape


def _usual_heads(width: int, depth: int, mlp_width: int, gated: bool) -> int:
    """Number of heads of the named size with these numbers: torch's tensors do not tell it."""
    known = TABLES["heads"]["gated"] if gated else [*TABLES["heads"]["plain"], *VARIANTS.values()]
    if heads := next((heads for *size, heads in known if tuple(size) == (width, depth, mlp_width)), 0):
        return heads
    raise UserError(
        f"its tensors do not tell the number of heads, and width {width}, depth {depth}, MLP {mlp_width} is not a known"
        ' size. Put a config.json beside model.safetensors: {"model_args": {"num_heads": ...}}.'
    )


def _image_size(hint: Size | None, cell: int, layout: Layout, rows: int | None, has_token: bool) -> Size:
    """(height, width) in pixels: the hint if it fits the table of positions, else that of a square grid.

    cell: side of a patch in pixels. rows: of the table; None: no table, 224 without a hint.
    """
    patches = 0 if rows is None else rows - has_token
    if hint is not None and (rows is None or math.prod(side // cell for side in hint) == patches):
        return hint
    if rows is None:
        return 224 // cell * cell, 224 // cell * cell
    side = math.isqrt(max(patches, 0))
    if side == 0 or side * side != patches:
        token = "a class token and " if has_token else ""
        key = layout.keys("positions")[0]
        raise UserError(f'"{key}" has {counted(rows, "row")}, which is not {token}a square grid of patches.')
    return side * cell, side * cell


def read_vit(
    tensors: State,
    names: Names,
    told: Plain,
    images: Preprocessing | None,
    extra: Plain,
    notes: list[str],
    without_table: Positions | None = None,
) -> Weights:
    """The ViT with these names. told, without_table: as of `find_config`. images: None if no file tells how they are
    normalised. Raises UserError.
    """
    for name in ("mask_token", "embeddings.mask_token"):
        if tensors.pop(name, None) is not None:
            notes.append("the mask token, which only pre-training uses, is left out")
    patch = names["patch_embedding"]
    if f"{patch}.bias" not in tensors and f"{patch}.weight" in tensors:
        tensors[f"{patch}.bias"] = torch.zeros(len(tensors[f"{patch}.weight"]))
    config = find_config(tensors, names, told, without_table)
    return with_images(config, read_model(tensors, config, names), images, extra, notes)


def with_images(config: Config, state: State, images: Preprocessing | None, extra: Plain, notes: list[str]) -> Weights:
    """The weights, whose model reads 8-bit RGB in [-1, 1]: another mean and deviation are folded into the patch
    embedding. Other images are read by them.

    images: None if no file tells how they are normalised. Raises UserError for a mean of another number of channels,
    and for a ResNet, whose zero padding prevents the folding.
    """
    pixels, is_rgb = config.pixels, config.pixels == RGB8
    if images is not None:
        # A file may have one number for all channels.
        count = pixels.num_channels
        mean, std = (found[:1] * count if len({*found}) == 1 else found for found in (images.mean, images.std))
        if {len(mean), len(std)} != {count}:
            raise UserError(f"image mean {images.mean} and deviation {images.std} are not those of {count} channels.")
        images = images._replace(mean=mean, std=std)
        if not is_rgb:
            config = replace(config, pixels=replace(pixels, mean=mean, std=std))
    elif is_rgb and isinstance(config, ViTConfig):
        images, config = _assumed(config, state, notes)
    images = images or Preprocessing({})
    if is_rgb and (images.mean, images.std) != (preprocessing.HALF, preprocessing.HALF):
        if isinstance(config, ResNetConfig) or config.has_stem:
            raise UserError(
                f"its images have mean {images.mean} and deviation {images.std}; for a ResNet only 0.5 and 0.5 are"
                " supported."
            )
        weight, bias = state["patch_embedding.weight"], state["patch_embedding.bias"]
        preprocessing.fold_normalisation(weight, bias, images.mean, images.std)
        notes.append(f"mean {images.mean} and deviation {images.std} of its images folded into the patch embedding")
    if images.view:
        extra = {**extra, "preprocessing": images.view}
    return Weights(config, state, extra, notes, *((images.mean, images.std) if is_rgb else ()))


def _assumed(config: ViTConfig, state: State, notes: list[str]) -> tuple[Preprocessing, ViTConfig]:
    """(preprocessing, configuration with the resampling kernel) of the family of a file without image settings."""
    if config.positions == "learned" and _has_fixed_positions(config, state["positions"]):
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


def _has_fixed_positions(config: ViTConfig, table: Tensor) -> bool:
    """Whether a table (1, [1 +] N, D) holds the fixed positions of MAE and I-JEPA, which tells their weights from other
    ViTs.

    Those of MAE's fine-tuned models began there and were trained: they may differ by half of the table's norm.
    """
    if config.width % 4:
        return False
    expected = position.sincos2d(replace(config, positions="sincos2d_mae"))
    return table.shape == expected.shape and bool((table - expected).norm() < expected.norm() / 2)


def join(tensors: State, parts: tuple[str, ...], joined: str) -> None:
    """Put the rows of several layers of each block into one, in place: such as query, key and value."""
    for key in [key for key in tensors if f".{parts[0]}." in key]:
        keys = [key.replace(f".{parts[0]}.", f".{part}.") for part in parts]
        if all(k in tensors for k in keys):
            tensors[key.replace(f".{parts[0]}.", f".{joined}.")] = torch.cat([tensors.pop(k) for k in keys])


def rename(tensors: Tensors, renames: list[tuple[str, str]]) -> State:
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


def pair(name: str, size: int | list[int] | None) -> Size | None:
    if size is None:
        return None
    sides = [size, size] if isinstance(size, int) else size
    if len(sides) != 2 or not all(1 <= side <= 2**16 for side in sides):
        raise UserError(f"config.json: {name} = {json_record.quoted(size)} must be a side in pixels, or two.")
    return sides[0], sides[1]
