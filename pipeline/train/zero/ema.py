"""Exponential moving average of the weights, sharded like the fp32 weights that a rank updates."""

import torch
from torch import Tensor

from pipeline.train.zero.layout import OptimizerShard


class Ema:
    """mean = decay * mean + (1 - decay) * weights after every step that is not skipped; starts as the weights."""

    def __init__(self, shards: list[OptimizerShard], decay: float) -> None:
        self.weights = [shard.weights.detach() for shard in shards]
        self.decay = decay
        self.mean: list[Tensor] = []
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Reset the mean to the current weights."""
        self.mean = [weights.clone() for weights in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        for mean, weights in zip(self.mean, self.weights, strict=True):
            mean.lerp_(weights, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange mean and weights bit for bit; a second call restores both."""
        for mean, weights in zip(self.mean, self.weights, strict=True):
            kept = weights.clone()
            weights.copy_(mean)
            mean.copy_(kept)
