"""Collective operations for a loss that compares samples of all ranks, and BatchNorm over all ranks with a projector
that has it. On one rank the operations do nothing.

DeepSpeed averages gradients over ranks, so a loss that is a mean over this rank's samples, computed with `gathered`
features, has the gradient of the mean over all of them.

Shapes: B samples of this rank, R rows, W width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

_EPS = 1e-5  # Of BatchNorm, as torch's.
_meta_ranks = 1


@contextmanager
def on_meta(count: int) -> Iterator[None]:
    """Give tensors on the meta device, which no rank sends, the shapes that they have on so many ranks."""
    global _meta_ranks
    kept, _meta_ranks = _meta_ranks, count
    try:
        yield
    finally:
        _meta_ranks = kept


def summed(tensor: Tensor) -> Tensor:
    """Returns the sum over ranks, without a gradient. Collective."""
    return _reduced(tensor, distributed.ReduceOp.SUM)


def largest(tensor: Tensor) -> Tensor:
    """Returns the maximum over ranks of each element, without a gradient. Collective."""
    return _reduced(tensor, distributed.ReduceOp.MAX)


def _reduced(tensor: Tensor, operation: Any) -> Tensor:
    found = tensor.detach().clone()
    if _several_ranks() and not found.is_meta:
        distributed.all_reduce(found, operation)
    return found


def total(tensor: Tensor) -> Tensor:
    """Returns the sum over ranks, with a gradient to every rank: that of the sum of the losses of all ranks.
    Collective.

    DeepSpeed divides it by the number of ranks, so the gradient of a loss that is the same on all ranks is as in one
    process.
    """
    return _Total.apply(tensor) if _several_ranks() else tensor


def gathered(tensor: Tensor) -> Tensor:
    """(B, ...) of this rank -> (ranks * B, ...), in order of rank, with a gradient to every rank. Collective.

    B must be the same on all ranks.
    """
    if tensor.is_meta:
        return torch.cat([tensor] * _meta_ranks)
    return _Gather.apply(tensor) if _several_ranks() else tensor


def own_rows(tensor: Tensor) -> Tensor:
    """(B, ...) of this rank -> int64 (B,): the numbers of its rows in what `gathered` returns."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return rank * len(tensor) + torch.arange(len(tensor), device=tensor.device)


def _several_ranks() -> bool:
    return distributed.is_initialized() and distributed.get_world_size() > 1


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return summed(tensor.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient.contiguous())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient).chunk(distributed.get_world_size())[distributed.get_rank()]


class StepNorm(nn.Module):
    """BatchNorm with the statistics of this step's rows on all ranks, and no running ones: heads are only trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        """(R, W), bool (R,): the rows that count -> (R, W). Computed in float32. Collective."""
        rows, kept = x.float(), counted.float()
        number = summed(kept.sum()).clamp(min=1)
        centred = rows - total(kept @ rows) / number
        variance = total(kept @ centred.square()) / number
        return (centred * (variance + _EPS).rsqrt()).to(x.dtype) * self.weight + self.bias


class Projector(nn.Module):
    """An MLP that ends in a dense layer: dense, BatchNorm, ReLU for each hidden one. (R, W) -> (R, `width`)."""

    def __init__(self, inputs: int, hidden: int, width: int, hidden_layers: int = 2) -> None:
        super().__init__()
        widths = [inputs, *[hidden] * hidden_layers]
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in pairwise(widths)])
        self.norms = nn.ModuleList([StepNorm(hidden) for _ in self.layers])
        self.last = nn.Linear(hidden, width)

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        """counted: bool (R,), the rows that statistics are of."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x), counted))
        return self.last(x)
