"""BatchNorm over all ranks, and a projector with it, for what an objective adds to a backbone.

Shapes: R rows, W width.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.objectives.parts.across_ranks import summed, total

_EPS = 1e-5  # As torch's.


class StepNorm(nn.Module):
    """BatchNorm with the statistics of this step's rows on all ranks, and no running ones: heads are only trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        """(R, W), bool (R,): the rows that count -> (R, W). Computed in float32. Collective."""
        rows, kept = x.float(), counted.float()
        number = summed(kept.sum()).clamp(min=1)
        centred = rows - total(kept @ rows) / number
        variance = total(kept @ centred.square()) / number
        return (centred * (variance + _EPS).rsqrt()).to(x.dtype) * self.weight + self.bias


class Projector(nn.Module):
    """An MLP that ends in a dense layer: dense, BatchNorm, ReLU for each hidden one. (R, W) -> (R, `width`)."""

    def __init__(self, inputs: int, hidden: int, width: int, hidden_layers: int = 2) -> None:
        super().__init__()
        widths = [inputs, *[hidden] * hidden_layers]
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in pairwise(widths)])
        self.norms = nn.ModuleList([StepNorm(hidden) for _ in self.layers])
        self.last = nn.Linear(hidden, width)

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        """counted: bool (R,), the rows that statistics are of."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x), counted))
        return self.last(x)
