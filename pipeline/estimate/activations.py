"""Counts the bytes that a forward pass saves for the backward pass, on the meta device: no arithmetic, no memory."""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.model import Config, Model, VisionTransformer, ViTConfig, build
from pipeline.objectives import on_meta
from pipeline.objectives.objective import BACKBONE, TEACHER, Objective
from pipeline.objectives.parameters.trained import NOTHING, freeze
from pipeline.objectives.parts import across_ranks
from pipeline.settings.run import RunConfig

_COUNTED = (8, 16, 32)  # images


class Use(NamedTuple):
    """Bytes around one run through a model's blocks.

    until: saved from the beginning of the forward pass to the end of its last block: what is left when the backward
    pass arrives there.
    block: saved by its largest block (or ResNet unit), without recomputation. largest: the largest tensor that its last
    block saves, without recomputation.
    """

    until: int
    block: int
    largest: int


class Saved(NamedTuple):
    """Bytes saved for a micro-batch.

    total: by the whole forward pass. outside: the largest tensor that no block saves, only for an objective.
    until_added: from the beginning of the forward pass to the last use of the largest parameter that an objective adds;
    without one, total. uses: of the blocks, in order: an objective may run the model on one group of views after
    another.
    """

    total: int
    outside: int
    until_added: int
    uses: tuple[Use, ...]


def saved_bytes(
    config: Config, micro_batch: int, dtype: torch.dtype, checkpointing: bool, frozen: str = NOTHING
) -> Saved:
    """Bytes saved by the forward pass of `micro_batch` images, without the images themselves and without parameters.

    frozen: as `train.freeze`.
    """

    one, two, plain = _counts(config, dtype, checkpointing, frozen)
    total = one.total + (micro_batch - 1) * (two.total - one.total)
    return Saved(total, 0, total, (Use(total, plain.block * micro_batch, plain.largest * micro_batch),))


@cache  # A plan asks some hundred times.
def _counts(config: Config, dtype: torch.dtype, checkpointing: bool, frozen: str) -> tuple[Saved, Saved, Use]:
    """What one image and two save, and what the blocks save of one image without recomputation."""

    def count(images: int, recomputes: bool) -> Saved:
        return on_meta.of_depth(config, lambda one: _count(one, images, dtype, recomputes, frozen), frozen)

    # Some tensors do not grow with the number of images: the standardised kernels of a ResNet.
    return count(1, checkpointing), count(2, checkpointing), count(1, False).uses[0]


@cache
def _count(config: Config, images: int, dtype: torch.dtype, checkpointing: bool, frozen: str) -> Saved:
    with torch.device("meta"):
        model, masks = build(config).to(dtype), []
        pixels = torch.empty(images, config.pixels.num_channels, *config.image_size, dtype=dtype)
        if isinstance(config, ViTConfig) and config.masked:
            counts = (math.prod(config.grid), config.num_corrupted)
            masks = [torch.empty(images, count, dtype=torch.int64) for count in counts]
    freeze(model, frozen)
    model.activation_checkpointing = checkpointing
    return _saved_by(model, lambda: model(pixels, *masks), [*model.parameters(), pixels])


def of_many(count: Callable[[int], Saved], images: int) -> Saved:
    """What `count` gives for a number of images; for more than 32, extrapolated by the quadratic through three counts.

    A count takes a tenth of a second for a large model, and a loss that compares images of a batch is not
    linear in their number.
    """
    if images <= _COUNTED[-1]:
        return count(images)
    return on_meta.through(_COUNTED, [count(number) for number in _COUNTED], images)


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
    """Bytes saved by an objective's loss of `images` images on one of `ranks` ranks, without inputs, parameters and
    buffers.

    model: the backbone's.
    """

    def count(one: Config) -> Saved:
        objective = on_meta.make(cls, config, one, dtype)
        objective.backbone.activation_checkpointing = checkpointing
        read = on_meta.inputs(objective, config, images, dtype)
        ours = [*objective.parameters(), *objective.buffers(), *read.views, *read.facts.values()]
        on_meta.begin_step(objective)
        return _saved_by(objective.backbone, lambda: objective(*read)[0], ours, _with_largest_added(objective))

    with across_ranks.on_meta(ranks):
        found = on_meta.of_depth(model, count, config.train.freeze)
    if not checkpointing:
        return found
    plain = saved_by_loss(cls, config, model, images, dtype, False, ranks)
    uses = (use._replace(until=kept.until) for use, kept in zip(plain.uses, found.uses, strict=True))
    return Saved(found.total, plain.outside, found.until_added, tuple(uses))


def _with_largest_added(objective: Objective) -> list[nn.Module]:
    """The modules that hold the largest of the trained parameters that an objective adds outside of its backbone: not
    LoRA's factors.
    """
    sizes = {
        module: max(counts)
        for name, module in objective.named_modules()
        if not f"{name}.".startswith((BACKBONE, TEACHER, "lora."))
        and (counts := [p.numel() for p in module.parameters(recurse=False) if p.requires_grad])
    }
    return [module for module, count in sizes.items() if count == max(sizes.values())]


def _saved_by(
    model: Model, forward: Callable[[], Tensor], ignored: Iterable[Tensor], added: Iterable[nn.Module] = ()
) -> Saved:
    """Counts what `forward`, which calls the model, saves beside the tensors that are left out. added: see
    `Saved.until_added`.
    """
    ours = {tensor.untyped_storage()._cdata for tensor in ignored}
    kept: dict[int, torch.UntypedStorage] = {}
    of_blocks: set[int] = set()
    before: set[int] = set()
    uses: list[Use] = []
    until_added = 0

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in ours:
            kept[storage._cdata] = storage
        return tensor

    def total() -> int:
        return sum(storage.nbytes() for storage in kept.values())

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal before
        before = set(kept)
        if module is blocks[0] and torch.is_grad_enabled():
            uses.append(Use(0, 0, 0))

    def leave(*_: Any) -> None:
        of_blocks.update(kept.keys() - before)
        if torch.is_grad_enabled():
            added = [kept[key].nbytes() for key in kept.keys() - before] or [0]
            uses[-1] = Use(total(), max(uses[-1].block, sum(added)), max(added))

    def leave_added(*_: Any) -> None:
        nonlocal until_added
        until_added = total()

    blocks = model.blocks if isinstance(model, VisionTransformer) else model.units
    for module in blocks:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    for module in added:
        module.register_forward_hook(leave_added)
    kept_by = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with OperatorsOfAGpu(), kept_by:
        out = forward()
    assert out.is_meta
    outside = max((kept[key].nbytes() for key in kept.keys() - of_blocks), default=0)
    return Saved(total(), outside, until_added or total(), tuple(uses))


class OperatorsOfAGpu(TorchFunctionMode):
    """Attention and dropout that save what a GPU's fused kernels save; the meta device would use unfused operators."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            # Saves its inputs, its output and one fp32 number per row of the N x N matrix, as those of a GPU do.
            attention, mask = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, kwargs.get("attn_mask")
            return attention(*args, attn_mask=None if mask is None else mask.detach())[0]
        if func is F.dropout:
            is_on = kwargs["training"] and kwargs["p"] > 0
            return torch.native_dropout(args[0], kwargs["p"], True)[0] if is_on else args[0]
        return func(*args, **kwargs)
