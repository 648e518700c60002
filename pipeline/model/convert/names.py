"""Names of the parts of a ViT in other projects' files: the entries of such a file, and the configuration found in it."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pipeline.architecture.config import Gelu, Kernel, Pool, ViTConfig
from pipeline.architecture.pixels import Pixels
from pipeline.architecture.resnets import stem_reduction
from pipeline.architecture.variants import VARIANTS
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.model.convert import resnets
from pipeline.model.convert.entries import Entries, Entry, Tensors, key_pattern, part_key


class PoolNames(NamedTuple):
    """Names of the parts of attention pooling."""

    probe: str
    query_key_value: tuple[str, ...]  # one tensor for all, two (query; key and value), or three
    out: str
    norm: str
    up: str
    down: str


class Names(NamedTuple):
    """Names of the parts of a ViT. {} is the number of a block; the names of its parts follow.

    A name that ends with an underscore has no dot before "weight" and "bias".
    """

    flax: bool
    class_token: str
    positions: str
    patch: str
    block: str
    attention_norm: str
    qkv: tuple[str, ...]  # one tensor for all, or three
    out: str
    mlp_norm: str
    up: str
    down: str
    norm: str
    representation: str | None
    head: str
    pool: PoolNames | None = None
    registers: str | None = None
    embedding_norm: str | None = None
    qk_norm: tuple[str, str] | None = None
    class_norm: str | None = None
    pool_norm: str | None = None  # the last norm, where it is of the mean of the patches
    layer_scale: tuple[str, str] | None = None  # factors of the attention and of the MLP
    # Of a SwiGLU MLP: gate and value, in one tensor or two; and the last layer.
    gated: tuple[tuple[str, ...], str] | None = None
    flat: bool = False  # no axis of length 1 before class token and positions
    patch_bias: bool = True


_MAP = "MAPHead_0/MultiHeadDotProductAttention_0"
_LINEN = Names(
    flax=True,
    class_token="cls",
    positions="Transformer/posembed_input/pos_embedding",
    patch="embedding",
    block="Transformer/encoderblock_{}/",
    attention_norm="LayerNorm_0",
    qkv=tuple(f"MultiHeadDotProductAttention_0/{part}" for part in ("query", "key", "value")),
    out="MultiHeadDotProductAttention_0/out",
    mlp_norm="LayerNorm_1",
    up="MlpBlock_0/Dense_0",
    down="MlpBlock_0/Dense_1",
    norm="Transformer/encoder_norm",
    representation="pre_logits",
    head="head",
)
_HUGGINGFACE = Names(
    flax=False,
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    patch="embeddings.patch_embeddings.projection",
    block="encoder.layer.{}.",
    attention_norm="layernorm_before",
    qkv=tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    out="attention.output.dense",
    mlp_norm="layernorm_after",
    up="intermediate.dense",
    down="output.dense",
    norm="layernorm",
    representation="pooler.dense",
    head="classifier",
)
_SIGLIP = Names(
    flax=False,
    flat=True,
    class_token="embeddings.class_embedding",
    positions="embeddings.position_embedding.weight",
    patch="embeddings.patch_embedding",
    block="encoder.layers.{}.",
    attention_norm="layer_norm1",
    qkv=tuple(f"self_attn.{part}_proj" for part in "qkv"),
    out="self_attn.out_proj",
    mlp_norm="layer_norm2",
    up="mlp.fc1",
    down="mlp.fc2",
    norm="post_layernorm",
    representation=None,
    head="classifier",
    pool=PoolNames(
        "head.probe",
        ("head.attention.in_proj_",),
        "head.attention.out_proj",
        "head.layernorm",
        "head.mlp.fc1",
        "head.mlp.fc2",
    ),
)

NAMES = {
    "linen": _LINEN,
    # Old Flax numbered all modules of a block in one sequence, Linen by class. All released files have the old names.
    "released": _LINEN._replace(
        qkv=tuple(f"MultiHeadDotProductAttention_1/{part}" for part in ("query", "key", "value")),
        out="MultiHeadDotProductAttention_1/out",
        mlp_norm="LayerNorm_2",
        up="MlpBlock_3/Dense_0",
        down="MlpBlock_3/Dense_1",
    ),
    "big_vision": _LINEN._replace(
        positions="pos_embedding",
        pool=PoolNames(
            "MAPHead_0/probe",
            (f"{_MAP}/query", f"{_MAP}/key", f"{_MAP}/value"),
            f"{_MAP}/out",
            "MAPHead_0/LayerNorm_0",
            "MAPHead_0/MlpBlock_0/Dense_0",
            "MAPHead_0/MlpBlock_0/Dense_1",
        ),
    ),
    "timm": Names(
        flax=False,
        class_token="cls_token",
        positions="pos_embed",
        patch="patch_embed.proj",
        block="blocks.{}.",
        attention_norm="norm1",
        qkv=("attn.qkv",),
        out="attn.proj",
        mlp_norm="norm2",
        up="mlp.fc1",
        down="mlp.fc2",
        norm="norm",
        representation="pre_logits.fc",
        head="head",
        registers="reg_token",
        embedding_norm="norm_pre",
        layer_scale=("ls1.gamma", "ls2.gamma"),
        gated=(("mlp.w12",), "mlp.w3"),
        qk_norm=("attn.q_norm", "attn.k_norm"),
        class_norm="cls_norm",
        pool_norm="fc_norm",
        pool=PoolNames(
            "attn_pool.latent",
            ("attn_pool.q", "attn_pool.kv"),
            "attn_pool.proj",
            "attn_pool.norm",
            "attn_pool.mlp.fc1",
            "attn_pool.mlp.fc2",
        ),
    ),
    "huggingface": _HUGGINGFACE,
    "dinov2": _HUGGINGFACE._replace(
        registers="embeddings.register_tokens",
        attention_norm="norm1",
        mlp_norm="norm2",
        up="mlp.fc1",
        down="mlp.fc2",
        layer_scale=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        gated=(("mlp.weights_in",), "mlp.weights_out"),
    ),
    "dinov3": _HUGGINGFACE._replace(
        registers="embeddings.register_tokens",
        patch="embeddings.patch_embeddings",
        block="layer.{}.",
        attention_norm="norm1",
        qkv=tuple(f"attention.{part}_proj" for part in "qkv"),
        out="attention.o_proj",
        mlp_norm="norm2",
        up="mlp.up_proj",
        down="mlp.down_proj",
        norm="norm",
        representation=None,
        layer_scale=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        gated=(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    ),
    "siglip": _SIGLIP,
    "clip": _SIGLIP._replace(pool=None, embedding_norm="pre_layrnorm", patch_bias=False),
    "open_clip": Names(
        flax=False,
        flat=True,
        class_token="class_embedding",
        positions="positional_embedding",
        patch="conv1",
        block="transformer.resblocks.{}.",
        attention_norm="ln_1",
        qkv=("attn.in_proj_",),
        out="attn.out_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        norm="ln_post",
        representation=None,
        head="head",
        embedding_norm="ln_pre",
        layer_scale=("ls_1.gamma", "ls_2.gamma"),
        patch_bias=False,
    ),
}
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


def vit_entries(config: ViTConfig, names: Names) -> Entries:
    """Every tensor of a ViT of this configuration, in a file with these names."""
    entries = Entries(names.flax)
    D, M, K, P = (config.width,), (config.mlp_width,), (config.num_classes,), config.patch_size
    heads = (config.num_heads, config.head_dim) if names.flax else D

    channels = config.pixels.num_channels
    if config.stem is not None:
        channels = resnets.add_stem(entries, config.stem, channels)
    ones = () if names.flat else (1,)
    if config.has_class_token:
        entries.append(Entry(names.class_token, (*ones, *ones, *D), "class_token", (1, 1, *D)))
    if config.registers:
        assert names.registers is not None, "the caller refuses registers that the file cannot hold"
        entries.table(names.registers, "registers", 1, config.registers, *D)
    entries.conv(names.patch, "patch_embedding", channels, config.width, P, bias=names.patch_bias)
    if config.positions == "learned":
        table = config.num_positions, config.width
        entries.append(Entry(names.positions, (*ones, *table), "positions", (1, *table)))

    if config.embedding_norm:
        assert names.embedding_norm is not None, "the caller refuses parts that the file cannot hold, here and below"
        entries.norm(names.embedding_norm, "embedding_norm", config.width)

    for i in range(config.depth):
        add_block(entries, config, names, names.block.format(i), f"blocks.{i}")

    assert names.pool_norm is not None or not config.pool_norm
    entries.norm((config.pool_norm and names.pool_norm) or names.norm, "norm", config.width)
    if config.class_norm:
        assert names.class_norm is not None
        entries.norm(names.class_norm, "class_norm", config.width)
    if config.pool == "map":
        assert names.pool is not None, "the caller refuses pools that the file cannot hold"
        entries.table(names.pool.probe, "pool.probe", 1, 1, *D)
        parts = names.pool.query_key_value
        entries.dense(parts[0], "pool.query", D, heads)
        for part in parts[1:] or parts:
            entries.dense(part, "pool.key_value", D, heads if len(parts) == 3 else (2 * config.width,))
        entries.dense(names.pool.out, "pool.out", heads, D)
        entries.norm(names.pool.norm, "pool.mlp_norm", config.width)
        entries.dense(names.pool.up, "pool.mlp.up", D, M)
        entries.dense(names.pool.down, "pool.mlp.down", M, D)
    if config.representation:
        assert names.representation is not None, "the caller refuses a layer that the file cannot hold"
        entries.dense(names.representation, "representation", D, D)
    if config.num_classes:
        entries.dense(names.head, "head", (config.num_features,), K)
    return entries


def add_block(entries: Entries, config: ViTConfig, names: Names, key: str, name: str) -> None:
    """One block. key: in front of the names in the file; name: in our state dict."""
    D, M = (config.width,), (config.mlp_width,)
    heads = (config.num_heads, config.head_dim) if names.flax else D
    entries.norm(key + names.attention_norm, f"{name}.attention_norm", config.width)
    biased = "" if config.qkv_bias == "none" else config.qkv_bias  # the letters of those with a bias
    if len(names.qkv) == 1:
        rows = (len(biased) * config.width,)
        entries.dense(key + names.qkv[0], f"{name}.attention.qkv", D, (3 * config.width,), rows)
    else:
        for part, letter in zip(names.qkv, "qkv", strict=True):
            entries.dense(key + part, f"{name}.attention.qkv", D, heads, heads if letter in biased else (0,))
    if config.qk_norm:
        assert names.qk_norm is not None
        for norm, part in zip(names.qk_norm, ("query_norm", "key_norm"), strict=True):
            entries.norm(key + norm, f"{name}.attention.{part}", config.head_dim)
    entries.dense(key + names.out, f"{name}.attention.out", heads, D, D if config.out_bias else (0,))
    entries.norm(key + names.mlp_norm, f"{name}.mlp_norm", config.width)
    assert names.gated is not None or not config.swiglu
    up, down = names.gated if names.gated and config.swiglu else ((names.up,), names.down)
    if config.swiglu:
        M = (2 * config.mlp_width // len(up),)
    for part in up:
        entries.dense(key + part, f"{name}.mlp.up", D, M, M if config.mlp_bias else (0,))
    entries.dense(key + down, f"{name}.mlp.down", (config.mlp_width,), D, D if config.mlp_bias else (0,))
    if config.layer_scale is not None:
        assert names.layer_scale is not None
        for factors, layer in zip(names.layer_scale, ("attention.out", "mlp.down"), strict=True):
            entries.table(key + factors, f"{name}.{layer}.scale", config.width)


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
        if 0 in found and key != self.names.positions:
            raise UserError(f'"{key}" {found} is empty.')
        return found

    def outputs(self, key: str, flax_pattern: str, torch_pattern: str) -> int:
        """Outputs of a dense layer."""
        if self.names.flax:
            return self.of(f"{key}/kernel", flax_pattern)[-1]
        return self.of(f"{key}.weight", torch_pattern)[0]

    def in_blocks(self, layer: str | None, part: str) -> bool:
        """Whether any block has this part, "weight" or "bias", of the layer; "" is a tensor of the layer's name."""
        if layer is None:
            return False
        pattern = re.compile(key_pattern(self.names.block) + re.escape(part_key(layer, part) if part else layer))
        return any(pattern.fullmatch(key) for key in self.tensors)

    def has_layer(self, key: str | None) -> bool:
        return key is not None and bool(
            {f"{key}/kernel", f"{key}/bias", f"{key}.weight", f"{key}.bias"} & self.tensors.keys()
        )


def find_config(tensors: Tensors, names: Names, hints: Hints) -> ViTConfig:
    """The configuration, from the tensors' shapes. Contradictions between them are found when the entries are read."""
    shapes = _Shapes(tensors, names)
    if names.flax:
        patch_size, _, _, width = shapes.of(f"{names.patch}/kernel", "(P, P, 3, D)")
    else:
        width, _, patch_size, _ = shapes.of(f"{names.patch}.weight", "(D, C, P, P)")
    stem = resnets.find_stem(tensors)
    first = f"{names.patch if stem is None else resnets.stem_root(stem) + 'conv'}.weight"
    num_channels = 3 if names.flax else shapes.of(first, "(D, C, P, P)")[1]
    has_pool = names.pool is not None and names.pool.probe in tensors
    has_table = names.positions in tensors or hints.without_table is None
    pattern = "(1 + N, D)" if names.flat else "(1, 1 + N, D)"
    rows = shapes.of(names.positions, pattern)[-2] if has_table else None
    has_token = names.class_token in tensors
    if names.flax and not has_pool and rows is not None and math.isqrt(rows) ** 2 != rows:
        has_token = True  # and it is missing, which reading the entries reports
    depth = len({match[1] for key in tensors if (match := re.match(key_pattern(names.block), key))})
    gate = names.gated[0] if names.gated and shapes.in_blocks(names.gated[0][0], "weight") else ()
    mlp_width = shapes.outputs(names.block.format(0) + (gate[0] if gate else names.up), "(D, M)", "(M, D)")
    mlp_width //= 2 if len(gate) == 1 else 1
    if names.flax:
        num_heads = _flax_heads(tensors, names, width)
    else:
        num_heads = hints.num_heads or _usual_heads(width, depth, mlp_width, bool(gate))
    has_registers = names.registers is not None and names.registers in tensors
    cell = patch_size * stem_reduction(stem)
    return ViTConfig(
        registers=shapes.of(names.registers or "", "(1, R, D)")[1] if has_registers else 0,
        width=width,
        depth=depth,
        mlp_width=mlp_width,
        num_heads=num_heads,
        patch_size=patch_size,
        image_size=_image_size(hints.image_size, cell, names.positions, rows, has_token),
        num_classes=shapes.outputs(names.head, "(D, K)", "(K, D)") if shapes.has_layer(names.head) else 0,
        representation=shapes.has_layer(names.representation),
        gelu=hints.gelu,
        pool="map" if has_pool else hints.pool if has_token else "gap",
        positions="learned" if rows is not None else hints.without_table or "none",
        stem=stem,
        layer_norm_eps=hints.layer_norm_eps,
        kernel=hints.kernel,
        swiglu=bool(gate),
        rope_base=hints.rope_base,
        rope_side=hints.rope_side,
        pixels=hints.pixels or Pixels.of_unknown(num_channels),
        **({} if names.flax else _find_parts(shapes, names, hints, width)),
    )


def _find_parts(shapes: _Shapes, names: Names, hints: Hints, width: int) -> dict[str, Any]:
    """The fields of ViTConfig about parts that the paper's ViT has or lacks in all blocks."""
    biases: Literal["qkv", "qv", "none"] = "none"
    if shapes.in_blocks(names.qkv[0], "bias"):
        biases = "qkv" if len(names.qkv) == 1 or shapes.in_blocks(names.qkv[1], "bias") else "qv"
    first_bias = shapes.tensors.get(part_key(names.block.format(0) + names.qkv[0], "bias"))
    if len(names.qkv) == 1 and first_bias is not None and first_bias.shape == (2 * width,):
        biases = "qv"
    has_scale = names.layer_scale is not None and shapes.in_blocks(names.layer_scale[0], "")
    return {
        "layer_scale": hints.layer_scale if has_scale else None,
        "qkv_bias": biases,
        "out_bias": shapes.in_blocks(names.out, "bias"),
        "mlp_bias": shapes.in_blocks(names.down, "bias")
        or bool(names.gated and shapes.in_blocks(names.gated[1], "bias")),
        "embedding_norm": shapes.has_layer(names.embedding_norm),
        "qk_norm": names.qk_norm is not None and shapes.in_blocks(names.qk_norm[0], "weight"),
        "pool_norm": shapes.has_layer(names.pool_norm),
        "class_norm": shapes.has_layer(names.class_norm),
    }


def _flax_heads(tensors: Tensors, names: Names, width: int) -> int:
    """Number of heads in a Flax file, where they are an axis of the query's kernel."""
    query = f"{names.block.format(0)}{names.qkv[0]}/kernel"
    if query not in tensors or tensors[query].ndim != 3 or math.prod(tensors[query].shape[1:]) != width:
        found = f"is {tuple(tensors[query].shape)}" if query in tensors else "is missing"
        raise UserError(f'"{query}" should be (D, H, D/H) with D = {width}, but {found}.')
    return tensors[query].shape[1]


# (width, depth, MLP width) of published models without a name of ours -> number of heads: of DINOv2 g, DINOv3 S+, H+ and 7B, EVA-02,
# whose MLPs are gated; of timm's and of SigLIP 2.
_GATED_HEADS = {
    (1536, 40, 4096): 24,
    (384, 12, 1536): 6,
    (1280, 32, 5120): 20,
    (4096, 40, 8192): 32,
    (192, 12, 512): 3,
    (384, 12, 1024): 6,
}
_OTHER_HEADS = {
    (256, 10, 1024): 4,
    (256, 14, 1280): 4,
    (320, 14, 1792): 5,
    (384, 36, 1536): 6,
    (512, 20, 2048): 8,
    (640, 12, 2560): 10,
    (832, 21, 2176): 13,
    (896, 12, 3584): 14,
    (896, 18, 2304): 14,
    (1536, 40, 6144): 16,
}


def _usual_heads(width: int, depth: int, mlp_width: int, gated: bool) -> int:
    """Number of heads of the named size with these numbers: torch's tensors do not tell it."""
    known = _OTHER_HEADS | {variant[:3]: variant.num_heads for variant in VARIANTS.values()}
    if heads := (_GATED_HEADS if gated else known).get((width, depth, mlp_width)):
        return heads
    raise UserError(
        f"its tensors do not tell the number of heads, and width {width}, depth {depth}, MLP {mlp_width} is not a known "
        'size. Put a config.json beside model.safetensors: {"model_args": {"num_heads": ...}}.'
    )


def _image_size(
    hint: tuple[int, int] | None, cell: int, table: str, rows: int | None, has_token: bool
) -> tuple[int, int]:
    """(height, width) in pixels: the hint if it fits the table of positions, else that of a square grid.

    cell: side of a patch in pixels. table: its key, for errors. rows: its number of rows; None: no table, 224 without a hint.
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
