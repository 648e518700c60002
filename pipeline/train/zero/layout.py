"""Where DeepSpeed keeps fp32 weights and optimizer state on this rank, for every ZeRO stage and precision.

Whatever the stage, a rank updates a few flat fp32 tensors (shards), in which parameters, or ranges of them, lie one after
another; the optimizer's moments have the same shape. So one list of places says what this rank holds, and saving, loading
on another number of ranks, and gathering whole weights are the same code for all. Takes DeepSpeed's objects, imports none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.sharded_tensors import WEIGHTS


@dataclass(frozen=True)
class Place:
    """Elements [start, start + length) of a flattened parameter are [offset, offset + length) of a shard."""

    name: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Shard:
    """weights: a flat fp32 tensor that this rank updates. key: what the optimizer's state of it is found by."""

    weights: Tensor
    places: tuple[Place, ...]
    key: Tensor


def shards(engine: Any, rank: int) -> list[Shard]:
    """What this rank updates. At stage 0 every rank holds, and updates, everything."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        found = []
        for name, parameter in engine.module.named_parameters():
            assert parameter.dtype == torch.float32, "config.check refuses 16-bit at stage 0"
            place = Place(name, 0, parameter.numel(), 0)
            found.append(Shard(parameter.data.view(-1), (place,), parameter))
        return found
    if stage == 3:
        return [
            Shard(flat, tuple(_partitions(optimizer, group, names, rank)), flat)
            for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        ]
    # Stage 1 in bf16 with fp32 accumulation is another class of DeepSpeed's, with other names for the same.
    flats = getattr(optimizer, "fp32_groups_flat_partition", None) or optimizer.single_partition_of_fp32_groups
    groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    return [Shard(flat, tuple(_fragments(g, names)), flat) for flat, g in zip(flats, groups, strict=True)]


def _partitions(optimizer: Any, group: list[Any], names: dict[int, str], rank: int) -> Iterator[Place]:
    """Stage 3: each parameter is cut into as many equal parts as there are ranks, the last of them padded."""
    for parameter in group:
        _, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = rank * length
        if start < parameter.ds_numel:
            yield Place(names[id(parameter)], start, min(length, parameter.ds_numel - start), offset)


def _fragments(group: list[Any], names: dict[int, str]) -> Iterator[Place]:
    """Stages 1 and 2: a group's parameters lie one after another, and that is cut into as many parts as there are ranks."""
    for parameter in group:
        if parameter._hp_mapping is not None:
            low, high = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            yield Place(names[id(parameter)], low.start, low.numel, high.start)


def owned(place: Place, rank: int, world_size: int) -> Place:
    """This rank's part of what every rank holds."""
    begin, end = (place.length * r // world_size for r in (rank, rank + 1))
    return Place(place.name, place.start + begin, end - begin, place.offset + begin)


def states(engine: Any, shards: list[Shard]) -> dict[str, list[Tensor]]:
    """Live flat tensors by state, one for each shard: the weights, and what the optimizer has begun to keep."""
    found = {WEIGHTS: [shard.weights for shard in shards]}
    of_optimizer = engine.basic_optimizer.state
    for key, value in of_optimizer.get(shards[0].key, {}).items():
        if torch.is_tensor(value) and value.numel() == shards[0].weights.numel() and key != "step":
            found[key] = [of_optimizer[shard.key][key].view(-1) for shard in shards]
    return found


def begin_states(engine: Any, shards: list[Shard], names: list[str], steps: int | None) -> None:
    """Give an optimizer that has not stepped yet the states that it would make at its first step, to load into.

    steps: optimizer steps done, where it counts them.
    """
    for shard in shards:
        state = engine.basic_optimizer.state[shard.key]
        for name in names:
            if name != WEIGHTS and name not in state:
                state[name] = torch.zeros_like(shard.key, memory_format=torch.preserve_format, requires_grad=False)
        if steps is not None:
            state["step"] = torch.tensor(float(steps))


def zero_states(engine: Any) -> None:
    """Make the optimizer's states those that it begins with. In place: DeepSpeed's parameters refer to parts of them."""
    for state in engine.basic_optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def optimizer_steps(engine: Any, shards: list[Shard]) -> int | None:
    """Steps the optimizer has counted, the same for all it updates; None when it counts none (SGD)."""
    counted = {int(engine.basic_optimizer.state[s.key]["step"]) for s in shards if "step" in
               engine.basic_optimizer.state.get(s.key, {})}  # fmt: skip
    assert len(counted) < 2, counted
    return counted.pop() if counted else None


def publish(engine: Any) -> None:
    """Make the weights that the model computes with follow the fp32 ones. Collective."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2):
        optimizer.update_lp_params()
    elif engine.zero_optimization_stage() == 3:
        for i in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
        # Small parameters are kept whole on every rank.
        if whole := optimizer.persistent_parameters:
            whole[0].partition(whole)
            whole[0].all_gather(whole)
