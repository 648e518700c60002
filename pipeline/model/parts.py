"""Parts that later ViTs have and the paper's does not, each in the place of a layer of `vit.py`. Letters as there.

    layer_scale  ScaledDense           the last layer of each residual branch (DINOv2, DINOv3, DeiT III)
    qkv_bias     new_query_key_value   the layer of q, k and v (DINOv3: keys without a bias)

RoPE has a file of its own (`rope.py`); the gated MLP is beside the plain one in `vit.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.architecture.config import ViTConfig
from pipeline.model.layers import Dense


class ScaledDense(Dense):
    """A dense layer whose outputs are multiplied by learned factors: LayerScale (Touvron et al., arXiv 2103.17239).

    (..., D_in) -> (..., D_out)
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, initial: float):
        super().__init__(inputs, outputs, bias)
        self.scale = nn.Parameter(torch.full((outputs,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def new_output(config: ViTConfig, inputs: int, bias: bool) -> Dense:
    """The last layer of a residual branch, inputs -> D."""
    if config.layer_scale is None:
        return Dense(inputs, config.width, bias)
    return ScaledDense(inputs, config.width, bias, config.layer_scale)


class QueryValueBias(Dense):
    """D -> 3D, the layer of q, k and v with a bias (2D,) for q and v only."""

    def __init__(self, width: int):
        super().__init__(width, 3 * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.bias.chunk(2)
        return F.linear(x, self.weight, torch.cat([q, torch.zeros_like(q), v]))


def new_query_key_value(config: ViTConfig) -> Dense:
    """The layer of q, k and v, D -> 3D. Rows: all of q, all of k, all of v."""
    width, has_bias = config.width, config.qkv_bias == "qkv"
    layer = QueryValueBias(width) if config.qkv_bias == "qv" else Dense(width, 3 * width, has_bias)
    layer.num_kernels = 3
    return layer


def gelu(x: Tensor, kind: str) -> Tensor:
    """GELU: exact ("erf"), its tanh approximation ("tanh"), or x sigmoid(1.702 x) ("quick", as in CLIP)."""
    if kind == "quick":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")
