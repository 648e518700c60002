"""The first layer of 8-bit RGB weights, for a model that reads images of other channels."""

from collections.abc import Mapping

from torch import Tensor

from pipeline.architecture.config import Config
from pipeline.architecture.pixels import RGB_CHANNELS
from pipeline.model.convert.preprocessing import fold_normalisation


def with_channels(state: Mapping[str, Tensor], old: Config, new: Config) -> tuple[dict[str, Tensor], str]:
    """(the state dict with the kernel that reads `new.pixels`, a line about it), of a model of 8-bit RGB.

    Channels named red, green or blue keep theirs, others get the mean of the three, all times 3 / C; a single channel gets the sum.
    The patch embedding's bias takes up another mean and deviation of the pixels; a stem of convolutions has none.
    """
    name = next(name for name in ("root.weight", "stem.root.weight", "patch_embedding.weight") if name in state)
    bias_name = name.replace("weight", "bias")
    kernel = state[name].clone()
    bias = state[bias_name].clone() if bias_name in state else None
    if bias is not None:
        fold_normalisation(kernel, bias, old.pixels.mean, old.pixels.std)
    channels = new.pixels.channels
    count = len(channels)
    named = [place for place, channel in enumerate(channels) if channel in RGB_CHANNELS and count > 1]
    found = kernel.mean(1, keepdim=True).repeat(1, count, 1, 1)
    for place in named:
        found[:, place] = kernel[:, RGB_CHANNELS.index(channels[place])]
    found *= 3 / count
    if bias is not None:
        half = (0.5,) * count
        fold_normalisation(found, bias, half, half, new.pixels.mean, new.pixels.std)
    added = {name: found} if bias is None else {name: found, bias_name: bias}
    kept = ", ".join(channels[place] for place in named) or "none"
    return {**state, **added}, (
        f"the first layer of 8-bit RGB weights reads {new.pixels} (channels that keep their own: {kept})"
    )
