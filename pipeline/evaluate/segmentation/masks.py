"""Masks: images whose pixels are classes. Shapes: H, W height and width, K classes."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import hsv_to_rgb
from PIL import Image

from pipeline.base.errors import UserError
from pipeline.data.loading.decode import DecodeError, with_pillow

# Pixels without a class, in arrays of class numbers.
NO_CLASS = -1
# Added to a colour, to tell it from a class number.
_COLOUR = 1 << 24
# The largest number that a PNG of 16 bits holds.
_MAX_NUMBER = 2**16 - 1
# More different values than any published data set has classes: a photograph, or a mask with smoothed borders.
_MAX_VALUES = 1000
# Formats that keep the values of pixels; of PGM, Pillow stretches them.
_FORMATS = {"PNG", "TIFF", "BMP", "GIF"}
_MODES = {"1", "L", "LA", "P", "PA", "I", "RGB", "RGBA"}  # and those of 16 bits, I;16 and others


def decode_mask(data: bytes) -> np.ndarray:
    """The value of each pixel of a mask file, int32 (H, W): its number, also in a palette, or 0x1RRGGBB for a colour;
    alpha is dropped.

    Raises DecodeError for bytes that are not an image, formats that may change values, and pixels that are
    floating-point, negative or above 65,535.
    """
    values: np.ndarray = with_pillow(data, _values)
    return values


def _values(image: Image.Image) -> np.ndarray:
    if image.format not in _FORMATS:
        raise DecodeError(f"{image.format} may not keep the values of a mask: give PNG files")
    if image.mode not in _MODES and not image.mode.startswith("I;16"):
        raise DecodeError(f"a mask has numbers or colours, not Pillow's mode {image.mode}")
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[2] >= 3:
        red, green, blue = np.moveaxis(pixels[..., :3], 2, 0).astype(np.int32)
        return _COLOUR + (red << 16 | green << 8 | blue)
    numbers = (pixels if pixels.ndim == 2 else pixels[..., 0]).astype(np.int32)
    if numbers.min() < 0 or numbers.max() > _MAX_NUMBER:
        raise DecodeError(f"values from {numbers.min():,} to {numbers.max():,} are not class numbers")
    return numbers


@dataclass(frozen=True)
class MaskClasses:
    """The K classes of masks, by the values of their pixels.

    values: int32 (K,), ascending, as `decode_mask` returns them; a pixel with another value has no class.
    """

    values: np.ndarray

    @property
    def names(self) -> list[str]:
        """The values as text."""
        return [value_text(value) for value in self.values.tolist()]

    def colours(self) -> np.ndarray:
        """uint8 (K, 3): those of the masks, or some that differ where the masks have numbers."""
        if self.values[0] >= _COLOUR:
            return np.stack([self.values >> 16 & 255, self.values >> 8 & 255, self.values & 255], 1).astype(np.uint8)
        # Hues at steps of the golden ratio: neighbours differ, whatever their number.
        places = np.arange(len(self.values))
        hsv = np.stack([places * 0.618034 % 1, 0.85 - 0.3 * (places % 3 == 1), 0.95 - 0.3 * (places % 3 == 2)], 1)
        return (hsv_to_rgb(hsv) * 255).round().astype(np.uint8)

    def numbers(self, mask: np.ndarray) -> np.ndarray:
        """int32 (H, W) values -> int16 (H, W) numbers of classes, NO_CLASS where there is none."""
        places = np.searchsorted(self.values, mask).clip(max=len(self.values) - 1)
        return np.where(self.values[places] == mask, places, NO_CLASS).astype(np.int16)

    def encoded(self, numbers: np.ndarray) -> bytes:
        """int16 (H, W) numbers of classes -> a PNG that `decode_mask` reads as their values."""
        kind = np.uint8 if self.values[-1] < 256 else np.uint16
        values = self.colours() if self.values[0] >= _COLOUR else self.values.astype(kind)
        image = Image.fromarray(values[numbers])
        image.save(buffer := io.BytesIO(), "PNG")
        return buffer.getvalue()


def find_classes(found: Iterable[int], ignore: Sequence[str]) -> MaskClasses:
    """The classes of masks: all values that occur, without those to ignore.

    found: values of pixels. ignore: values, as text. Raises UserError for fewer than two classes, too many, and numbers
    beside colours.
    """
    values = set(found)
    kept = sorted(values - {parse_value(text) for text in ignore})
    if len(kept) > _MAX_VALUES:
        raise UserError(
            f"masks has {len(kept):,} different values: these are photographs, or masks whose borders were smoothed. "
            "A mask has the number of its class in each pixel, or one colour for each class."
        )
    if kept and kept[0] < _COLOUR <= kept[-1]:
        raise UserError(
            f"some masks have numbers, such as {value_text(kept[0])}, and some have colours, such as"
            f" {value_text(kept[-1])}. Give masks of one kind."
        )
    if len(kept) < 2:
        raise UserError(
            f"masks has the values {', '.join(map(value_text, sorted(values)))}, and ignore = {', '.join(ignore)}"
            f" leaves {len(kept)} of the at least two classes that are needed: set ignore=[] if each value is a class."
        )
    return MaskClasses(np.array(kept, np.int32))


def value_text(value: int) -> str:
    """A value of a mask as it is shown, and as `ignore` accepts it."""
    return f"#{value - _COLOUR:06x}" if value >= _COLOUR else str(value)


def parse_value(text: str) -> int:
    """The inverse of `value_text`."""
    return _COLOUR + int(text[1:], 16) if text.startswith("#") else int(text)
