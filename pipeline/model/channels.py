"""The first layer of 8-bit RGB weights, for a model that reads images of other channels."""

from collections.abc import Collection, Mapping

from torch import Tensor

from pipeline.architecture.config import Config
from pipeline.architecture.pixels import RGB_CHANNELS
from pipeline.model.convert.preprocessing import fold_normalisation


def first_layer(state: Collection[str]) -> str:
    """The beginning of the names of the layer that reads the pixels. state: names of a model's tensors."""
    layers = ("root.", "stem.root.", "patch_embedding.")
    return next(layer for layer in layers if f"{layer}weight" in state)


def with_channels(state: Mapping[str, Tensor], old: Config, new: Config) -> tuple[dict[str, Tensor], str]:
    """(the state dict with the kernel that reads `new.pixels`, a line about it), of a model of 8-bit RGB.

    Channels named red, green or blue keep theirs, others get the mean of the three, all times 3 / C; a single channel
    gets the sum. The patch embedding's bias takes up another mean and deviation of the pixels; a stem of convolutions
    has none.
    """
    layer = first_layer(state)
    name, bias_name = f"{layer}weight", f"{layer}bias"
    kernel = state[name].clone()
    bias = state[bias_name].clone() if bias_name in state else None
    if bias is not None:
        fold_normalisation(kernel, bias, old.pixels.mean, old.pixels.std)
    channels = new.pixels.channels
    count = len(channels)
    named = {place: RGB_CHANNELS.index(name) for place, name in enumerate(channels) if name in RGB_CHANNELS}
    if count == 1:
        named = {}
    found = kernel.mean(1, keepdim=True).repeat(1, count, *[1] * (kernel.ndim - 2))
    for place, colour in named.items():
        found[:, place] = kernel[:, colour]
    found *= 3 / count
    if bias is not None:
        half = (0.5,) * count
        fold_normalisation(found, bias, half, half, new.pixels.mean, new.pixels.std)
    added = {name: found} if bias is None else {name: found, bias_name: bias}
    kept = ", ".join(channels[place] for place in named) or "none"
    note = f"the first layer of 8-bit RGB weights reads {new.pixels} (channels that keep their own: {kept})"
    return {**state, **added}, note
