"""The first layer of 8-bit RGB weights, for a model that reads images of other channels."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from pipeline.architecture.config import ChannelRule, Config
from pipeline.architecture.pixels import RGB_CHANNELS
from pipeline.base.errors import UserError
from pipeline.model.convert.preprocessing import fold_normalisation
from pipeline.model.layers import lecun_normal


def first_layer(state: Collection[str]) -> str:
    """The beginning of the names of the layer that reads the pixels. state: names of a model's tensors."""
    layers = ("root.", "stem.root.", "patch_embedding.")
    return next(layer for layer in layers if f"{layer}weight" in state)


def with_channels(
    state: Mapping[str, Tensor], old: Config, new: Config, rule: ChannelRule, seed: int
) -> tuple[dict[str, Tensor], str]:
    """(the state dict with the kernel that reads `new.pixels`, a line about it), of a model of 8-bit RGB. Raises
    UserError.

    auto: channels named red, green or blue keep theirs, others get the mean of the three, all times 3 / C; a single
    channel gets the sum.
    repeat: red, green, blue, red, ..., times 3 / C. zero, random: named channels keep theirs, others begin at 0, or as
    in a new model. The patch embedding's bias takes up another mean and deviation of the pixels; a stem of convolutions
    has none.
    """
    layer = first_layer(state)
    name, bias_name = f"{layer}weight", f"{layer}bias"
    kernel = state[name].clone()
    bias = state[bias_name].clone() if bias_name in state else None
    if bias is not None:
        fold_normalisation(kernel, bias, old.pixels.mean, old.pixels.std)
    channels = new.pixels.channels
    named = {place: RGB_CHANNELS.index(name) for place, name in enumerate(channels) if name in RGB_CHANNELS}
    count = len(channels)
    if rule == "zero" and not named:
        raise UserError(
            f"init.channels = zero, and none of the channels ({', '.join(channels)}) is red, green or blue: the model"
            " would see nothing. Use init.channels=auto."
        )
    if rule == "repeat" or (rule == "auto" and count == 1):
        named = {}
    found = torch.zeros(len(kernel), count, *kernel.shape[2:])
    if rule == "random":
        lecun_normal(found, torch.Generator("cpu").manual_seed(seed))
    elif rule != "zero":
        found[:] = kernel[:, torch.arange(count) % 3] if rule == "repeat" else kernel.mean(1, keepdim=True)
    for place, colour in named.items():
        found[:, place] = kernel[:, colour]
    if rule in ("repeat", "auto"):
        found *= 3 / count
    if bias is not None:
        half = (0.5,) * count
        fold_normalisation(found, bias, half, half, new.pixels.mean, new.pixels.std)
    added = {name: found} if bias is None else {name: found, bias_name: bias}
    kept = ", ".join(channels[place] for place in named) or "none"
    return (
        {**state, **added},
        (
            f"the first layer of 8-bit RGB weights reads {new.pixels} by init.channels = {rule} (channels that keep"
            f" their own: {kept})"
        ),
    )
