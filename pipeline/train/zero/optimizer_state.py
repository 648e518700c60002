"""This rank's part of the optimizer's state: which of a shard's ranges it saves, and states made, read and reset."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.checkpoint.sharded_tensors import WEIGHTS
from pipeline.train.zero.internals import OptimizerShard


def states(optimizer: Optimizer, shards: list[OptimizerShard]) -> dict[str, list[Tensor]]:
    """Return live flat tensors by state, one per shard: the weights, and the optimizer's states that exist so far.

    What a shard lacks is zeros without memory.
    """
    found = {WEIGHTS: [shard.weights for shard in shards]}
    of_optimizer = optimizer.state
    most = max(shards, key=lambda shard: len(of_optimizer.get(shard.key, {})))
    for key, value in of_optimizer.get(most.key, {}).items():
        if torch.is_tensor(value) and value.numel() == most.weights.numel() and key != "step":
            found[key] = [
                torch.zeros((), device=shard.weights.device).expand(shard.weights.numel())
                if lacks(optimizer, shard, key)
                else of_optimizer[shard.key][key].view(-1)
                for shard in shards
            ]
    return found


def lacks(optimizer: Optimizer, shard: OptimizerShard, state: str) -> bool:
    """Whether the optimizer keeps no such state of a shard: Muon has no second moment."""
    groups = optimizer.param_groups
    return state in ("exp_avg_sq", "step") and any(
        group.get("matrices") and any(p is shard.key for p in group["params"]) for group in groups
    )


def begin_states(optimizer: Optimizer, shards: list[OptimizerShard], names: list[str], steps: int | None) -> None:
    """Create the states that an optimizer creates at its first step, to load into.

    steps: optimizer steps done; None if the optimizer does not count them.
    """
    for shard in shards:
        state = optimizer.state[shard.key]
        for name in names:
            if name != WEIGHTS and name not in state and not lacks(optimizer, shard, name):
                state[name] = torch.zeros_like(shard.key, memory_format=torch.preserve_format, requires_grad=False)
        if steps is not None and not lacks(optimizer, shard, "step"):
            # A fused kernel reads it where the weights are; torch's other optimizers count on the host.
            fused = any(group.get("fused") for group in optimizer.param_groups)
            state["step"] = torch.tensor(float(steps), device=shard.key.device if fused else "cpu")


def zero_states(optimizer: Optimizer) -> None:
    """Reset the optimizer's states to zero, in place: DeepSpeed's parameters hold views of them."""
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def optimizer_steps(optimizer: Optimizer, shards: list[OptimizerShard]) -> int | None:
    """Return the optimizer's step count, the same for all shards; None if it has none (SGD)."""
    counted = {int(optimizer.state[s.key]["step"]) for s in shards if "step" in optimizer.state.get(s.key, {})}
    assert len(counted) < 2, counted
    return counted.pop() if counted else None
