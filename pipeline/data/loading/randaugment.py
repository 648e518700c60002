"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719) as the later ViT recipes use it, on uint8 (S, S, 3).

Operations, their order, their strength at each magnitude and the fill value 128 are those of big_vision
(pp/archive/autoaugment.py); its *level* is magnitude / 10, and recipes use magnitudes up to 20. Two side effects of its
TensorFlow code are always reproduced, because the published results include them (both observed by running its
operations under TensorFlow 2.12):

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
from PIL import Image, ImageOps

DRAWS_PER_LAYER = 3
_FILL = 128
_VALUES = np.arange(256)
# float32 as in TensorFlow and Pillow: 1.9 x 10 is 19 there, but 18.999 when the float32 of 1.9 is multiplied in
# float64.
_FLOAT_VALUES = np.arange(256, dtype=np.float32)
_AT_SIDE = 224  # Of big_vision's images, in whose pixels it gives translations and Cutout.
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's ImageFilter.SMOOTH
# Added before OpenCV rounds to nearest, these truncate the fraction as TensorFlow and Pillow do: thirteenths exactly; a
# blend except for fractions above 0.999, so that 18.9999, the float32 error of 19, becomes 19.
_DROP_THIRTEENTHS, _DROP_FRACTION = -6 / 13, -0.499

# (image (S, S, 3), level, two uniform numbers in [0, 1)) -> image (S, S, 3)
Operation = Callable[[np.ndarray, float, np.ndarray], np.ndarray]
# (image, amount) -> image
Change = Callable[[np.ndarray, float], np.ndarray]
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


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values at or above `threshold`, as Pillow's ImageOps.solarize."""
    return _map(image, np.where(threshold > _VALUES, _VALUES, 255 - _VALUES))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with black, as Pillow's ImageEnhance.Brightness; factor 0 gives black, 1 the image."""
    return _blend_with_grey(image, 0, factor)


def contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean grey, truncated to an integer (Pillow's ImageEnhance.Contrast rounds it)."""
    greys = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    mean = int(cv2.sumElems(greys)[0]) // greys.size  # cv2.mean returns 103.999 for a constant 104.
    return _blend_with_grey(image, mean, factor)


def pixel_count_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the grey height x width / 256, truncated, at most 255: big_vision's Contrast."""
    return _blend_with_grey(image, min(image.shape[0] * image.shape[1] // 256, 255), factor)


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


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate about the centre; positive is counter-clockwise."""
    height, width = image.shape[:2]
    return _warp(image, cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), -degrees, 1))


def cutout(image: np.ndarray, half: int, row: int, column: int) -> np.ndarray:
    """Draw a grey square of side 2 x `half` centred at (row, column), clipped at the border."""
    image = image.copy()
    image[max(0, row - half) : row + half, max(0, column - half) : column + half] = _FILL
    return image


def _by_pillow(change: Callable[[Image.Image], Image.Image]) -> Operation:
    return lambda image, level, draws: np.array(change(Image.fromarray(image)))


def _enhanced(change: Change) -> Operation:
    return lambda image, level, draws: change(image, 1.8 * level + 0.1)


def _signed(change: Change, at_level_1: float) -> Operation:
    """A change by so much times the level, with a random sign."""
    return lambda image, level, draws: change(image, (1 if draws[0] < 0.5 else -1) * at_level_1 * level)


# Names, order and strengths: big_vision/pp/archive/autoaugment.py.
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": _by_pillow(ImageOps.autocontrast),
    "Equalize": _by_pillow(ImageOps.equalize),
    "Invert": lambda image, level, draws: cv2.bitwise_not(image),
    "Rotate": _signed(rotate, 30),
    "Posterize": lambda image, level, draws: _map(image, _VALUES & (0xFF << (8 - max(1, int(4 * level))))),
    "Solarize": lambda image, level, draws: solarize(image, int(256 * level) % 256),
    "Color": _enhanced(color),
    "Contrast": _enhanced(contrast),
    "Brightness": _enhanced(brightness),
    "Sharpness": _enhanced(sharpness),
    "ShearX": _signed(lambda image, x: _warp(image, [[1, x, 0], [0, 1, 0]]), 0.3),
    "ShearY": _signed(lambda image, y: _warp(image, [[1, 0, 0], [y, 1, 0]]), 0.3),
    "TranslateX": _signed(lambda image, x: _warp(image, [[1, 0, x * image.shape[1] / _AT_SIDE], [0, 1, 0]]), 100),
    "TranslateY": _signed(lambda image, y: _warp(image, [[1, 0, 0], [0, 1, y * image.shape[0] / _AT_SIDE]]), 100),
    "Cutout": lambda image, level, draws: cutout(
        image, int(40 * level * min(image.shape[:2]) / _AT_SIDE), *(draws * image.shape[:2]).astype(int).tolist()
    ),
    "SolarizeAdd": lambda image, level, draws: _map(image, _VALUES + (_VALUES < 128) * int(110 * level)),
}
# In the same order: an existing key keeps its place.
PIXEL_COUNT_OPERATIONS: dict[str, Operation] = OPERATIONS | {"Contrast": _enhanced(pixel_count_contrast)}


def _map(image: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Map each value v to table[v], clipped to 0-255 and truncated."""
    return cv2.LUT(image, np.clip(table, 0, 255).astype(np.uint8))


def _blend_with_grey(image: np.ndarray, grey: int, factor: float) -> np.ndarray:
    return _map(image, grey + (_FLOAT_VALUES - grey) * np.float32(factor))


def _blend(first: np.ndarray, second: np.ndarray, factor: float) -> np.ndarray:
    """first + factor * (second - first), clipped to 0-255 and truncated."""
    return cv2.addWeighted(second, factor, first, 1 - factor, _DROP_FRACTION)


def _warp(image: np.ndarray, matrix: np.ndarray | list[list[float]]) -> np.ndarray:
    """Affine warp to the nearest pixel, filled with grey. matrix: maps (x, y) of the new image to (x, y) of the old
    one.
    """
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    size = image.shape[1::-1]
    return cv2.warpAffine(image, np.array(matrix, np.float32), size, flags=flags, borderValue=(_FILL, _FILL, _FILL))
