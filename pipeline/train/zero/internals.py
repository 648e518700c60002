"""DeepSpeed, and all of it that is not public: where each ZeRO stage keeps weights and gradients, and functions that
are replaced.

Private names of DeepSpeed stand here alone; `tests/train/test_deepspeed_names.py` looks each one up, and says which a
new version has changed. `deepspeed.utils.safe_get_full_*` and `safe_set_full_*` would do for some, but they send each
whole parameter to all ranks; `safe_get_local_*` know stage 3 only, wait for the device, and copy what is in host
memory.

At every stage a rank updates a few flat fp32 tensors (shards) of concatenated parameters or ranges of them; the
optimizer's moments have the same shape.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from pipeline.objectives.objective import constants, stored_name, trained_parameters

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# torch warns about the names of collectives that DeepSpeed uses; users cannot change that, and every rank would say it.
_COLLECTIVES = ".*(all_gather_into_tensor|reduce_scatter_tensor)"
warnings.filterwarnings("ignore", message=_COLLECTIVES, category=FutureWarning)


def _import_deepspeed() -> Any:
    """DeepSpeed without MLflow and Inductor, which only parts of it need that are not used here: saves every rank 4 of
    12 s.

    If a later DeepSpeed is organised differently, the plain import happens.
    """
    # None makes `import mlflow` fail: DeepSpeed's autotuner imports it if it is installed.
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    import deepspeed

    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]
    with contextlib.suppress(ImportError, AttributeError):
        from deepspeed.runtime import compiler

        # Muon's functions are compiled at import, which would import Inductor.
        compile_function, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
        try:
            import deepspeed.runtime.zero.muon.original_muon  # Later imports find it here.
        finally:
            compiler.compile = compile_function
    # Set, because DeepSpeed would find out with the compiler which of its operators it can build. It asks for one
    # alone, of tensor-parallel inference, which on a CPU every rank would compile for a minute, to map 66 MiB of
    # /dev/shm under a name that outlives the rank.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


deepspeed = _import_deepspeed()


# ---------------------------------------------------------------------- where the stages keep weights
class ParameterSlice(NamedTuple):
    """Elements [start, start + length) of a flattened parameter are [offset, offset + length) of a shard."""

    name: str
    start: int
    length: int
    offset: int

    def share(self, rank: int, world_size: int) -> "ParameterSlice":
        """This rank's share of a place that every rank holds."""
        begin, end = (self.length * r // world_size for r in (rank, rank + 1))
        return ParameterSlice(self.name, self.start + begin, end - begin, self.offset + begin)


@dataclass(frozen=True)
class OptimizerShard:
    """weights: a flat fp32 tensor that this rank updates. key: its key in the optimizer's state."""

    weights: Tensor
    places: tuple[ParameterSlice, ...]
    key: Tensor


def shards(engine: Any, rank: int) -> list[OptimizerShard]:
    """Return the shards that this rank updates. At stage 0 every rank holds and updates all parameters."""
    trained = [(stored_name(name), parameter) for name, parameter in trained_parameters(engine.module)]
    names = {id(parameter): name for name, parameter in trained}
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:  # In fp32: config.check refuses 16-bit.
        return [
            OptimizerShard(parameter.data.view(-1), (ParameterSlice(name, 0, parameter.numel(), 0),), parameter)
            for name, parameter in trained
        ]
    if stage == 3:
        return [
            OptimizerShard(flat, tuple(_partitions(optimizer, group, names, rank)), flat)
            for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        ]
    # In bf16 with fp32 accumulation, stage 1 is another class of DeepSpeed, with other attribute names.
    flats = getattr(optimizer, "fp32_groups_flat_partition", None) or optimizer.single_partition_of_fp32_groups
    groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    return [OptimizerShard(flat, tuple(_fragments(g, names)), flat) for flat, g in zip(flats, groups, strict=True)]


def _partitions(optimizer: Any, group: list[Any], names: dict[int, str], rank: int) -> Iterator[ParameterSlice]:
    """Stage 3: each parameter is split into one equal part per rank, the last one padded."""
    for parameter in group:
        _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        if place := partition_place(names[id(parameter)], parameter, rank, offset):
            yield place


def partition_place(name: str, parameter: Any, rank: int, offset: int) -> ParameterSlice | None:
    """Stage 3: the part of a parameter that this rank holds; None if there is none. offset: in what holds it."""
    length = parameter.ds_tensor.ds_numel
    start = rank * length
    if start >= parameter.ds_numel:
        return None
    return ParameterSlice(name, start, min(length, parameter.ds_numel - start), offset)


def _fragments(group: list[Any], names: dict[int, str]) -> Iterator[ParameterSlice]:
    """Stages 1 and 2: a group's parameters are concatenated, and the result is split into one part per rank."""
    for parameter in group:
        if parameter._hp_mapping is not None:
            low, high = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            yield ParameterSlice(names[id(parameter)], low.start, low.numel, high.start)


def constant_parts(engine: Any, rank: int, world_size: int, all_ranks: bool) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, first element, live flat tensor) of this rank's parts of the constants
    (`objectives.objective.constants`).

    all_ranks: of what every rank holds, yield all elements, not this rank's share.
    """
    for name, tensor in constants(engine.module):
        if hasattr(tensor, "ds_tensor"):  # Stage 3 partitions frozen parameters too.
            if place := partition_place(stored_name(name), tensor, rank, 0):
                yield place.name, place.start, held_by(tensor).view(-1)[: place.length]
            continue
        place = ParameterSlice(stored_name(name), 0, tensor.numel(), 0)
        if not all_ranks:
            place = place.share(rank, world_size)
        if place.length:
            yield place.name, place.start, tensor.data.view(-1)[place.start : place.start + place.length]


def publish(engine: Any) -> None:
    """Copy the fp32 weights to those that the model computes with. Collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        optimizer.update_lp_params()
    elif engine.zero_optimization_stage() == 3:
        for i in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
        # Frozen parameters stay gathered after a forward pass without a backward pass, with the values of before.
        optimizer._partition_all_parameters()
        gather_persistent(persistent(engine))


def held_by(parameter: Any) -> Tensor:
    """This rank's part of a parameter at stage 3, else the whole parameter."""
    return getattr(parameter, "ds_tensor", parameter).data


def persistent(engine: Any) -> list[Any]:
    """Stage 3: the small parameters, which every rank holds at all times."""
    return engine.optimizer.persistent_parameters


def gather_persistent(parameters: list[Any]) -> None:
    """Gather some of these again, from the parts. Collective."""
    if parameters:
        parameters[0].partition(parameters)
        parameters[0].all_gather(parameters)


# ---------------------------------------------------------------------- counters
# State of the dynamic loss scaler.
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale(engine: Any) -> dict[str, Any] | None:
    """State of the loss scaler in fp16, else None."""
    if not engine.fp16_enabled():
        return None
    return {name: getattr(engine.optimizer.loss_scaler, name) for name in _LOSS_SCALE}


def set_loss_scale(engine: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(engine.optimizer.loss_scaler, name, value)


# ---------------------------------------------------------------------- replaced functions
def restore_linear() -> None:
    """Undo what an earlier engine of this process did at stage 3: DeepSpeed replaces torch's linear layer for good.

    Its own holds no gathered weights until the backward pass. torch 2.11 compiles it wrongly: a tiny model's gradient
    lost 31 % of its norm.
    """
    patches = deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses
    torch.nn.functional.linear = getattr(patches, "linear_bk", torch.nn.functional.linear)


def gather_at_once(blocks: Iterable[torch.nn.Module]) -> None:
    """Make an engine that is created next gather all parameters of a block together at stage 3, not layer by layer: the
    hooks at each layer would cut compiled code into pieces.

    DeepSpeed also reduces the gradients of such a module together, after each backward pass of it, and fails when there
    are several in a step, of views of several sizes. Here they are reduced one by one, as those of all others.
    """
    for block in blocks:
        deepspeed.utils.set_z3_leaf_module(block, True)
    deepspeed.runtime.zero.stage3.z3_leaf_parameter = lambda parameter: False


def use_flat_gradients(engine: Any) -> None:
    """Replace how the optimizer of stage 1 in bf16 handles gradients. No-op for DeepSpeed's other optimizers.

    It adds, measures and clips the gradient of each parameter by itself: five kernels each, which a host can take
    longer to launch than a GPU to run. It clears all gradients twice after a step, and copies them several times to
    reduce them, even on one rank. Here one call adds, measures or clips all of them, the first micro-batch's replace
    those of the step before, and the ranks reduce the flat tensors in place.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_groups_gradients_flat"):
        return
    is_first = True  # Whether the next micro-batch is the first of its step.

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        """Move the gradients of a micro-batch, in 16 bits, to those of the step, in fp32."""
        nonlocal is_first
        assert not clear_lp_grads
        pairs: list[tuple[Tensor, Tensor]] = []
        unused: list[Tensor] = []
        for parameters, group in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            for parameter, total in zip(parameters, group, strict=True):
                if parameter.grad is None:
                    unused.append(total)
                else:
                    pairs.append((total, parameter.grad.view(total.shape)))
                    parameter.grad = None
        if pairs:
            totals, moved = zip(*pairs, strict=True)
            move = torch._foreach_copy_ if is_first else torch._foreach_add_
            move(totals, moved)
        if unused and is_first:
            torch._foreach_zero_(unused)
        is_first = False

    def clear_hp_grads() -> None:
        nonlocal is_first
        is_first = True

    @torch.no_grad()
    def reduce_gradients(pipeline_parallel: bool) -> None:
        """Average the gradients over the ranks. Called after the last micro-batch."""
        if (num_ranks := distributed.get_world_size()) == 1:
            return
        for flat in optimizer.fp32_groups_gradients_flat:
            sent = flat.to(engine.communication_data_type)
            distributed.all_reduce(sent)
            sent.mul_(1 / num_ranks)
            flat.copy_(sent)  # No-op in fp32, which was reduced in place.

    @torch.no_grad()
    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        """Tensors to clip; or (tensors whose norm is that of the gradient, none of experts). Gradients that nobody set
        are zeros.
        """
        if for_clipping:
            return optimizer.fp32_groups_gradients_flat
        totals: list[Tensor] = [total for group in optimizer.fp32_groups_gradients for total in group]
        return [torch.stack(torch._foreach_norm(totals))], {}

    for function in (update_hp_grads, clear_hp_grads, reduce_gradients, get_grads_for_norm):
        setattr(optimizer, function.__name__, function)
