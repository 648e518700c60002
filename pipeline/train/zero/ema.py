"""Exponential moving average of the weights, sharded like the fp32 weights that a rank updates, and a teacher that
follows it.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from pipeline.objectives.objective import stored_name, trained_parameters
from pipeline.process.distributed import Ranks
from pipeline.train.zero import internals
from pipeline.train.zero.internals import OptimizerShard


class Ema:
    """mean = momentum * mean + (1 - momentum) * weights after every step that is not skipped; starts as the weights."""

    def __init__(self, shards: list[OptimizerShard]) -> None:
        self.weights = [shard.weights.detach() for shard in shards]
        self.mean: list[Tensor] = []
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Reset the mean to the current weights."""
        self.mean = [weights.clone() for weights in self.weights]

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        for mean, weights in zip(self.mean, self.weights, strict=True):
            mean.lerp_(weights, 1 - momentum)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange mean and weights bit for bit; a second call restores both."""
        for mean, weights in zip(self.mean, self.weights, strict=True):
            kept = weights.clone()
            weights.copy_(mean)
            mean.copy_(kept)


class Teacher:
    """The objective's teacher: frozen parameters in the precision of training, copied from the sharded fp32 average.

    At stages 0 and 3 a rank copies what it holds. At stages 1 and 2 it holds a part of the average and the whole
    teacher: then the teacher's parameters are views of flat tensors that are laid out as DeepSpeed's, and one
    collective call fills each.
    """

    def __init__(self, engine: Any, ema: Ema, shards: list[OptimizerShard], ranks: Ranks) -> None:
        self.ema, self.ranks = ema, ranks
        self.flats: list[Tensor] = []
        # (part of the teacher, number of the shard, first element in its mean), where no communication is needed.
        self.parts: list[tuple[Tensor, int, int]] = []
        # Stage 3: small parameters, which every rank holds.
        self.persistent: list[Any] = []
        # What is frozen is the backbone's own.
        averaged = {stored_name(name) for name, _ in trained_parameters(engine.module)}
        named = ((stored_name(name), parameter) for name, parameter in engine.module.teacher.named_parameters())
        parameters = {name: parameter for name, parameter in named if name in averaged}
        stage = engine.zero_optimization_stage()
        if stage in (1, 2):
            self._lay_out(shards, parameters)
            return
        for i, shard in enumerate(shards):
            for place in shard.places:
                if (parameter := parameters.get(place.name)) is not None:
                    held = internals.held_by(parameter).view(-1)[: place.length]
                    self.parts.append((held, i, place.offset))
        if stage == 3:
            ours = set(map(id, parameters.values()))
            self.persistent = [p for p in internals.persistent(engine) if id(p) in ours]

    def _lay_out(self, shards: list[OptimizerShard], parameters: dict[str, nn.Parameter]) -> None:
        """Make the parameters views of `self.flats`."""
        places = self.ranks.gather(
            [[(place.name, place.offset - place.start) for place in shard.places] for shard in shards]
        )
        some = next(iter(parameters.values()))
        for i, shard in enumerate(shards):
            length = shard.weights.numel()
            flat = torch.empty(length * self.ranks.world_size, dtype=some.dtype, device=some.device)
            self.flats.append(flat)
            begins = {
                name: rank * length + offset for rank, of_rank in enumerate(places) for name, offset in of_rank[i]
            }
            for name in begins.keys() & parameters.keys():
                parameter = parameters[name]
                view = flat[begins[name] : begins[name] + parameter.numel()].view(parameter.shape)
                view.copy_(parameter.data)
                parameter.data = view

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the average to the teacher. Collective at stages 1 and 2, and for small parameters at stage 3."""
        for flat, mean in zip(self.flats, self.ema.mean, strict=bool(self.flats)):
            own = flat.view(-1, mean.numel())[self.ranks.rank]
            own.copy_(mean)
            if self.ranks.world_size > 1:
                distributed.all_gather_into_tensor(flat, own)
        for held, i, offset in self.parts:
            held.copy_(self.ema.mean[i][offset : offset + held.numel()])
        internals.gather_persistent(self.persistent)
