"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719) as the later ViT recipes use it, on uint8 (S, S, 3).

Operations, their order, their strength at each magnitude and the fill value 128 are those of big_vision
(pp/archive/autoaugment.py); its *level* is magnitude / 10, and recipes use magnitudes up to
20. Two side effects of its TensorFlow code are always reproduced, because the published results include them (both
    observed
by running its operations under TensorFlow 2.12):

- Solarize's threshold of 256 x level overflows uint8, so that magnitudes 10 and 20 invert the whole image;
- Posterize keeps 4 x level bits, but at least one.

A third one is optional, `ContrastGrey`. Contrast is meant to blend with the mean of the grey image, but sums the
histogram's counts and divides by 256, which gives height x width / 256 for every image: 196 at 224 px, white (255) from
256 px on, nearly black at 32 px. The code was copied from tensorflow/tpu (efficientnet/autoaugment.py), which has the
same error; issue 109 of google-research/big_vision describes it, and a version of the file corrects it.

Translations and Cutout are given in pixels of a 224 px image, and scale with the side of the image.
"""

from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np

DRAWS_PER_LAYER = 3
_FILL = 128
_VALUES = np.arange(256)
# float32 as in TensorFlow and Pillow: 1.9 x 10 is 19 there, but 18.999 when the float32 of 1.9 is multiplied in
# float64.
_FLOAT_VALUES = np.arange(256, dtype=np.float32)
# big_vision's constants, in pixels of its 224 px images.
_TRANSLATE, _CUTOUT, _AT_SIDE = 100, 40, 224
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's ImageFilter.SMOOTH
# Added before OpenCV rounds to nearest, these truncate the fraction as TensorFlow and Pillow do: thirteenths exactly; a
# blend except for fractions above 0.999, so that 18.9999, the float32 error of 19, becomes 19.
_DROP_THIRTEENTHS, _DROP_FRACTION = -6 / 13, -0.499

# (image (S, S, 3), level, two uniform numbers in [0, 1)) -> image (S, S, 3)
Operation = Callable[[np.ndarray, float, np.ndarray], np.ndarray]
# The grey value that Contrast blends with: the image's mean, or height x width / 256.
ContrastGrey = Literal["mean", "pixel_count"]


def randaugment(
    image: np.ndarray, layers: int, magnitude: float, draws: np.ndarray, contrast_grey: ContrastGrey = "mean"
) -> np.ndarray:
    """Apply `layers` random operations out of sixteen to a copy of `image`, uint8 (S, S, 3).

    magnitude: 0 to 20, the same for all operations. draws: layers x DRAWS_PER_LAYER uniform numbers in [0, 1).
    """
    operations = list((OPERATIONS if contrast_grey == "mean" else PIXEL_COUNT_OPERATIONS).values())
    for of_layer in draws.reshape(layers, DRAWS_PER_LAYER):
        image = operations[int(of_layer[0] * len(operations))](image, magnitude / 10, of_layer[1:])
    return image


# ---------------------------------------------------------------------- operations on single values: one table per
# channel
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
    return _map(image, _VALUES & (0xFF << (8 - bits)))


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values at or above `threshold`, as Pillow's ImageOps.solarize."""
    return _map(image, np.where(threshold > _VALUES, _VALUES, 255 - _VALUES))


def solarize_add(image: np.ndarray, amount: int) -> np.ndarray:
    """Add `amount` to the values below 128."""
    return _map(image, np.where(_VALUES < 128, _VALUES + amount, _VALUES))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with black, as Pillow's ImageEnhance.Brightness; factor 0 gives black, 1 the image."""
    return _map(image, _FLOAT_VALUES * np.float32(factor))


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean grey, truncated to an integer (Pillow's ImageEnhance.Contrast rounds it)."""
    greys = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    mean = int(cv2.sumElems(greys)[0]) // greys.size  # cv2.mean returns 103.999 for a constant 104.
    return _blend_with_grey(image, mean, factor)


def pixel_count_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey height x width / 256, truncated, at most 255: big_vision's Contrast."""
    return _blend_with_grey(image, min(image.shape[0] * image.shape[1] // 256, 255), factor)


# ---------------------------------------------------------------------- operations on colours and neighbouring pixels
def grey(image: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) -> the same with each pixel's luma (ITU-R 601) in all channels, as torchvision's
    rgb_to_grayscale.
    """
    return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def color(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey image, as Pillow's ImageEnhance.Color; factor 0 gives grey, 1 the image, above 1 more
    colour.
    """
    return _blend(grey(image), image, factor)


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the smoothed image, as Pillow's ImageEnhance.Sharpness; factor 1 gives the image. The border is
    unchanged.
    """
    smooth = cv2.filter2D(image, -1, _SMOOTH, delta=_DROP_THIRTEENTHS)
    inner = slice(1, -1), slice(1, -1)
    border = image.copy()
    border[inner] = smooth[inner]
    return _blend(border, image, factor)


# ---------------------------------------------------------------------- geometric operations: nearest pixel, filled
# with grey
def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate about the centre; positive is counter-clockwise."""
    y, x = (image.shape[0] - 1) / 2, (image.shape[1] - 1) / 2
    cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return _warp(
        image,
        [[cos, -sin, x * (1 - cos + sin) + (y - x) * sin], [sin, cos, y * (1 - sin - cos) + (y - x) * sin]],
    )


def shear(image: np.ndarray, x: float = 0, y: float = 0) -> np.ndarray:
    """Pixel (column, row) is taken from (column + x * row, row + y * column)."""
    return _warp(image, [[1, x, 0], [y, 1, 0]])


def translate(image: np.ndarray, x: float = 0, y: float = 0) -> np.ndarray:
    """Move the image by x pixels to the left and y pixels upwards."""
    return _warp(image, [[1, 0, x], [0, 1, y]])


def cutout(image: np.ndarray, half: int, row: int, column: int) -> np.ndarray:
    """Draw a grey square of side 2 x `half` centred at (row, column), clipped at the border."""
    image = image.copy()
    image[max(0, row - half) : row + half, max(0, column - half) : column + half] = _FILL
    return image


def _enhance(level: float) -> float:
    return 1.8 * level + 0.1


def _sign(draws: np.ndarray) -> int:
    return 1 if draws[0] < 0.5 else -1


def _pixels(side: int, at_224: float) -> float:
    return at_224 * side / _AT_SIDE


# Names, order and strengths: big_vision/pp/archive/autoaugment.py.
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
    "ShearX": lambda image, level, draws: shear(image, x=_sign(draws) * 0.3 * level),
    "ShearY": lambda image, level, draws: shear(image, y=_sign(draws) * 0.3 * level),
    "TranslateX": lambda image, level, draws: translate(
        image, x=_sign(draws) * _pixels(image.shape[1], _TRANSLATE * level)
    ),
    "TranslateY": lambda image, level, draws: translate(
        image, y=_sign(draws) * _pixels(image.shape[0], _TRANSLATE * level)
    ),
    "Cutout": lambda image, level, draws: cutout(
        image, int(_pixels(min(image.shape[:2]), _CUTOUT * level)), *(draws * image.shape[:2]).astype(int).tolist()
    ),
    "SolarizeAdd": lambda image, level, draws: solarize_add(image, int(110 * level)),
}
# In the same order: an existing key keeps its place.
PIXEL_COUNT_OPERATIONS: dict[str, Operation] = OPERATIONS | {
    "Contrast": lambda image, level, draws: pixel_count_contrast(image, _enhance(level)),
}


def _map(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Map each value v to table[v], clipped to 0-255 and truncated."""
    return cv2.LUT(image, np.clip(table, 0, 255).astype(np.uint8))


def _blend_with_grey(image: np.ndarray, grey: int, factor: float) -> np.ndarray:
    return _map(image, grey + (_FLOAT_VALUES - grey) * np.float32(factor))


def _blend(first: np.ndarray, second: np.ndarray, factor: float) -> np.ndarray:
    """first + factor * (second - first), clipped to 0-255 and truncated."""
    return cv2.addWeighted(second, factor, first, 1 - factor, _DROP_FRACTION)


def _warp(image: np.ndarray, matrix: list[list[float]]) -> np.ndarray:
    """Affine warp. matrix: maps (x, y) of the new image to (x, y) of the old one."""
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    size = image.shape[1::-1]
    return cv2.warpAffine(image, np.array(matrix, np.float32), size, flags=flags, borderValue=(_FILL, _FILL, _FILL))


def _histograms(image: np.ndarray) -> list[np.ndarray]:
    """Histogram of each of the three channels, int64 (256,)."""
    return [cv2.calcHist([image], [channel], None, [256], [0, 256]).ravel().astype(np.int64) for channel in range(3)]


def _stretch(histogram: np.ndarray) -> np.ndarray:
    """Table, uint8 (256,), that maps the darkest value present to 0 and the brightest to 255."""
    present = np.flatnonzero(histogram)
    low, high = int(present[0]), int(present[-1])
    if high <= low:
        return _VALUES.astype(np.uint8)
    scale = 255.0 / (high - low)
    return np.clip(_VALUES * scale - low * scale, 0, 255).astype(np.uint8)


def _flatten(histogram: np.ndarray) -> np.ndarray:
    """Table, uint8 (256,), that equalizes the histogram."""
    step = int(histogram.sum() - histogram[np.flatnonzero(histogram)[-1]]) // 255
    if step == 0:
        return _VALUES.astype(np.uint8)
    before = np.cumsum(histogram) - histogram
    return np.clip((before + step // 2) // step, 0, 255).astype(np.uint8)
