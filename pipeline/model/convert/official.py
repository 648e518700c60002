"""Reads the official `.npz` weights. Their layouts:

    released     google-research/vision_transformer, gs://vit_models: ViT and hybrids, a block's modules in one sequence
    linen        the same with modules numbered by class, as its code holds them in memory
    big_vision   google-research/big_vision: no position of the class token, attention pooling, blocks perhaps
                 stacked in one array, and a prefix: params/, params/img/ or opt/target/
    bit          google-research/big_transfer

The keys are in tables.toml. The defaults of these projects: tanh GELU, LayerNorm eps 1e-6.
"""

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.architecture.config import Positions
from pipeline.base import npz
from pipeline.base.words import counted
from pipeline.model.convert.layouts import NAMES, State, Weights, read_model
from pipeline.model.convert.reading import find_bit, find_config, is_bit
from pipeline.model.files import StrPath, naming


def read_npz(path: StrPath) -> Weights:
    """Read official weights, with the configuration found in their tensors.

    Positions must be of a square grid. The image size of a BiT, and of big_vision's sine-cosine positions, is in no
    file: 224. Raises UserError naming the path, the key, and the expected and found shapes.
    """
    arrays = npz.read_arrays(Path(path), str(path))
    with naming(path):
        tensors, notes = _with_known_names({key: _tensor(array) for key, array in arrays.items()})
        if is_bit(tensors):
            notes.append("BiT's files do not tell the image size: taken as 224")
            bit, names = find_bit(tensors, (224, 224))
            return Weights(bit, read_model(tensors, bit, names), {}, notes)
        parts = {part for key in tensors for part in key.split("/")}
        layout = "linen" if "Transformer/posembed_input/pos_embedding" in tensors else "big_vision"
        if parts & {"MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"}:
            layout = "released"
        table = tensors.get("pos_embedding")
        if layout == "big_vision" and "cls" in tensors and table is not None and table.ndim == 3:
            # big_vision adds positions before the class token is put in front.
            tensors["pos_embedding"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
            notes.append("the class token has no position in the file: zeros")
        without_table: Positions | None = "sincos2d" if layout == "big_vision" else None
        config = find_config(tensors, NAMES[layout], {}, without_table)
        if config.positions == "sincos2d":
            notes.append("no positions in the file: sine-cosine, as big_vision's; image size taken as 224")
        return Weights(config, read_model(tensors, config, NAMES[layout]), {}, notes)


def _with_known_names(tensors: State) -> tuple[State, list[str]]:
    """(the tensors under the keys of tables.toml, notes)."""
    notes = []
    prefix = next((p for p in ("params/img/", "params/", "opt/target/") if f"{p}embedding/kernel" in tensors), "")
    if prefix:
        kept = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if others := len(tensors) - len(kept):
            notes.append(f"{counted(others, 'array')} outside of {prefix} left out: not part of this model")
        tensors = kept
    # Some BiT files number their convolutions.
    tensors = {re.sub(r"(standardized_conv2d)_\d+", r"\1", key): tensor for key, tensor in tensors.items()}
    # In older files, norms also have axes for the batch and the image.
    for key, tensor in tensors.items():
        if key.rpartition("/")[2] in ("scale", "bias", "gamma", "beta") and tensor.shape[:-1] == (1, 1, 1):
            tensors[key] = tensor.flatten()
    stacked = "Transformer/encoderblock/"
    for key in [key for key in tensors if key.startswith(stacked)]:
        for i, tensor in enumerate(tensors.pop(key)):
            tensors[f"Transformer/encoderblock_{i}/{key.removeprefix(stacked)}"] = tensor
    return tensors, notes


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.dtype("V2"):  # bfloat16, which numpy does not have
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
