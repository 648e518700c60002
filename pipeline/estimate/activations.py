"""Counts the bytes that a forward pass saves for the backward pass, on the meta device: no arithmetic, no memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeline.model import Config, Model, ResNetConfig, VisionTransformer, build
from pipeline.objectives import on_meta
from pipeline.objectives.objective import Objective
from pipeline.objectives.on_meta import shallow
from pipeline.objectives.parameters.freeze import NOTHING, freeze, num_frozen_blocks
from pipeline.settings.run import RunConfig

_COUNTED = (8, 16, 32)  # images


@dataclass(frozen=True)
class Saved:
    """Bytes saved for a micro-batch.

    total: by the whole model. block: by the largest block (or ResNet unit), without recomputation. largest: the largest
    tensor that the last block saves, without recomputation. outside: the largest tensor that no block saves, only for an objective.
    """

    total: int
    block: int
    largest: int
    outside: int = 0


def saved_bytes(
    config: Config, micro_batch: int, dtype: torch.dtype, checkpointing: bool, frozen: str = NOTHING
) -> Saved:
    """Bytes saved by the forward pass of `micro_batch` images, without the images themselves and without parameters.

    frozen: as `train.freeze`.
    """
    # Some tensors do not grow with the number of images: the standardised kernels of a ResNet.
    one, two = (_count_all(config, images, dtype, checkpointing, frozen) for images in (1, 2))
    without_checkpointing = _count_all(config, 1, dtype, False, frozen)
    more = micro_batch - 1
    return Saved(
        one.total + more * (two.total - one.total),
        without_checkpointing.block * micro_batch,
        without_checkpointing.largest * micro_batch,
    )


def _count_all(config: Config, images: int, dtype: torch.dtype, checkpointing: bool, frozen: str = NOTHING) -> Saved:
    # Models of few blocks do not have so many to freeze.
    if num_frozen_blocks(frozen) is not None or not (found := shallow(config)):
        return _count(config, images, dtype, checkpointing, frozen)
    *models, deeper = found
    two, three = (_count(model, images, dtype, checkpointing, frozen) for model in models)
    return Saved(two.total + deeper * (three.total - two.total), three.block, three.largest)


@cache
def _count(config: Config, images: int, dtype: torch.dtype, checkpointing: bool, frozen: str = NOTHING) -> Saved:
    with torch.device("meta"):
        model = build(config).to(dtype)
    freeze(model, frozen)
    pixels, *masks = meta_inputs(config, images, dtype)
    model.activation_checkpointing = checkpointing
    found = _saved_by(model, lambda: model(pixels, *masks), [*model.parameters(), pixels])
    return replace(found, outside=0)


def of_many(count: Callable[[int], Saved], images: int) -> Saved:
    """What `count` gives for a number of images; for more than 32, extrapolated by the quadratic through three counts.

    A count takes a third of a second for a large model, and a loss that compares images of a batch is no linear function of
    their number.
    """
    if images <= _COUNTED[-1]:
        return count(images)
    found = [count(number) for number in _COUNTED]

    def at(values: list[int]) -> int:
        return round(float(np.polynomial.Polynomial.fit(_COUNTED, values, 2)(images)))

    return Saved(*(at([getattr(one, field.name) for one in found]) for field in fields(Saved)))


@on_meta.remembered
def saved_by_loss(
    cls: type[Objective],
    config: RunConfig,
    model: Config,
    images: int,
    dtype: torch.dtype,
    checkpointing: bool,
    ranks: int,
) -> Saved:
    """Bytes saved by an objective's loss of `images` images on one of `ranks` ranks, without inputs, parameters and buffers.

    model: the backbone's.
    """

    def count(one: Config, again: bool) -> Saved:
        objective = on_meta.make(cls, config, one, dtype)
        objective.backbone.activation_checkpointing = again
        read = on_meta.inputs(objective, config, images, dtype)
        ours = [*objective.parameters(), *objective.buffers(), *read.views, *read.facts.values()]
        return _saved_by(objective.backbone, lambda: on_meta.loss(objective, read, ranks), ours)

    if not (found := shallow(model)):
        counted = count(model, checkpointing)
        total, plain = counted.total, count(model, False) if checkpointing else counted
    else:
        *models, deeper = found
        two, three = (count(one, checkpointing) for one in models)
        total, plain = (
            two.total + deeper * (three.total - two.total),
            count(models[1], False) if checkpointing else three,
        )
    return replace(plain, total=total)


def _saved_by(model: Model, forward: Callable[[], Tensor], left_out: Iterable[Tensor]) -> Saved:
    """Counts what `forward`, which calls the model, saves beside the tensors that are left out."""
    ours = {tensor.untyped_storage()._cdata for tensor in left_out}
    kept: dict[int, torch.UntypedStorage] = {}
    of_blocks: set[int] = set()
    before: set[int] = set()
    block = largest = 0

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in ours:
            kept[storage._cdata] = storage
        return tensor

    def enter(*_: Any) -> None:
        nonlocal before
        before = set(kept)

    def leave(*_: Any) -> None:
        nonlocal block, largest
        of_blocks.update(kept.keys() - before)
        added = [kept[key].nbytes() for key in kept.keys() - before] or [0]
        block, largest = max(block, sum(added)), max(added)

    for module in model.blocks if isinstance(model, VisionTransformer) else model.units:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    with OperatorsOfAGpu(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward()
    assert out.is_meta
    outside = max((kept[key].nbytes() for key in kept.keys() - of_blocks), default=0)
    return Saved(sum(storage.nbytes() for storage in kept.values()), block, largest, outside)


def meta_inputs(config: Config, images: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of a model on the meta device: pixels, and for masked patch prediction the masks."""
    with torch.device("meta"):
        pixels = torch.empty(images, 3, *config.image_size, dtype=dtype)
        if isinstance(config, ResNetConfig) or not config.masked:
            return [pixels]
        rows, columns = config.grid
        masks = [torch.empty(images, count, dtype=torch.int64) for count in (rows * columns, config.num_corrupted)]
    return [pixels, *masks]


class OperatorsOfAGpu(TorchFunctionMode):
    """Attention and dropout that save what a GPU's fused kernels save; the meta device would use unfused operators."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args, kwargs.get("attn_mask"))
        if func is F.dropout:
            is_on = kwargs["training"] and kwargs["p"] > 0
            return torch.native_dropout(args[0], kwargs["p"], True)[0] if is_on else args[0]
        return func(*args, **kwargs)


class _FusedAttention(torch.autograd.Function):
    """Saves its inputs, its output and one fp32 number per row of the N x N matrix, but not the matrix."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None) -> Tensor:
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), logits)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _, logits = ctx.saved_tensors
        return *(torch.empty_like(tensor) for tensor in (q, k, v)), None if logits is None else torch.empty_like(logits)
