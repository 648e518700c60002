"""Parts that the ViT and the ResNets share: their base, the dense layer, initialisation, activation checkpointing,
input checks; and those that later ViTs have and the paper's does not, each in the place of a layer of `vit.py`:

    layer_scale  ScaledDense           the last layer of each residual branch (DINOv2, DINOv3, DeiT III)
    qkv_bias     new_query_key_value   the layer of q, k and v (DINOv3: keys without a bias)
"""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.architecture.config import Config, ViTConfig

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image


class ImageModel(nn.Module):
    """What all models have beside their tensors: names of classes, and how an image becomes their input.

    extra: what the weights say of images and classes, plain data: as of `save`; empty for a new model.
    """

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.extra: dict[str, Any] = {}

    @property
    def classes(self) -> list[str] | None:
        """Class names in the order of the logits, readable ones where the weights have some; None if they name none."""
        return self.extra.get("class_names") or self.extra.get("classes")

    def preprocess(self, image: "str | Path | Image | np.ndarray") -> Tensor:
        """float32 (C, height, width) on the CPU, the model's input: bit for bit as `launch/evaluate.py` reads images.

        image: a file of any format that is read, a PIL image, or an array (H, W), (H, W, C) or (C, H, W) of the type
        of the model's images, `uint8` for photographs. Raises UserError, a ValueError, for images that cannot be read.
        """
        # The only import of a room above: this one alone needs more than torch and numpy.
        from pipeline.data.loading.single_image import model_input

        return model_input(image, self.config, self.extra.get("preprocessing", {}))


class Dense(nn.Linear):
    """A linear layer with zero bias and an uninitialised kernel, which the model's `initialize` sets.

    torch's own initialisation would draw from the global generator.
    """

    num_kernels = 1  # in its weight, one below the other

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)


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


def layer_norm(config: ViTConfig) -> nn.LayerNorm:
    """Of tokens, (..., D)."""
    return nn.LayerNorm(config.width, eps=config.layer_norm_eps)


def lecun_normal(kernel: Tensor, generator: torch.Generator) -> None:
    """Normal with variance 1/fan_in, truncated at two sigma and rescaled to keep the variance (as in Flax)."""
    fan_in = kernel[0].numel()
    std = fan_in**-0.5 / 0.87962566  # the std of a unit normal truncated at +-2
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std, generator=generator)


def initialize_head(head: nn.Module, bias: float) -> None:
    """Zero kernel, constant bias; no-op for a model without a head (nn.Identity)."""
    if isinstance(head, Dense):
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, bias)


def attention(q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D/H) + logits) v in each head: (B, H, N, D/H) each -> the same; logits: (B, H, N, N)."""
    is_slow = (
        q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling()
    )
    if is_slow and torch.is_grad_enabled():
        return cast(Tensor, _SixteenBitAttention.apply(q, k, v, logits))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=logits)


class _SixteenBitAttention(torch.autograd.Function):
    """Attention in bf16 or fp16 on a CPU, its gradients computed in fp32.

    torch's kernel for the gradients takes 3 times as long in bf16 for 64 tokens, the conversions included, and as long
    for 577 (torch 2.13, with AMX). Computing the attention again from 16 bits keeps no more memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, logits)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *added = inputs = [x.detach().float().requires_grad_() for x in ctx.saved_tensors if x is not None]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=added[0] if added else None)
        found = [x.to(gradient.dtype) for x in torch.autograd.grad(out, inputs, gradient.float())]
        return *found, *[None] * (4 - len(found))


def run_block(block: nn.Module, x: Tensor, recompute: bool, *more: Any) -> Tensor:
    """block(x, *more). recompute: drop its activations and compute them again in the backward pass (activation
    checkpointing).
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, x, *more, use_reentrant=False)
    return block(x, *more)


def take_tokens(tokens: Tensor, numbers: Tensor) -> Tensor:
    """(B, N, D) tokens, int64 (B, K) -> (B, K, D): those with these numbers in each image.

    A selection of rows, because the gradient of `gather` is summed element by element: deterministic kernels of a GPU
    sort its B * K * D places, which takes gigabytes, and here B * K.
    """
    B, N, D = tokens.shape
    rows = N * torch.arange(B, device=tokens.device)[:, None] + numbers
    return tokens.reshape(B * N, D).index_select(0, rows.flatten()).view(*numbers.shape, D)


def patches_of(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, height, width) -> (B, N, P P C): patches row by row, the values of each in the order row, column, channel.

    Pixels at the right and at the bottom that fill no patch are left out.
    """
    rows, columns = (side // patch_size for side in images.shape[2:])
    covered = images[:, :, : rows * patch_size, : columns * patch_size]
    cut = covered.unflatten(3, (columns, patch_size)).unflatten(2, (rows, patch_size))  # (B, C, rows, P, columns, P)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def kernel_names(model: nn.Module) -> set[str]:
    """Names of the kernels of dense layers and convolutions, the only parameters with weight decay.

    Biases, norms, class token and positions have none (big_vision/optax.py: wd_mults = `.*/kernel$`).
    """
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}


def check_images(images: Tensor, channels: int, image_size: tuple[int, int] | None) -> None:
    """Raises ValueError for images that are not (B, channels, height, width) or not floats. image_size: None is any."""
    expected = (channels, *(images.shape[2:] if image_size is None else image_size))
    if images.shape[1:] != expected or images.ndim != 4:
        raise ValueError(
            f"images are {tuple(images.shape)}, but this model reads (B, {', '.join(map(str, expected))}). "
            f"Resize the images, or load the weights with image_size=(height, width)."
        )
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}, but this model reads floats, of 8-bit RGB x / 127.5 - 1.")
