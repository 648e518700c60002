"""Collective operations for a loss that compares samples of all ranks. On one rank they do nothing.

DeepSpeed averages gradients over ranks, so a loss that is a mean over this rank's samples, computed with `gathered`
features, has the gradient of the mean over all of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

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
