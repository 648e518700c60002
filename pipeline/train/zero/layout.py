"""Where DeepSpeed keeps fp32 weights and optimizer state on this rank, for every ZeRO stage and precision.

At every stage a rank updates a few flat fp32 tensors (shards) of concatenated parameters or ranges of them; the optimizer's
moments have the same shape. One list of places describes them, so that saving and loading on another number of ranks share
their code between the stages. Works on DeepSpeed's objects without importing it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint.sharded_tensors import WEIGHTS
from pipeline.objectives.objective import constants, stored_name, trained_parameters


class ParameterSlice(NamedTuple):
    """Elements [start, start + length) of a flattened parameter are [offset, offset + length) of a shard."""

    name: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class OptimizerShard:
    """weights: a flat fp32 tensor that this rank updates. key: its key in the optimizer's state."""

    weights: Tensor
    places: tuple[ParameterSlice, ...]
    key: Tensor


def shards(engine: Any, rank: int) -> list[OptimizerShard]:
    """Return the shards that this rank updates. At stage 0 every rank holds and updates all parameters."""
    names = {id(parameter): stored_name(name) for name, parameter in trained_parameters(engine.module)}
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        found = []
        for name, parameter in trained_parameters(engine.module):
            assert parameter.dtype == torch.float32, "config.check refuses 16-bit at stage 0"
            place = ParameterSlice(stored_name(name), 0, parameter.numel(), 0)
            found.append(OptimizerShard(parameter.data.view(-1), (place,), parameter))
        return found
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


def owned(place: ParameterSlice, rank: int, world_size: int) -> ParameterSlice:
    """Return this rank's share of a place that every rank holds."""
    begin, end = (place.length * r // world_size for r in (rank, rank + 1))
    return ParameterSlice(place.name, place.start + begin, end - begin, place.offset + begin)


def constant_parts(engine: Any, rank: int, world_size: int, all_ranks: bool) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, first element, live flat tensor) of this rank's parts of the constants (`objectives.objective.constants`).

    all_ranks: of what every rank holds, yield all elements, not this rank's share.
    """
    for name, tensor in constants(engine.module):
        if hasattr(tensor, "ds_tensor"):  # Stage 3 partitions frozen parameters too.
            place = partition_place(stored_name(name), tensor, rank, 0)
            if place is not None:
                yield place.name, place.start, tensor.ds_tensor.data.view(-1)[: place.length]
            continue
        place = ParameterSlice(stored_name(name), 0, tensor.numel(), 0)
        if not all_ranks:
            place = owned(place, rank, world_size)
        if place.length:
            yield place.name, place.start, tensor.data.view(-1)[place.start : place.start + place.length]


def states(engine: Any, shards: list[OptimizerShard]) -> dict[str, list[Tensor]]:
    """Return live flat tensors by state, one per shard: the weights, and the optimizer's states that exist so far.

    What a shard lacks is zeros without memory.
    """
    found = {WEIGHTS: [shard.weights for shard in shards]}
    of_optimizer = engine.basic_optimizer.state
    most = max(shards, key=lambda shard: len(of_optimizer.get(shard.key, {})))
    for key, value in of_optimizer.get(most.key, {}).items():
        if torch.is_tensor(value) and value.numel() == most.weights.numel() and key != "step":
            found[key] = [
                torch.zeros((), device=shard.weights.device).expand(shard.weights.numel())
                if lacks(engine, shard, key)
                else of_optimizer[shard.key][key].view(-1)
                for shard in shards
            ]
    return found


def lacks(engine: Any, shard: OptimizerShard, state: str) -> bool:
    """Whether the optimizer keeps no such state of a shard: Muon has no second moment."""
    groups = engine.basic_optimizer.param_groups
    return state in ("exp_avg_sq", "step") and any(
        group.get("matrices") and any(p is shard.key for p in group["params"]) for group in groups
    )


def begin_states(engine: Any, shards: list[OptimizerShard], names: list[str], steps: int | None) -> None:
    """Create the states that an optimizer creates at its first step, to load into.

    steps: optimizer steps done; None if the optimizer does not count them.
    """
    for shard in shards:
        state = engine.basic_optimizer.state[shard.key]
        for name in names:
            if name != WEIGHTS and name not in state and not lacks(engine, shard, name):
                state[name] = torch.zeros_like(shard.key, memory_format=torch.preserve_format, requires_grad=False)
        if steps is not None and not lacks(engine, shard, "step"):
            # A fused kernel reads it where the weights are; torch's other optimizers count on the host.
            fused = any(group.get("fused") for group in engine.basic_optimizer.param_groups)
            state["step"] = torch.tensor(float(steps), device=shard.key.device if fused else "cpu")


def zero_states(engine: Any) -> None:
    """Reset the optimizer's states to zero, in place: DeepSpeed's parameters hold views of them."""
    for state in engine.basic_optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def optimizer_steps(engine: Any, shards: list[OptimizerShard]) -> int | None:
    """Return the optimizer's step count, the same for all shards; None if it has none (SGD)."""
    counted = {
        int(engine.basic_optimizer.state[s.key]["step"])
        for s in shards
        if "step" in engine.basic_optimizer.state.get(s.key, {})
    }
    assert len(counted) < 2, counted
    return counted.pop() if counted else None


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
        gather_persistent(optimizer.persistent_parameters)


def gather_persistent(parameters: list[Any]) -> None:
    """Stage 3: gather again, from the parts, small parameters, which every rank holds at all times. Collective."""
    if parameters:
        parameters[0].partition(parameters)
        parameters[0].all_gather(parameters)
