"""Predicts the memory of one rank during training from the settings alone.

It counts what DeepSpeed 0.19.8 allocates, according to its source and compared with the tensors of real runs
(tests/multiprocess/test_rank_memory.py). The peak is the largest of three moments of a step: the backward pass with all
activations, the reduction of gradients over ranks, and the optimizer step.

Not counted: the CUDA context, NCCL's buffers, fragmentation of the allocator, workspaces of kernels.

Letters: P trained parameters (the model's, and those that the objective adds), p = P / ranks, e bytes of a parameter
(fp32 4, bf16 2), T tokens of a micro-batch.
"""

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.estimate.plan import Plan
from pipeline.model import Config, Model, VisionTransformer, ViTConfig, build, num_parameters
from pipeline.objectives import kind, on_meta
from pipeline.objectives.objective import BACKBONE, FROZEN_TEACHER, TEACHER, Objective, constants, trained_parameters
from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.muon import BATCH_ELEMENTS
from pipeline.objectives.parameters.trained import NOTHING, freeze
from pipeline.objectives.parts import across_ranks
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import OptimizerConfig, RunConfig, TrainPrecision

# Sizes in elements: DeepSpeed's defaults, which train/zero/engine.py sets explicitly.
REDUCE_BUCKET = 500_000_000  # upper limit, see reduce_bucket
PERSISTENCE_THRESHOLD = 100_000  # stage 3: smaller parameters are not sharded
_PREFETCH_BUCKET = 50_000_000  # stage 3: upper limit, see live_parameters
_COUNTED = (8, 16, 32)  # images whose saved tensors are counted


class Memory(NamedTuple):
    """Bytes of one rank at one moment of a step."""

    when: str  # "backward", "reduction" or "optimizer step"
    weights: int
    optimizer: int  # fp32 master weights and moments
    gradients: int
    activations: int  # saved for the backward pass, and its temporary tensors
    inputs: int
    buffers: int  # of communication and the optimizer

    @property
    def total(self) -> int:
        return sum(self[1:])


@dataclass(frozen=True)
class Parameters:
    """Numbers of an objective's parameters, and of tensors."""

    trained: int
    backbone: int  # of these the backbone's
    backbone_largest: int  # of the backbone's largest trained tensor
    frozen: int  # with its persistent buffers, without the teachers
    teacher: int
    published: int  # of a teacher that is in no checkpoint
    largest: int  # of the largest trained tensor
    # of the backbone's head, or the largest tensor that is added for training outside dense layers: it has a
    # normalised copy
    head: int
    persistent: int  # of trained tensors below stage 3's threshold
    matrices: int  # of the backbone's blocks, which Muon would update
    largest_matrix: int  # of its kernels

    @property
    def average_bytes(self) -> int:
        """Bytes per trained parameter of the fp32 average that a teacher is copied from."""
        return 4 * bool(self.teacher)


def rank_memory(model: Config, config: RunConfig, micro_batch: int, accumulation: int, world_size: int) -> Memory:
    """Returns the moment of a step with the largest memory."""
    return max(moments(model, config, micro_batch, accumulation, world_size), key=lambda moment: moment.total)


def reduce_bucket(num_parameters: int) -> int:
    """Elements of DeepSpeed's gradient bucket, which it allocates in full even for a small model.

    It need not be larger than the model: a bucket of all gradients is reduced after the last one, with the same sums.
    """
    return min(REDUCE_BUCKET, num_parameters)


def live_parameters(num_parameters: int) -> tuple[int, int]:
    """Stage 3: elements that are (gathered ahead of their use, kept from the forward to the backward pass).

    DeepSpeed's defaults, 5e7 and those of which 1e9 come back, keep all of a model of 5e8, so that stage 3 would save
    nothing over stage 2 when memory is short.
    """
    return min(_PREFETCH_BUCKET, num_parameters // 16), num_parameters // 16


def refuse_too_large(config: RunConfig, plan: Plan, model: Config, limit: int, of: str = "its GPU") -> None:
    """Raise UserError with a remedy if the peak memory of a rank exceeds `limit` bytes.

    of: name in the error of what has this limit.
    """
    peak = rank_memory(model, config, plan.micro_batch, plan.accumulation, plan.world_size)
    if peak.total <= limit:
        return
    raise UserError(
        f"a rank needs {_described(peak, plan)}, and {of} has {limit / 2**30:.1f}. "
        + _way_out(config, plan, model, limit)
    )


def what_takes_less(config: RunConfig, plan: Plan, model: Config) -> str:
    """For a rank that ran out of memory: the predicted peak, and settings that need at least 10 % less."""
    peak = rank_memory(model, config, plan.micro_batch, plan.accumulation, plan.world_size)
    return f"The prediction was {_described(peak, plan)}. " + _way_out(config, plan, model, 0.9 * peak.total)


def _described(peak: Memory, plan: Plan) -> str:
    return (
        f"{peak.total / 2**30:.1f} GiB ({peak.when}: {peak.activations / 2**30:.1f} of it activations of "
        f"train.micro_batch {plan.micro_batch})"
    )


def _way_out(config: RunConfig, plan: Plan, model: Config, limit: float) -> str:
    micro_batch = largest_micro_batch(config, model, plan.global_batch // plan.world_size, plan.world_size, limit)
    ways = [f"train.micro_batch={micro_batch}"] if micro_batch else []
    if micro_batch and OBJECTIVES[config.train.loss].of_whole_batch:
        ways[0] += f" with train.global_batch={micro_batch * plan.world_size}"
    if not config.engine.activation_checkpointing:
        ways.append("engine.activation_checkpointing=true")
    if 0 < config.engine.zero_stage < config.zero_stages[-1]:
        ways.append(f"engine.zero_stage={config.engine.zero_stage + 1}")
    ways.append("more or larger GPUs")
    return f"Use {', or '.join(ways)}. launch/plan.py cluster=... chooses."


def largest_micro_batch(config: RunConfig, model: Config, share: int, world_size: int, limit: float) -> int:
    """Returns the largest divisor of a rank's `share` of the batch that fits `limit` bytes as a micro-batch; 0 if
    none.
    """
    pairs = 2 if config.augment.mixes_pairs else 1
    sizes = (size for size in range(share, 0, -1) if share % size == 0 and size % pairs == 0)
    fits = (size for size in sizes if rank_memory(model, config, size, share // size, world_size).total <= limit)
    return next(fits, 0)


def most_images(
    config: RunConfig, model: Config, accumulation: int, world_size: int, limit: float, most: int = 10**6
) -> int:
    """Returns the largest micro-batch of any size, below `most`, that fits `limit` bytes; 0 if none."""

    def too_many(images: int) -> bool:
        return rank_memory(model, config, images, accumulation, world_size).total > limit

    return bisect.bisect_left(range(1, most), True, key=too_many)


def moments(model: Config, config: RunConfig, micro_batch: int, accumulation: int, world_size: int) -> list[Memory]:
    """Returns a rank's memory in the backward pass, the reduction of gradients and the optimizer step."""
    engine = config.engine
    e = dtype_of(engine.precision).itemsize
    found = parameters(config, model)
    P = found.trained
    p = math.ceil(P / world_size)
    full, num_uses = _backward_activations(model, config, micro_batch, world_size)
    # If gradients exceed one bucket, it is reduced before the backward pass has finished.
    left = int(full * (1 - reduce_bucket(P) / P)) if engine.zero_stage >= 2 else 0
    inputs = _input_bytes(model, config, micro_batch)
    state = _moments_bytes(config.optimizer) + found.average_bytes
    optimizer = state * P if engine.zero_stage == 0 else (4 + state) * p
    if config.optimizer.name == "muon":  # The matrices have no second moment.
        optimizer -= 4 * math.ceil(found.matrices / (1 if engine.zero_stage == 0 else world_size))
    if engine.offload:
        optimizer = 0
    # At stages 1 and 2 the teacher's parameters are views of flat tensors that have room for all trained ones.
    frozen = e * (
        found.frozen + found.published + (P if found.teacher and engine.zero_stage in (1, 2) else found.teacher)
    )
    weights = gathered = e * P + frozen
    if engine.zero_stage == 3:
        untrained = found.frozen + found.published + found.teacher
        weights = e * (p + found.persistent + math.ceil(untrained / world_size))
        # Two more tensors: the one at work, and the one by which a prefetch exceeds its limit.
        live = found.persistent + sum(live_parameters(P + untrained)) + 2 * found.largest
        if num_uses > 1:  # DeepSpeed releases a layer after the last of its backward passes.
            live = max(live, found.backbone + found.persistent)
        gathered = e * (p + math.ceil(untrained / world_size) + min(P + untrained, live))
    gradients, buffers = _gradients_and_buffers(config, found, P, p, accumulation > 1, world_size)
    return [
        Memory("backward", gathered, optimizer, gradients[0], full, inputs, buffers[0]),
        Memory("reduction", gathered, optimizer, gradients[1], left, inputs if left else 0, buffers[1]),
        Memory("optimizer step", weights, optimizer, gradients[2], 0, 0, buffers[2]),
    ]


def _gradients_and_buffers(
    config: RunConfig, found: Parameters, P: int, p: int, accumulates: bool, world_size: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns (gradients, buffers) in bytes, each for the backward pass, the reduction and the optimizer step."""
    stage, e = config.engine.zero_stage, dtype_of(config.engine.precision).itemsize
    # Of the two parameter groups, which are updated one after the other, one is tiny.
    group = P if stage == 0 else p
    # On a GPU the optimizer is fused unless the settings say otherwise, and then has no temporary tensors. (A CPU's
    # has, briefly.) Those of torch's foreach optimizers: Adam's root of the second moment, SGD's gradient with weight
    # decay.
    has_work = config.engine.fused is False and (config.optimizer.name != "sgd" or config.optimizer.weight_decay)
    work = 4 * group if has_work else 0
    if config.optimizer.name == "muon":
        # The direction of what a rank updates, the matrices that are cut, and what is computed of those that a GPU
        # makes orthogonal together.
        own = math.ceil(found.matrices / (1 if stage == 0 else world_size))
        together = max(found.largest_matrix, min(own, BATCH_ELEMENTS["cuda"]))
        # Muon gathers at most one matrix from several ranks at the end of each rank's range.
        cut = min(found.matrices, (world_size - 1) * found.largest_matrix) if stage else 0
        work += 4 * (own + cut + 4 * together)
    bucket = e * reduce_bucket(P)
    if stage == 0:
        return (4 * P * accumulates, 4 * P, 4 * P), (0, bucket, work)
    if stage == 1 and config.engine.precision == "bf16" and not config.engine.offload:
        # DeepSpeed's BF16_Optimizer keeps fp32 gradients of the whole model on every rank during the whole run. After
        # a backward pass there are also 16-bit ones, then a 16-bit copy to reduce, unless it is reduced as fp32.
        return (4 * P, (4 + e) * P, 4 * P), (0, 0, work)
    # Otherwise, gradients are copied to a bucket (stages 2, 3: immediately; stage 1: in the last micro-batch), a flat
    # copy of the bucket is reduced, and a rank keeps its own part of the sum.
    if stage == 1:
        # 16-bit gradients become fp32 before they are reduced, as 16 bits again unless they were accumulated, to the
        # fp32 ones of a rank's part.
        bucket = 4 * reduce_bucket(P)
        part = 4 * p * (e == 2 and not config.engine.offload)
        sent = 2 * reduce_bucket(P) * (e == 2 and not accumulates)
        return (4 * P * accumulates, 4 * P - bucket + part, 4 * p), (bucket, 2 * bucket + sent, 4 * group + work)
    if stage == 2 and e == 2:
        as_fp32 = 4 * found.largest
        return (4 * p * accumulates, 4 * p, 4 * p), (bucket, 2 * bucket + as_fp32, work)
    if stage == 2:
        return (4 * p * accumulates, 4 * p * accumulates, 4 * p), (bucket, 2 * bucket, 4 * group + work)
    as_fp32 = 4 * math.ceil(reduce_bucket(P) / world_size) if e == 2 else 0
    return (4 * p, 4 * p, 4 * p), (bucket, 2 * bucket + as_fp32, bucket + 4 * group + work)


def _backward_activations(model: Config, config: RunConfig, micro_batch: int, world_size: int) -> tuple[int, int]:
    """Returns (bytes of saved tensors and of temporary ones, at the largest of these moments of the backward pass; how
    often a loss uses the model).

    At its start, with the largest tensor outside of blocks, its gradient, and those of the largest kernels (of those
    that an objective adds, where it reaches them); and where it reaches the last block of each use of the model: with
    the gradients of that block's activations and kernel (and of the head, if it is the model's); with checkpointing,
    also with the recomputed activations of a block. Where the model is used several times, autograd keeps the sum so
    far of its parameters' gradients until the first use has added its part.
    """
    engine, cls = config.engine, kind(config.train.loss)
    dtype = dtype_of(engine.precision)
    e = dtype.itemsize
    found = parameters(config, model)
    if cls.trains_backbone_alone and not config.train.lora_rank:
        saved = saved_bytes(model, micro_batch, dtype, engine.activation_checkpointing, config.train.freeze)
        # The loss is computed in fp32: logits, targets and their product.
        loss = micro_batch * model.num_outputs * (12 + (0 if e == 4 else e))
    else:
        saved = of_many(
            lambda images: saved_by_loss(
                cls, config, model, images, dtype, engine.activation_checkpointing, world_size
            ),
            micro_batch,
        )
        loss = 0
    moments = [
        saved.total + 2 * saved.outside,
        saved.until_added + 2 * saved.outside + e * (found.largest + found.head),
    ]
    for number, use in enumerate(reversed(saved.uses)):
        again = use.block if engine.activation_checkpointing else 0
        kernels = found.backbone_largest + found.head * cls.trains_backbone_alone + found.backbone * bool(number)
        # Per token, the MLP's M and twice D: 6 D, where the largest saved tensor has 4 D.
        moments.append(use.until + again + 3 * use.largest // 2 + e * kernels)
    # A frozen block saves nothing, but its forward pass holds about what one that is trained would save.
    frozen = [model] if config.train.freeze != NOTHING else []
    frozen += [teacher] if (teacher := cls.teacher_config(config, model)) else []  # Before there is anything else.
    inside = [saved_bytes(one, micro_batch, dtype, False).uses[0].block for one in frozen]
    if found.teacher:  # It runs after the student, whose tensors are kept.
        moments.append(saved.total + saved_bytes(model, micro_batch, dtype, False).uses[0].block)
    return max([max(moments) + loss, *inside]), len(saved.uses)


def _input_bytes(model: Config, config: RunConfig, micro_batch: int) -> int:
    """Bytes of all views of a micro-batch's images: normalised in fp32, and the 16-bit copy that the model reads."""
    precision, cls = config.engine.precision, kind(config.train.loss)
    teacher = cls.teacher_config(config, model)
    views = [(ImageSize.parse(group.size), group.count, model.pixels) for group in cls.views(config)]
    if teacher and not any((teacher.image_size, teacher.pixels) == (size, pixels) for size, _, pixels in views):
        views.append((ImageSize(*teacher.image_size), 1, teacher.pixels))
    values = sum(count * math.prod(size) * pixels.num_channels for size, count, pixels in views)
    return micro_batch * values * (4 if precision == "fp32" else 4 + dtype_of(precision).itemsize)


def checkpoint_bytes(model: Config, config: RunConfig) -> int:
    """Bytes of one checkpoint over all ranks: fp32 weights, moments and what is frozen, and model.safetensors of the
    backbone.
    """
    found = parameters(config, model)
    state = found.trained * (4 + _moments_bytes(config.optimizer) + found.average_bytes) + 4 * found.frozen
    return state + 4 * num_parameters(model)


def dtype_of(precision: TrainPrecision) -> torch.dtype:
    """The type of parameters and activations, as the model computes with them."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _moments_bytes(optimizer: OptimizerConfig) -> int:
    """Bytes per parameter of the optimizer's fp32 state and of the moving average of the weights."""
    # Where Muon has no second moment, checkpoints hold zeros.
    moments = 8 if optimizer.name != "sgd" else 4 * bool(optimizer.momentum)
    return moments + 4 * bool(optimizer.ema_decay)


def parameters(config: RunConfig, model: Config) -> Parameters:
    """Counts the parameters of a run's objective. model: the backbone's."""
    return _parameters(kind(config.train.loss), config, model)


@on_meta.remembered
def _parameters(cls: type[Objective], config: RunConfig, model: Config) -> Parameters:
    objective = on_meta.make(cls, config, model, torch.float32)
    sizes = {name: parameter.numel() for name, parameter in objective.named_parameters()}
    trained = {name: sizes[name] for name, _ in trained_parameters(objective)}
    of_backbone = {name: size for name, size in trained.items() if name.startswith(BACKBONE)}
    head = sum(size for name, size in of_backbone.items() if name.startswith(f"{BACKBONE}head."))
    kernels = optimizers.matrices(objective, objective.decayed())
    dense = {f"{name}.weight" for name, module in objective.named_modules() if isinstance(module, nn.Linear)}
    added = (count for name, count in trained.items() if name not in of_backbone and name not in dense)
    return Parameters(
        sum(trained.values()),
        sum(of_backbone.values()),
        max(of_backbone.values(), default=0),
        sum(tensor.numel() for _, tensor in constants(objective)),
        sum(size for name, size in sizes.items() if name.startswith(TEACHER)),
        sum(size for name, size in sizes.items() if name.startswith(FROZEN_TEACHER)),
        max(trained.values()),
        max(head, *added, 0),
        sum(count for count in trained.values() if count < PERSISTENCE_THRESHOLD),
        sum(sizes[name] for name in kernels),
        max((sizes[name] // count for name, count in kernels.items()), default=0),
    )


# ---------------------------------------------------------------------- activations
# Bytes that a forward pass saves for the backward pass are counted on the meta device: no arithmetic, no memory.
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
