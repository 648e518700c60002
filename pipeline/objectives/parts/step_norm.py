"""BatchNorm over all ranks, for what an objective adds to a backbone.

Shapes: R rows, W width.
"""

import torch
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
