"""The official `.npz` weights, in and out (google-research/vision_transformer; gs://vit_models).

The files name their tensors in two ways. Flax numbered the modules of a block in one row ("pre-Linen", every released
file) and later by class ("Linen", what the official code holds in memory):

    pre-Linen   LayerNorm_0   MultiHeadDotProductAttention_1   LayerNorm_2   MlpBlock_3
    Linen       LayerNorm_0   MultiHeadDotProductAttention_0   LayerNorm_1   MlpBlock_0

Flax stores a dense kernel as (inputs, outputs), attention with its heads apart, and a convolution as HWIO; torch stores
(outputs, inputs), and OIHW.
"""

import math
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model.variants import Gelu, ViTConfig
from pipeline.model.vit import VisionTransformer

Layout = Literal["released", "linen"]
Arrays = Mapping[str, np.ndarray]

# What a block's four modules are called: norm before attention, attention, norm before the MLP, MLP.
BLOCK_MODULES = {
    "released": ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
}


class Entry(NamedTuple):
    """One array of the file, and where it lives in our state."""

    key: str
    shape: tuple[int, ...]  # in the file
    name: str  # of our parameter; query, key and value share one, in this order
    torch_shape: tuple[int, ...]  # of this array's part of it


def read_npz(path: str | os.PathLike[str], gelu: Gelu = "tanh") -> tuple[ViTConfig, dict[str, Tensor]]:
    """Read official weights: -> (configuration found from the tensors, fp32 state of VisionTransformer).

    Both key layouts, with or without pre_logits and head. Positions must be of a square grid. gelu: "tanh" is what the
    official code computes. Raises UserError naming the path, the key, and the expected and found shapes.
    """
    arrays = _read_arrays(path)
    try:
        return from_npz(arrays, gelu)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def from_npz(arrays: Arrays, gelu: Gelu = "tanh") -> tuple[ViTConfig, dict[str, Tensor]]:
    """As read_npz, from arrays by key. The tensors returned share no memory with the arrays."""
    released_only = set(BLOCK_MODULES["released"]) - set(BLOCK_MODULES["linen"])
    is_released = any(part in released_only for key in arrays for part in key.split("/"))
    layout: Layout = "released" if is_released else "linen"
    config = _find_config(arrays, layout, gelu)
    entries = _entries(config, layout)
    _check(arrays, entries)

    parts: dict[str, list[np.ndarray]] = {}
    for entry in entries:
        parts.setdefault(entry.name, []).append(_to_torch_order(arrays[entry.key], entry.torch_shape))
    # np.concatenate always copies, also a single part, into the order that torch wants.
    return config, {name: torch.from_numpy(np.concatenate(p).astype(np.float32)) for name, p in parts.items()}


def to_npz(model: VisionTransformer, layout: Layout = "released") -> dict[str, np.ndarray]:
    """The model's weights as the official files hold them: key -> fp32 array, ready for np.savez(path, **arrays).

    Raises UserError for a model that those files cannot hold.
    """
    if model.config != _plain(model.config):
        raise UserError(
            "only a plain ViT can be written as .npz: a class token, learned positions at the stem, patches side by side."
        )
    state = {name: tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}
    arrays, row = {}, 0
    for entry in _entries(model.config, layout):
        whole = state[entry.name]
        part = whole[row : row + entry.torch_shape[0]]
        arrays[entry.key] = _to_flax_order(part, entry.shape)
        row = (row + entry.torch_shape[0]) % len(whole)  # the next array continues this parameter or starts another
    return arrays


def _plain(config: ViTConfig) -> ViTConfig:
    return replace(
        config, pool="token", positions="learned", positions_at="stem", patch_stride=None, stem=None, axial=False
    )


def _to_torch_order(array: np.ndarray, torch_shape: tuple[int, ...]) -> np.ndarray:
    if len(torch_shape) == 4:  # convolution: (P, P, C, D) -> (D, C, P, P)
        return array.transpose(3, 2, 0, 1)
    if len(torch_shape) == 2:  # dense: (in, out) -> (out, in), where either may be apart as (H, D/H)
        outputs, inputs = torch_shape
        return array.reshape(inputs, outputs).T
    return array.reshape(torch_shape)


def _to_flax_order(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if part.ndim == 4:
        part = part.transpose(2, 3, 1, 0)
    elif part.ndim == 2:
        part = part.T
    return np.ascontiguousarray(part.reshape(shape))


def _entries(config: ViTConfig, layout: Layout) -> list[Entry]:
    """Every array that a file of this architecture holds; no more, no less."""
    D, M, H, P, K = config.width, config.mlp_width, config.num_heads, config.patch_size, config.num_classes
    heads = (H, D // H)
    entries = []

    def layer_norm(key: str, name: str) -> None:
        entries.append(Entry(f"{key}/scale", (D,), f"{name}.weight", (D,)))
        entries.append(Entry(f"{key}/bias", (D,), f"{name}.bias", (D,)))

    def dense(key: str, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        num_inputs, num_outputs = math.prod(inputs), math.prod(outputs)
        entries.append(Entry(f"{key}/kernel", inputs + outputs, f"{name}.weight", (num_outputs, num_inputs)))
        entries.append(Entry(f"{key}/bias", outputs, f"{name}.bias", (num_outputs,)))

    entries.append(Entry("cls", (1, 1, D), "class_token", (1, 1, D)))
    entries.append(Entry("embedding/kernel", (P, P, 3, D), "patch_embedding.weight", (D, 3, P, P)))
    entries.append(Entry("embedding/bias", (D,), "patch_embedding.bias", (D,)))
    table = (1, config.num_tokens, D)
    entries.append(Entry("Transformer/posembed_input/pos_embedding", table, "positions", table))

    norm_1, attention, norm_2, mlp = BLOCK_MODULES[layout]
    for i in range(config.depth):
        key, name = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        layer_norm(f"{key}/{norm_1}", f"{name}.attention_norm")
        # Kernels of q, k and v in a row, then their biases: to_npz cuts a fused parameter in the order of the entries.
        for suffix, inputs, part in (("kernel", (D,), "weight"), ("bias", (), "bias")):
            for projection in ("query", "key", "value"):
                full_key = f"{key}/{attention}/{projection}/{suffix}"
                entries.append(Entry(full_key, inputs + heads, f"{name}.attention.qkv.{part}", (D, *inputs)))
        dense(f"{key}/{attention}/out", f"{name}.attention.out", heads, (D,))
        layer_norm(f"{key}/{norm_2}", f"{name}.mlp_norm")
        dense(f"{key}/{mlp}/Dense_0", f"{name}.mlp.up", (D,), (M,))
        dense(f"{key}/{mlp}/Dense_1", f"{name}.mlp.down", (M,), (D,))

    layer_norm("Transformer/encoder_norm", "norm")
    if config.representation:
        dense("pre_logits", "representation", (D,), (D,))
    if K:
        dense("head", "head", (D,), (K,))
    return entries


def _find_config(arrays: Arrays, layout: Layout, gelu: Gelu) -> ViTConfig:
    """Sizes from the tensors. What they leave contradictory, _check finds afterwards."""
    if any(key.startswith(("conv_root/", "resnet/")) for key in arrays):
        raise UserError("holds a ResNet or a hybrid; only plain ViT can be read.")
    _, attention, _, mlp = BLOCK_MODULES[layout]

    def shape(key: str, pattern: str) -> tuple[int, ...]:
        if key not in arrays:
            raise UserError(f'"{key}" {pattern} is missing; is this a ViT of google-research/vision_transformer?')
        if arrays[key].ndim != len(pattern.split(",")):
            raise UserError(f'"{key}" should be {pattern}, but is {arrays[key].shape}.')
        return arrays[key].shape

    patch_size, _, _, width = shape("embedding/kernel", "(P, P, 3, D)")
    _, num_tokens, _ = shape("Transformer/posembed_input/pos_embedding", "(1, 1 + N, D)")
    side = math.isqrt(num_tokens - 1) if num_tokens > 1 else 0
    if side == 0 or side * side != num_tokens - 1:
        raise UserError(
            f'"Transformer/posembed_input/pos_embedding" has {num_tokens} rows, which is not a class token '
            "and a square grid of patches."
        )
    blocks = {key.split("/")[1] for key in arrays if key.startswith("Transformer/encoderblock_")}
    query = f"Transformer/encoderblock_0/{attention}/query/kernel"
    _, num_heads, head_dim = shape(query, "(D, H, D/H)")
    if num_heads * head_dim != width:
        raise UserError(f'"{query}" should be (D, H, D/H) with D = {width}, but is {arrays[query].shape}.')
    _, mlp_width = shape(f"Transformer/encoderblock_0/{mlp}/Dense_0/kernel", "(D, M)")
    has_head = "head/kernel" in arrays or "head/bias" in arrays
    return ViTConfig(
        width=width,
        depth=len(blocks),
        mlp_width=mlp_width,
        num_heads=num_heads,
        patch_size=patch_size,
        image_size=(side * patch_size, side * patch_size),
        num_classes=shape("head/kernel", "(D, K)")[1] if has_head else 0,
        representation="pre_logits/kernel" in arrays or "pre_logits/bias" in arrays,
        gelu=gelu,
    )


def _check(arrays: Arrays, entries: list[Entry]) -> None:
    for entry in entries:
        if entry.key not in arrays:
            raise UserError(f'"{entry.key}" {entry.shape} is missing.')
        array = arrays[entry.key]
        if array.shape != entry.shape:
            raise UserError(f'"{entry.key}" should be {entry.shape}, but is {array.shape}.')
        if array.dtype.kind != "f":
            raise UserError(f'"{entry.key}" should hold floats, but holds {array.dtype}.')
        if not np.isfinite(array).all():
            raise UserError(f'"{entry.key}" {entry.shape} holds {np.count_nonzero(~np.isfinite(array))} NaN or Inf.')
    unexpected = sorted(arrays.keys() - {entry.key for entry in entries})
    if unexpected:
        found = arrays[unexpected[0]].shape
        raise UserError(f'"{unexpected[0]}" {found} is not part of this ViT ({len(unexpected)} such).')


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise UserError(f"{path}: holds one array, not an .npz of named arrays.")
        with file:
            return {key: file[key] for key in file.files}
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file.") from error
    # A damaged zip can raise any of these, depending on the byte that is wrong; numpy raises ValueError for pickles.
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, KeyError, NotImplementedError) as error:
        raise UserError(f"{path}: not a readable .npz ({error}). Fetch it again and compare its size.") from error
