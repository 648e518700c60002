"""The configuration of a ViT that is found in the tensors of another project's file."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.architecture.config import Gelu, Kernel, Pool, ViTConfig
from pipeline.architecture.pixels import Pixels
from pipeline.architecture.resnets import stem_reduction
from pipeline.architecture.variants import VARIANTS
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import resnets
from pipeline.model.convert.entries import Tensors, key_pattern, part_key
from pipeline.model.convert.tables import TABLES, Names

# GELU -> `hidden_act` of Hugging Face's config.json.
HIDDEN_ACTS: dict[Gelu, str] = {"tanh": "gelu_pytorch_tanh", "erf": "gelu", "quick": "quick_gelu"}


@dataclass(frozen=True)
class Hints:
    """What the tensors do not tell: from the configuration file, else the project's defaults."""

    gelu: Gelu
    layer_norm_eps: float = 1e-6
    num_heads: int | None = None  # None: from the tensors, else of the named size that they fit
    image_size: tuple[int, int] | None = None  # None: the grid is square
    without_table: Literal["none", "sincos2d"] | None = None  # if the file has no positions; None: refused
    kernel: Kernel = "zoom"  # by which the project resamples positions
    layer_scale: float = 1.0  # its initial value, if there is LayerScale
    rope_base: float | None = None
    rope_side: int | None = None
    pool: Pool = "token"  # of a model with a class token
    pixels: Pixels | None = None  # None: 8-bit RGB, or of channels that no file names


class _Shapes:
    """Shapes of a file's tensors, with errors for those that are missing or have another number of axes."""

    def __init__(self, tensors: Tensors, names: Names):
        self.tensors, self.names = tensors, names

    def of(self, key: str, pattern: str) -> tuple[int, ...]:
        """pattern: the expected shape in letters, such as "(D, M)"."""
        if key not in self.tensors:
            raise UserError(f'"{key}" {pattern} is missing; is this a ViT?')
        found = tuple(self.tensors[key].shape)
        if len(found) != len(pattern.split(",")):
            raise UserError(f'"{key}" should be {pattern}, but is {found}.')
        if 0 in found and key != self.names["positions"]:
            raise UserError(f'"{key}" {found} is empty.')
        return found

    def outputs(self, key: str, flax_pattern: str, torch_pattern: str) -> int:
        """Outputs of a dense layer."""
        if "flax" in self.names:
            return self.of(f"{key}/kernel", flax_pattern)[-1]
        return self.of(f"{key}.weight", torch_pattern)[0]

    def in_blocks(self, layer: str | None, part: str) -> bool:
        """Whether any block has this part, "weight" or "bias", of the layer; "" is a tensor of the layer's name."""
        if layer is None:
            return False
        pattern = re.compile(key_pattern(self.names["blocks"]) + re.escape(part_key(layer, part) if part else layer))
        return any(pattern.fullmatch(key) for key in self.tensors)

    def has_layer(self, layer: str) -> bool:
        key = self.names.get(layer)
        return bool({f"{key}/kernel", f"{key}/bias", f"{key}.weight", f"{key}.bias"} & self.tensors.keys())


def find_config(tensors: Tensors, names: Names, hints: Hints) -> ViTConfig:
    """The configuration, from the tensors' shapes. Contradictions between them are found when the entries are read."""
    shapes, flax = _Shapes(tensors, names), "flax" in names
    if flax:
        patch_size, _, _, width = shapes.of(f"{names['patch_embedding']}/kernel", "(P, P, 3, D)")
    else:
        width, _, patch_size, _ = shapes.of(f"{names['patch_embedding']}.weight", "(D, C, P, P)")
    stem = resnets.find_stem(tensors)
    first = names["patch_embedding" if stem is None else "stem.root"]
    first = first if stem else first.replace("backbone.stem.", "backbone.")
    num_channels = 3 if flax else shapes.of(f"{first}.weight", "(D, C, P, P)")[1]
    has_pool = names.get("pool.probe") in tensors
    table = names["positions"]
    has_table = table in tensors or hints.without_table is None
    pattern = "(1 + N, D)" if names.get("flat") else "(1, 1 + N, D)"
    rows = shapes.of(table, pattern)[-2] if has_table else None
    has_token = names["class_token"] in tensors
    if flax and not has_pool and rows is not None and math.isqrt(rows) ** 2 != rows:
        has_token = True  # and it is missing, which reading the entries reports
    depth = len({match[1] for key in tensors if (match := re.match(key_pattern(names["blocks"]), key))})
    gate = _first(names.get("gated.up"))
    gated = shapes.in_blocks(gate, "weight")
    up = gate if gated and gate else names["mlp.up"]
    mlp_width = shapes.outputs(names["blocks"].format(0) + up, "(D, M)", "(M, D)")
    mlp_width //= 2 if gated and gate == names["gated.up"] else 1
    if flax:
        num_heads = _flax_heads(tensors, names, width)
    else:
        num_heads = hints.num_heads or _usual_heads(width, depth, mlp_width, gated)
    cell = patch_size * stem_reduction(stem)
    return ViTConfig(
        registers=shapes.of(names["registers"], "(1, R, D)")[1] if names.get("registers") in tensors else 0,
        width=width,
        depth=depth,
        mlp_width=mlp_width,
        num_heads=num_heads,
        patch_size=patch_size,
        image_size=_image_size(hints.image_size, cell, table, rows, has_token),
        num_classes=shapes.outputs(names["head"], "(D, K)", "(K, D)") if shapes.has_layer("head") else 0,
        representation=shapes.has_layer("representation"),
        gelu=hints.gelu,
        pool="map" if has_pool else hints.pool if has_token else "gap",
        positions="learned" if rows is not None else hints.without_table or "none",
        stem=stem,
        layer_norm_eps=hints.layer_norm_eps,
        kernel=hints.kernel,
        swiglu=gated,
        rope_base=hints.rope_base,
        rope_side=hints.rope_side,
        pixels=hints.pixels or Pixels.of_unknown(num_channels),
        **({} if flax else _find_parts(shapes, names, hints, width)),
    )


def _first(layers: str | list[str] | None) -> str | None:
    return layers[0] if isinstance(layers, list) else layers


def _find_parts(shapes: _Shapes, names: Names, hints: Hints, width: int) -> dict[str, Any]:
    """The fields of ViTConfig about parts that the paper's ViT has or lacks in all blocks."""
    qkv, biases = names["attention.qkv"], "none"
    if shapes.in_blocks(_first(qkv), "bias"):
        biases = "qkv" if isinstance(qkv, str) or shapes.in_blocks(qkv[1], "bias") else "qv"
    if isinstance(qkv, str):
        first = shapes.tensors.get(part_key(names["blocks"].format(0) + qkv, "bias"))
        biases = "qv" if first is not None and first.shape == (2 * width,) else biases
    return {
        "layer_scale": hints.layer_scale if shapes.in_blocks(names.get("attention.out.scale"), "") else None,
        "qkv_bias": biases,
        "out_bias": shapes.in_blocks(names["attention.out"], "bias"),
        "mlp_bias": any(shapes.in_blocks(names.get(layer), "bias") for layer in ("mlp.down", "gated.down")),
        "embedding_norm": shapes.has_layer("embedding_norm"),
        "qk_norm": shapes.in_blocks(names.get("attention.query_norm"), "weight"),
        "pool_norm": shapes.has_layer("pool_norm"),
        "class_norm": shapes.has_layer("class_norm"),
    }


def _flax_heads(tensors: Tensors, names: Names, width: int) -> int:
    """Number of heads in a Flax file, where they are an axis of the query's kernel."""
    query = f"{names['blocks'].format(0)}{names['attention.qkv'][0]}/kernel"
    if query not in tensors or tensors[query].ndim != 3 or math.prod(tensors[query].shape[1:]) != width:
        found = f"is {tuple(tensors[query].shape)}" if query in tensors else "is missing"
        raise UserError(f'"{query}" should be (D, H, D/H) with D = {width}, but {found}.')
    return tensors[query].shape[1]


def _usual_heads(width: int, depth: int, mlp_width: int, gated: bool) -> int:
    """Number of heads of the named size with these numbers: torch's tensors do not tell it."""
    known = TABLES["heads"]["gated"] if gated else [*TABLES["heads"]["plain"], *VARIANTS.values()]
    if heads := next((heads for *size, heads in known if tuple(size) == (width, depth, mlp_width)), 0):
        return heads
    raise UserError(
        f"its tensors do not tell the number of heads, and width {width}, depth {depth}, MLP {mlp_width} is not a known"
        ' size. Put a config.json beside model.safetensors: {"model_args": {"num_heads": ...}}.'
    )


def _image_size(
    hint: tuple[int, int] | None, cell: int, table: str, rows: int | None, has_token: bool
) -> tuple[int, int]:
    """(height, width) in pixels: the hint if it fits the table of positions, else that of a square grid.

    cell: side of a patch in pixels. table: its key, for errors. rows: its number of rows; None: no table, 224 without a
    hint.
    """
    patches = 0 if rows is None else rows - has_token
    if hint is not None and (rows is None or math.prod(side // cell for side in hint) == patches):
        return hint
    if rows is None:
        return 224 // cell * cell, 224 // cell * cell
    side = math.isqrt(max(patches, 0))
    if side == 0 or side * side != patches:
        token = "a class token and " if has_token else ""
        raise UserError(f'"{table}" has {counted(rows, "row")}, which is not {token}a square grid of patches.')
    return side * cell, side * cell


def sizes_of(config: ViTConfig) -> dict[str, Any]:
    """The fields of config.json that all families have."""
    height, width = config.image_size
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "hidden_act": HIDDEN_ACTS[config.gelu],
        "layer_norm_eps": config.layer_norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": config.pixels.num_channels,
    }
