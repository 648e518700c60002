"""What every model here is made of: a dense layer, initial values, and a look at the images that come in."""

import torch
from torch import Tensor, nn


class Dense(nn.Linear):
    """A linear layer whose values the model's `initialize` sets: nothing is drawn from the global generator."""

    def reset_parameters(self) -> None:
        pass


def lecun_normal(kernel: Tensor, generator: torch.Generator) -> None:
    """Normal with variance 1/fan_in, cut at two sigma, widened so that the variance holds after the cut (flax's)."""
    fan_in = kernel[0].numel()
    std = fan_in**-0.5 / 0.87962566  # the std of a unit normal cut at +-2
    nn.init.trunc_normal_(kernel, std=std, a=-2 * std, b=2 * std, generator=generator)


def check_images(images: Tensor, image_size: tuple[int, int]) -> None:
    """Raises ValueError for images that are not (B, 3, height, width) or not floats."""
    expected = (3, *image_size)
    if images.shape[1:] != expected or images.ndim != 4:
        raise ValueError(
            f"images are {tuple(images.shape)}, but this model reads (B, {', '.join(map(str, expected))}). "
            f"Resize the images, or load the weights with image_size=(height, width)."
        )
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}, but this model reads floats in [-1, 1]: x / 127.5 - 1.")
