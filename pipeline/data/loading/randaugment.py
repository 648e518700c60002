"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719) as the later ViT recipes use it, on uint8 (S, S, 3).

Operations, their order, their strength at each magnitude and the fill of 128 are those of big_vision
(pp/archive/autoaugment.py, `distort_image_with_randaugment`): a *level* of 1 is magnitude 10, and the recipes go to 20.
Two side effects of its TensorFlow code are always reproduced, because the published results were made with them (both
observed by running its operations under TensorFlow 2.12):

- Solarize's threshold of 256 x level wraps round in uint8, so that it inverts the whole image at magnitude 10 and 20;
- Posterize keeps 4 x level bits, but never less than one.

A third one is a choice, `ContrastGrey`. Its Contrast means to blend with the mean of the grey image, but sums the
histogram's counts and divides by 256, which gives height x width / 256 for every image: 196 at 224 px, white (255) from
256 px on, nearly black at 32 px. The code was copied from tensorflow/tpu (efficientnet/autoaugment.py), which does the
same; the mistake is described in issue 109 of google-research/big_vision, and a version of the file corrects it.

Pixels of translations and of Cutout are given for 224 px, and stay the same share of the side at other sizes.
"""

from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np

DRAWS_PER_LAYER = 3
_FILL = 128
# Big_vision's constants, in pixels, for the 224 px of its recipes.
_TRANSLATE, _CUTOUT, _AT_SIDE = 100, 40, 224
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's ImageFilter.SMOOTH
# Added before OpenCV rounds to nearest, it makes it drop the fraction, as TensorFlow and Pillow do: of thirteenths
# exactly; of a blend but for fractions above 0.999, so that 18.9999 of float32 is the 19 that it stands for.
_DROP_THIRTEENTHS, _DROP_FRACTION = -6 / 13, -0.499

# (image (S, S, 3), level, two uniforms in [0, 1)) -> image (S, S, 3)
Operation = Callable[[np.ndarray, float, np.ndarray], np.ndarray]
# The grey that Contrast blends with: the image's mean, or height x width / 256.
ContrastGrey = Literal["mean", "pixel_count"]


def randaugment(
    image: np.ndarray, layers: int, magnitude: float, draws: np.ndarray, contrast_grey: ContrastGrey = "mean"
) -> np.ndarray:
    """Apply `layers` operations, each chosen from the sixteen, to `image`, uint8 (S, S, 3), which is not modified.

    magnitude: 0 to 20; the same for all operations. draws: layers x DRAWS_PER_LAYER uniforms in [0, 1).
    """
    operations = list((OPERATIONS if contrast_grey == "mean" else PIXEL_COUNT_OPERATIONS).values())
    for of_layer in draws.reshape(layers, DRAWS_PER_LAYER):
        image = operations[int(of_layer[0] * len(operations))](image, magnitude / 10, of_layer[1:])
    return image


# ---------------------------------------------------------------------- of single values: one table for each channel
def auto_contrast(image: np.ndarray) -> np.ndarray:
    """Stretch each channel to 0-255, as Pillow's ImageOps.autocontrast."""
    tables = [_stretch(histogram) for histogram in _histograms(image)]
    return cv2.LUT(image, np.stack(tables, axis=-1)[None])


def equalize(image: np.ndarray) -> np.ndarray:
    """Flatten each channel's histogram, as Pillow's ImageOps.equalize."""
    tables = [_flatten(histogram) for histogram in _histograms(image)]
    return cv2.LUT(image, np.stack(tables, axis=-1)[None])


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the highest `bits` bits, 1 to 8, as Pillow's ImageOps.posterize."""
    return _map(image, _values() & (0xFF << (8 - bits)))


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values from `threshold` on, as Pillow's ImageOps.solarize."""
    return _map(image, np.where(_values() < threshold, _values(), 255 - _values()))


def solarize_add(image: np.ndarray, amount: int) -> np.ndarray:
    """Add `amount` to the values below 128."""
    return _map(image, np.where(_values() < 128, _values() + amount, _values()))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with black, as Pillow's ImageEnhance.Brightness: 0 is black, 1 the image."""
    return _map(image, _fractions() * np.float32(factor))


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean grey, its fraction dropped (Pillow's ImageEnhance.Contrast rounds it)."""
    greys = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    grey = int(cv2.sumElems(greys)[0]) // greys.size  # cv2.mean says 103.999 of 104 everywhere.
    return _blend_with_grey(image, grey, factor)


def pixel_count_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey height x width / 256, at most 255, its fraction dropped: big_vision's Contrast."""
    return _blend_with_grey(image, min(image.shape[0] * image.shape[1] // 256, 255), factor)


# ---------------------------------------------------------------------- of colours and neighbours
def color(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey image, as Pillow's ImageEnhance.Color: 0 is grey, 1 the image, above that more colourful."""
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return _blend(grey, image, factor)


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the smoothed image, as Pillow's ImageEnhance.Sharpness: 0 is smooth, 1 the image; the border stays."""
    smooth = cv2.filter2D(image, -1, _SMOOTH, delta=_DROP_THIRTEENTHS)
    inner = slice(1, -1), slice(1, -1)
    border = image.copy()
    border[inner] = smooth[inner]
    return _blend(border, image, factor)


# ---------------------------------------------------------------------- of places: nearest pixel, grey where none is
def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """About the centre of the image; positive is counter-clockwise."""
    y, x = (image.shape[0] - 1) / 2, (image.shape[1] - 1) / 2
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return _warp(
        image,
        [[cos, -sin, x * (1 - cos + sin) + (y - x) * sin], [sin, cos, y * (1 - sin - cos) + (y - x) * sin]],
    )


def shear_x(image: np.ndarray, slope: float) -> np.ndarray:
    """Row y takes its pixels from x + slope * y."""
    return _warp(image, [[1, slope, 0], [0, 1, 0]])


def shear_y(image: np.ndarray, slope: float) -> np.ndarray:
    """Column x takes its pixels from y + slope * x."""
    return _warp(image, [[1, 0, 0], [slope, 1, 0]])


def translate_x(image: np.ndarray, pixels: float) -> np.ndarray:
    """To the left when positive."""
    return _warp(image, [[1, 0, pixels], [0, 1, 0]])


def translate_y(image: np.ndarray, pixels: float) -> np.ndarray:
    """Upwards when positive."""
    return _warp(image, [[1, 0, 0], [0, 1, pixels]])


def cutout(image: np.ndarray, half: int, row: int, column: int) -> np.ndarray:
    """A grey square of side 2 x `half` about (row, column), cut off at the border."""
    image = image.copy()
    image[max(0, row - half) : row + half, max(0, column - half) : column + half] = _FILL
    return image


def _enhance(level: float) -> float:
    return 1.8 * level + 0.1


def _sign(draws: np.ndarray) -> int:
    return 1 if draws[0] < 0.5 else -1


def _pixels(side: int, at_224: float) -> float:
    return at_224 * side / _AT_SIDE


def _center(image: np.ndarray, draws: np.ndarray) -> tuple[int, int]:
    return int(draws[0] * image.shape[0]), int(draws[1] * image.shape[1])


# Names, order and strengths: big_vision, `available_ops` and `level_to_arg`.
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, level, draws: auto_contrast(image),
    "Equalize": lambda image, level, draws: equalize(image),
    "Invert": lambda image, level, draws: cv2.bitwise_not(image),
    "Rotate": lambda image, level, draws: rotate(image, _sign(draws) * 30 * level),
    "Posterize": lambda image, level, draws: posterize(image, max(1, int(4 * level))),
    "Solarize": lambda image, level, draws: solarize(image, int(256 * level) % 256),
    "Color": lambda image, level, draws: color(image, _enhance(level)),
    "Contrast": lambda image, level, draws: contrast(image, _enhance(level)),
    "Brightness": lambda image, level, draws: brightness(image, _enhance(level)),
    "Sharpness": lambda image, level, draws: sharpness(image, _enhance(level)),
    "ShearX": lambda image, level, draws: shear_x(image, _sign(draws) * 0.3 * level),
    "ShearY": lambda image, level, draws: shear_y(image, _sign(draws) * 0.3 * level),
    "TranslateX": lambda image, level, draws: translate_x(
        image, _sign(draws) * _pixels(image.shape[1], _TRANSLATE * level)
    ),
    "TranslateY": lambda image, level, draws: translate_y(
        image, _sign(draws) * _pixels(image.shape[0], _TRANSLATE * level)
    ),
    "Cutout": lambda image, level, draws: cutout(
        image, int(_pixels(min(image.shape[:2]), _CUTOUT * level)), *_center(image, draws)
    ),
    "SolarizeAdd": lambda image, level, draws: solarize_add(image, int(110 * level)),
}
# In the same order, since a key that is there keeps its place.
PIXEL_COUNT_OPERATIONS: dict[str, Operation] = OPERATIONS | {
    "Contrast": lambda image, level, draws: pixel_count_contrast(image, _enhance(level)),
}


def _values() -> np.ndarray:
    return np.arange(256)


def _fractions() -> np.ndarray:
    # As TensorFlow and Pillow: 1.9 x 10 is 19 in float32, and 18.999 when the float32 of 1.9 is taken on in float64.
    return np.arange(256, dtype=np.float32)


def _map(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Each value v of the image becomes table[v], cut to 0-255, its fraction dropped."""
    return cv2.LUT(image, np.clip(table, 0, 255).astype(np.uint8))


def _blend_with_grey(image: np.ndarray, grey: int, factor: float) -> np.ndarray:
    return _map(image, grey + (_fractions() - grey) * np.float32(factor))


def _blend(first: np.ndarray, second: np.ndarray, factor: float) -> np.ndarray:
    """first + factor x (second - first), cut to 0-255, its fraction dropped."""
    return cv2.addWeighted(second, factor, first, 1 - factor, _DROP_FRACTION)


def _warp(image: np.ndarray, matrix: list[list[float]]) -> np.ndarray:
    """matrix: (x, y) of the new image -> (x, y) in the old one."""
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    size = image.shape[1::-1]
    return cv2.warpAffine(image, np.array(matrix, np.float32), size, flags=flags, borderValue=(_FILL, _FILL, _FILL))


def _histograms(image: np.ndarray) -> list[np.ndarray]:
    """Three of int64 (256,)."""
    return [cv2.calcHist([image], [channel], None, [256], [0, 256]).ravel().astype(np.int64) for channel in range(3)]


def _stretch(histogram: np.ndarray) -> np.ndarray:
    """Table uint8 (256,) that maps the darkest value there is to 0 and the brightest to 255."""
    present = np.flatnonzero(histogram)
    low, high = int(present[0]), int(present[-1])
    if high <= low:
        return _values().astype(np.uint8)
    scale = 255.0 / (high - low)
    return np.clip(_values() * scale - low * scale, 0, 255).astype(np.uint8)


def _flatten(histogram: np.ndarray) -> np.ndarray:
    """Table uint8 (256,) that spreads the values so that each takes as much room as it has pixels."""
    step = int(histogram.sum() - histogram[np.flatnonzero(histogram)[-1]]) // 255
    if step == 0:
        return _values().astype(np.uint8)
    before = np.cumsum(histogram) - histogram
    return np.clip((before + step // 2) // step, 0, 255).astype(np.uint8)
