"""The head of DINO: a projection of features, and its similarity to learned prototypes.

Shapes: B batch, D width of the backbone, K prototypes.
"""

import torch.nn.functional as F
from torch import Tensor, nn

_STD = 0.02  # Initial values: normal, truncated at 2.


class Prototypes(nn.Module):
    """Cosine similarity to K directions: a dense layer without bias whose rows are normalised, and so have the fixed
    gain 1.
    """

    def __init__(self, width: int, prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, prototypes, bias=False).weight
        _initialise(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, K), in [-1, 1]"""
        directions, units = (F.normalize(vectors.float(), dim=1).to(x.dtype) for vectors in (self.weight, x))
        return F.linear(units, directions)


class DinoHead(nn.Module):
    """Dense, GELU, dense, GELU, dense, then `Prototypes` (DINO, section 3.2): (B, D) -> (B, K)."""

    def __init__(self, inputs: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                _initialise(layer.weight)
                nn.init.zeros_(layer.bias)
        self.last = Prototypes(bottleneck, prototypes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mlp(x))


def _initialise(weight: Tensor) -> None:
    if not weight.is_meta:  # Values are drawn until they are in range, and those of the meta device never are.
        nn.init.trunc_normal_(weight, std=_STD)
