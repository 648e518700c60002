"""What is trained of a backbone that others trained: frozen parameters (`train.freeze`), the depth of each, and LoRA.

A frozen parameter gets no gradient and no optimizer state; checkpoints hold its value as they hold buffers.

LoRA (Hu et al., arXiv 2106.09685) gives layers of a frozen backbone a trained change of low rank:

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
from pipeline.model import Model, ViTConfig
from pipeline.model.layers import ScaledDense

NOTHING, FREEZE_BACKBONE, ENCODER = "none", "backbone", "encoder"


def freeze(backbone: Model, what: str) -> None:
    """Freeze all but the head (`what` = "backbone"), all but the attention pool and the head ("encoder"), or what comes
    before the first block and the first n ("n blocks", or "all but n blocks", the last).

    "none" freezes nothing. Raises UserError for a number of blocks, or an attention pool, that the model does not have.
    """
    if what == NOTHING:
        return
    depth, top = depths(backbone)
    blocks = num_frozen_blocks(what, top - 1)
    if blocks is not None and not (isinstance(backbone.config, ViTConfig) and 0 <= blocks < top - 1):
        raise UserError(f"train.freeze = {what} must leave at least one of the {top - 1} blocks of a ViT to train.")
    if what == ENCODER and not (isinstance(backbone.config, ViTConfig) and backbone.config.pools_by_attention):
        raise UserError(
            "train.freeze = encoder trains the attention pool and the head, and the model has no attention pool. Use "
            "train.freeze=backbone to train the head alone, or init.attentive_pool=true for a new pool."
        )
    trained = ("pool.", "head.") if what == ENCODER else ("head.",)
    for name, parameter in backbone.named_parameters():
        is_frozen = not name.startswith(trained) if blocks is None else depth[name] <= blocks
        parameter.requires_grad_(not is_frozen)


def num_frozen_blocks(what: str, num_blocks: int) -> int | None:
    """How many of a model's first blocks a value of `train.freeze` freezes; None if it names none."""
    if what in (NOTHING, FREEZE_BACKBONE, ENCODER):
        return None
    number = int(what.split()[-2])
    return num_blocks - number if what.startswith("all but") else number


def depths(backbone: Model, prefix: str = "") -> tuple[dict[str, int], int]:
    """Returns (depth of the parameters by name, largest depth), as BEiT and MAE count them for layer decay.

    0 is what comes before the first block, n block number n, and the largest what comes after the last block.
    prefix: put before each name.
    """
    blocks = "blocks" if hasattr(backbone, "blocks") else "units"
    top = len(getattr(backbone, blocks)) + 1
    children = [name for name, _ in backbone.named_children()]  # In the order of computation.
    after = children[children.index(blocks) + 1 :]
    found = {}
    for name, _ in backbone.named_parameters():
        first, *rest = name.split(".")
        found[f"{prefix}{name}"] = int(rest[0]) + 1 if first == blocks else top if first in after else 0
    return found, top


# ---------------------------------------------------------------------- LoRA
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
