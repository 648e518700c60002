"""Parts that the ViT and the ResNets share: the dense layer, initialisation, activation checkpointing, input checks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Dense(nn.Linear):
    """A linear layer with zero bias and an uninitialised kernel, which the model's `initialize` sets.

    torch's own initialisation would draw from the global generator.
    """

    num_kernels = 1  # in its weight, one below the other

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)


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


def run_block(block: nn.Module, x: Tensor, recompute: bool, *more: Any) -> Tensor:
    """block(x, *more). recompute: drop its activations and compute them again in the backward pass (activation checkpointing)."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, x, *more, use_reentrant=False)
    return block(x, *more)


def take_tokens(tokens: Tensor, numbers: Tensor) -> Tensor:
    """(B, N, D) tokens, int64 (B, K) -> (B, K, D): those with these numbers in each image.

    A selection of rows, because the gradient of `gather` is summed element by element: deterministic kernels of a GPU sort its
    B * K * D places, which takes gigabytes, and here B * K.
    """
    B, N, D = tokens.shape
    rows = N * torch.arange(B, device=tokens.device)[:, None] + numbers
    return tokens.reshape(B * N, D).index_select(0, rows.flatten()).view(*numbers.shape, D)


def kernel_names(model: nn.Module) -> set[str]:
    """Names of the kernels of dense layers and convolutions, the only parameters with weight decay.

    Biases, norms, class token and positions have none (big_vision/optax.py: wd_mults = `.*/kernel$`).
    """
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}


def check_images(images: Tensor, image_size: tuple[int, int] | None) -> None:
    """Raises ValueError for images that are not (B, 3, height, width) or not floats. image_size: None is any."""
    expected = (3, *(images.shape[2:] if image_size is None else image_size))
    if images.shape[1:] != expected or images.ndim != 4:
        raise ValueError(
            f"images are {tuple(images.shape)}, but this model reads (B, {', '.join(map(str, expected))}). "
            f"Resize the images, or load the weights with image_size=(height, width)."
        )
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}, but this model reads floats in [-1, 1]: x / 127.5 - 1.")
