"""The values of decoded images: as they are cropped and resized, and as a picture to look at."""

import numpy as np

from pipeline.architecture.pixels import FULL_RANGE, Pixels
from pipeline.data.loading.decode import decode


def model_values(image: np.ndarray, pixels: Pixels, model: Pixels) -> np.ndarray:
    """`batch_values` for a model that reads images of `pixels`, by `Pixels.reading`; channels that these do not have
    are the model's mean.
    """
    values = batch_values(image, pixels, model.batch_type)
    if pixels.channels == model.channels:
        return values
    of_model = np.empty((*values.shape[:2], model.num_channels), values.dtype)
    of_model[:] = model.mean
    of_model[..., [model.channels.index(channel) for channel in pixels.channels]] = values
    return of_model


def batch_values(image: np.ndarray, pixels: Pixels, kind: str = "") -> np.ndarray:
    """(H, W, C) of `pixels.type` -> the same in `kind`: `pixels.batch_type` or float32. The image itself where nothing
    changes.

    To float32, values are scaled by the range in float64, clipped to [0, 1] and rounded. NaN and nodata become `low`.
    """
    kind = kind or pixels.batch_type
    is_missing = None if pixels.nodata is None else image == pixels.nodata
    if kind != "float32":
        if pixels.type == "bool":
            return np.multiply(image, 255, dtype=np.uint8)
        if is_missing is None:
            return image.astype(kind, copy=False)
        return np.where(is_missing, lowest(pixels), image).astype(kind)
    values = image.astype(np.float64)
    if image.dtype.kind == "f":
        is_missing = np.isnan(values) if is_missing is None else is_missing | np.isnan(values)
    values -= pixels.low
    values /= np.subtract(pixels.high, pixels.low)
    if is_missing is not None:
        values[is_missing] = 0
    return values.clip(0, 1, out=values).astype(np.float32)


def picture(data: bytes, pixels: Pixels) -> np.ndarray:
    """An image file as a picture to look at, uint8 (H, W, 3): see `to_rgb`. Raises DecodeError."""
    return to_rgb(batch_values(decode(data, pixels=pixels), pixels), pixels)


def lowest(pixels: Pixels) -> np.ndarray:
    """(C,) float64, the `low` of each channel among the values of a batch; rounded down where these are integers."""
    low = np.array(pixels.batch_range()[0])
    return low if pixels.batch_type == "float32" else np.floor(low).clip(*FULL_RANGE[pixels.batch_type])


def store(values: np.ndarray, out: np.ndarray) -> None:
    """Write float values (H, W, C) into a view: rounded and clipped to the limits of its integers, or clipped to [0,
    1].
    """
    if out.dtype.kind == "f":
        np.clip(values, 0, 1, out=out, casting="same_kind")
    else:
        limits = np.iinfo(out.dtype)
        out[:] = np.rint(values).clip(limits.min, limits.max)


def to_rgb(images: np.ndarray, pixels: Pixels) -> np.ndarray:
    """(..., H, W, C) of a batch -> uint8 (..., H, W, 3), a picture of `pixels.shown` by the recorded range and mean;
    8-bit RGB as it is.
    """
    if pixels.is_rgb8 and not pixels.is_clipped:
        return images
    shown = list(pixels.shown)
    low, high = (np.array(limits)[shown] for limits in pixels.batch_range())
    share = ((images[..., shown] - low) / (high - low)).clip(0, 1)
    return np.rint(255 * share**pixels.shown_power).astype(np.uint8)
