"""LoRA (Hu et al., arXiv 2106.09685): layers of a frozen backbone, each with a trained change of low rank.

    y = W x + b + (alpha / r) U D x         D: r x inputs, random at first; U: outputs x r, zero at first

The factors are not part of the backbone: an objective holds them, and hooks add what they compute.
`checkpoint/writer.py` adds their product to W in the weights that are scored, exported and fine-tuned.
"""

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.checkpoint.sharded_tensors import stored_layer
from pipeline.model import Model
from pipeline.model.parts import ScaledDense


class Factors(nn.Module):
    """The change of a dense layer: (..., inputs) -> (..., outputs)."""

    scale: Tensor

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.register_buffer("scale", torch.tensor(alpha / rank))
        bound = layer.in_features**-0.5  # As in the authors' code, loralib.
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.scale * F.linear(x, self.down), self.up)


def _with_factors(factors: Factors, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    change = factors(inputs[0])
    return output + (change * layer.scale if isinstance(layer, ScaledDense) else change)


def new_factors(backbone: Model, layers: list[str], rank: int, alpha: float) -> nn.ModuleDict:
    """Factors of layers of the backbone's blocks, by layer; drawn from torch's generator.

    layers: the last part of their names, such as "qkv". Raises UserError for one that no block has.
    """
    dense = {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    known = sorted({name.rpartition(".")[2] for name in dense})
    if unknown := [layer for layer in layers if layer not in known]:
        has = f"are {', '.join(known)}" if known else "do not exist: it is not a ViT"
        raise UserError(
            f"train.lora_layers = [{', '.join(layers)}]: {unknown[0]} is not a dense layer of the model's blocks, which"
            f" {has}."
        )
    found = nn.ModuleDict()
    for name, layer in dense.items():
        if name.rpartition(".")[2] in layers:
            found[stored_layer(name)] = Factors(layer, rank, alpha)
    return found


def add_factors(backbone: nn.Module, factors: nn.ModuleDict) -> None:
    """Let the layers of a backbone compute with their factors, those of `new_factors`."""
    for name, layer in backbone.named_modules():
        if (stored := stored_layer(name)) in factors:
            layer.register_forward_hook(partial(_with_factors, cast(Factors, factors[stored])))
