"""Weights of MAE: the decoder of facebookresearch/mae and of Hugging Face's ViTMAEForPreTraining.

Its names here are those of `pipeline/objectives/mae.py`. The encoder is a ViT with timm's or Hugging Face's names.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.architecture.config import ViTConfig
from pipeline.base.errors import UserError
from pipeline.model.convert.entries import Entries
from pipeline.model.convert.names import NAMES
from pipeline.model.position import sincos2d

# Beginnings of the names of a decoder's tensors, in files and since transformers 5 in memory.
_DECODER = ("decoder", "mask_token")
_BLOCKS = {"timm": "decoder_blocks.", "huggingface": "decoder_encoder.layer."}
_OLDER = re.compile(r"^decoder_layers\.(\d+)\.(?=.*(?:layernorm|attention\.attention|attention\.output|dense))")


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """-> (tensors of the encoder, those of the decoder without "decoder." in front); none of a decoder in other files."""
    if not any(key.removeprefix("decoder.").startswith("decoder_embed.") for key in tensors):
        return dict(tensors), {}
    decoder = {key: tensor for key, tensor in tensors.items() if key.startswith(_DECODER)}
    encoder = {key: tensor for key, tensor in tensors.items() if key not in decoder}
    named = {_OLDER.sub(r"decoder_encoder.layer.\1.", k.removeprefix("decoder.")): t for k, t in decoder.items()}
    return encoder, named


def has_fixed_positions(config: ViTConfig, table: Tensor) -> bool:
    """Whether a table (1, [1 +] N, D) holds the fixed positions of MAE and I-JEPA, which tells their weights from other ViTs."""
    if config.width % 4:
        return False
    expected = sincos2d(ViTConfig(**{**vars(config), "positions": "sincos2d_mae"}))
    return table.shape == expected.shape and bool(torch.allclose(table.float(), expected, atol=1e-4))


def read_decoder(tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The decoder in the names of our objective, float32. config: of the encoder. Raises UserError for a missing or odd tensor."""
    kind = "timm" if any(key.startswith("decoder_blocks.") for key in tensors) else "huggingface"
    depth = len({match[1] for key in tensors if (match := re.match(re.escape(_BLOCKS[kind]) + r"(\d+)\.", key))})
    embed = tensors.get("decoder_embed.weight")
    if embed is None or embed.ndim != 2 or not depth:
        raise UserError('its decoder has no "decoder_embed.weight" (E, D) or no blocks; is this a whole MAE?')
    up = NAMES[kind].up
    mlp = tensors.get(f"{_BLOCKS[kind]}0.{up}.weight")
    return decoder_entries(config, len(embed), depth, 0 if mlp is None else len(mlp), kind).read(tensors)


def write_decoder(state: Mapping[str, Tensor], config: ViTConfig, kind: str) -> dict[str, Tensor]:
    """The decoder of our objective in the names of kind "timm" (facebookresearch/mae) or "huggingface" (without "decoder.")."""
    depth = len({name.split(".")[1] for name in state if name.startswith("decoder_blocks.")})
    sizes = len(state["decoder_embed.weight"]), depth, len(state["decoder_blocks.0.mlp.up.weight"])
    return decoder_entries(config, *sizes, kind).write(dict(state))


def decoder_entries(config: ViTConfig, width: int, depth: int, mlp_width: int, kind: str) -> Entries:
    """Every tensor of a decoder of this width, in a file with the names of `kind`."""
    entries, names, E, M = Entries(flax=False), NAMES[kind], (width,), (mlp_width,)
    entries.dense("decoder_embed", "decoder_embed", (config.width,), E)
    entries.table("mask_token", "mask_token", 1, 1, *E)
    entries.table("decoder_pos_embed", "decoder_positions", 1, config.num_positions, *E)
    for i in range(depth):
        key, name = f"{_BLOCKS[kind]}{i}.", f"decoder_blocks.{i}"
        entries.norm(key + names.attention_norm, f"{name}.attention_norm", width)
        for part in names.qkv:
            entries.dense(key + part, f"{name}.attention.qkv", E, (3 * width,) if len(names.qkv) == 1 else E)
        entries.dense(key + names.out, f"{name}.attention.out", E, E)
        entries.norm(key + names.mlp_norm, f"{name}.mlp_norm", width)
        entries.dense(key + names.up, f"{name}.mlp.up", E, M)
        entries.dense(key + names.down, f"{name}.mlp.down", M, E)
    entries.norm("decoder_norm", "decoder_norm", width)
    entries.dense("decoder_pred", "decoder_pred", E, (3 * config.patch_size**2,))
    return entries
