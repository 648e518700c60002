"""Each operation against Pillow if Pillow has it, else against its formula; strengths against big_vision's."""

from collections.abc import Callable

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from pipeline.base import random_numbers
from pipeline.data.loading import randaugment as ra
from pipeline.data.loading.randaugment import OPERATIONS, randaugment

SIZE = 224
FACTORS = [0.1, 0.46, 1.0, 1.9, 2.8, 3.7]  # For magnitudes 0, 2, 5, 10, 15 and 20.
LEVELS = [0.0, 0.2, 0.5, 1.0, 1.5, 2.0]


@pytest.fixture(scope="module", params=["smooth", "noise", "dull", "flat"])
def image(request: pytest.FixtureRequest) -> np.ndarray:
    random = np.random.default_rng(0)
    if request.param == "smooth":
        small = random.integers(0, 256, (12, 12, 3), np.uint8)
        return cv2.resize(small, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    if request.param == "flat":
        return np.full((SIZE, SIZE, 3), (0, 128, 250), np.uint8)
    low, high = (0, 256) if request.param == "noise" else (100, 140)
    return random.integers(low, high, (SIZE, SIZE, 3), np.uint8)


def by_pillow(image: np.ndarray, change: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    return np.asarray(change(Image.fromarray(image)))


def furthest(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(int) - b).max())


def blended(first: np.ndarray, second: np.ndarray, factor: float) -> np.ndarray:
    mixed = first + np.float32(factor) * (second.astype(np.float32) - first)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def test_tables_are_pillows(image: np.ndarray) -> None:
    assert np.array_equal(OPERATIONS["Invert"](image, 1.0, np.zeros(2)), by_pillow(image, ImageOps.invert))
    for bits in range(1, 9):
        expected = by_pillow(image, lambda i, b=bits: ImageOps.posterize(i, b))
        assert np.array_equal(OPERATIONS["Posterize"](image, bits / 4, np.zeros(2)), expected)
    for threshold in (0, 51, 128, 255):
        expected = by_pillow(image, lambda i, t=threshold: ImageOps.solarize(i, t))
        assert np.array_equal(ra.solarize(image, threshold), expected)


def test_solarize_add(image: np.ndarray) -> None:
    for level in LEVELS:
        expected = np.where(image < 128, np.minimum(image.astype(int) + round(110 * level), 255), image)
        assert np.array_equal(OPERATIONS["SolarizeAdd"](image, level, np.zeros(2)), expected)


@pytest.mark.parametrize("factor", FACTORS)
def test_enhancements(factor: float, image: np.ndarray) -> None:
    expected = by_pillow(image, lambda i: ImageEnhance.Brightness(i).enhance(factor))
    assert np.array_equal(ra.brightness(image, factor), expected)
    # A grey value may be rounded the other way, which counts |1 - factor| times.
    tolerance = 1 + int(abs(1 - factor))
    assert (
        furthest(ra.color(image, factor), by_pillow(image, lambda i: ImageEnhance.Color(i).enhance(factor)))
        <= tolerance
    )
    expected = by_pillow(image, lambda i: ImageEnhance.Contrast(i).enhance(factor))
    assert furthest(ra.contrast(image, factor), expected) <= tolerance
    grey = int(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean())
    assert np.array_equal(ra.contrast(image, factor), blended(np.full_like(image, grey), image, factor))


def contrast_of_big_vision(image: np.ndarray, factor: float) -> np.ndarray:
    """`contrast` and `blend` of big_vision's pp/archive/autoaugment.py, step by step.

    The histogram's counts are summed where their mean value was meant, so the grey depends on the image's size alone.
    """
    histogram = np.array(Image.fromarray(image).convert("L").histogram(), np.float32)
    grey = np.uint8(np.clip(histogram.sum() / np.float32(256), 0, 255))
    return image if factor == 1 else blended(np.full_like(image, grey), image, factor)


@pytest.mark.parametrize("factor", FACTORS)
def test_pixel_count_contrast_is_big_visions(factor: float, image: np.ndarray) -> None:
    for height, width in ((SIZE, SIZE), (32, 32), (160, 160), (224, 96), (17, 23)):
        part = image[:height, :width]
        assert np.array_equal(ra.pixel_count_contrast(part, factor), contrast_of_big_vision(part, factor))


@pytest.mark.parametrize("factor", FACTORS)
def test_sharpness(factor: float, image: np.ndarray) -> None:
    wide = image.astype(int)
    smooth = image.copy()
    around = sum(wide[y : y + SIZE - 2, x : x + SIZE - 2] for y in range(3) for x in range(3))
    smooth[1:-1, 1:-1] = (around + 4 * wide[1:-1, 1:-1]) // 13
    found = ra.sharpness(image, factor)
    # float32 may place a blend just below a whole number.
    assert furthest(found, blended(smooth, image, factor)) <= 1
    assert np.mean(found != blended(smooth, image, factor)) < 1e-3
    for border in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        assert np.array_equal(found[border], image[border])


def warped(image: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest pixels of (x, y), float (S, S), grey outside; and a mask without rounding ambiguity."""
    column, row = np.floor(x + 0.5).astype(int), np.floor(y + 0.5).astype(int)
    outside = (column < 0) | (column >= SIZE) | (row < 0) | (row >= SIZE)
    found = image[np.clip(row, 0, SIZE - 1), np.clip(column, 0, SIZE - 1)].copy()
    found[outside] = 128
    clear = (np.abs(x % 1 - 0.5) > 0.01) & (np.abs(y % 1 - 0.5) > 0.01)
    return found, clear


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_warps(level: float, sign: int, image: np.ndarray) -> None:
    draws = np.array([0.2 if sign > 0 else 0.7, 0.0])
    y, x = np.mgrid[:SIZE, :SIZE].astype(float)
    middle, angle = (SIZE - 1) / 2, np.deg2rad(sign * 30 * level)
    rotated = (
        middle + np.cos(angle) * (x - middle) - np.sin(angle) * (y - middle),
        middle + np.sin(angle) * (x - middle) + np.cos(angle) * (y - middle),
    )
    expected = {
        "Rotate": rotated,
        "ShearX": (x + sign * 0.3 * level * y, y),
        "ShearY": (x, y + sign * 0.3 * level * x),
        "TranslateX": (x + sign * 100 * level, y),
        "TranslateY": (x, y + sign * 100 * level),
    }
    for name, places in expected.items():
        pixels, clear = warped(image, *places)
        found = OPERATIONS[name](image, level, draws)
        assert clear.mean() > 0.7, name
        assert np.array_equal(found[clear], pixels[clear]), name


def test_cutout(image: np.ndarray) -> None:
    for half, row, column in ((40, 112, 100), (40, 0, 223), (80, 50, 60), (0, 5, 5)):
        found = ra.cutout(image, half, row, column)
        y, x = np.mgrid[:SIZE, :SIZE]
        inside = (y >= row - half) & (y < row + half) & (x >= column - half) & (x < column + half)
        assert (found[inside] == 128).all()
        assert np.array_equal(found[~inside], image[~inside])


def test_strengths_are_big_visions() -> None:
    """Magnitudes 10, 15 and 20; values of the reference's `level_to_arg`, run under TensorFlow 2.12."""
    image = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    draws = np.array([0.5, 0.25])
    enhance = {"Color": ra.color, "Contrast": ra.contrast, "Brightness": ra.brightness, "Sharpness": ra.sharpness}
    for level, factor in ((0.0, 0.1), (1.0, 1.9), (1.5, 2.8), (2.0, 3.7)):
        for name, change in enhance.items():
            assert np.array_equal(OPERATIONS[name](image, level, draws), change(image, factor)), name
    # 2^bits values remain, at least two; a threshold of 256 is one of 0.
    bits = [len(np.unique(OPERATIONS["Posterize"](image, level, draws))) for level in LEVELS]
    assert bits == [2, 2, 4, 16, 64, 256]
    for level, threshold in zip(LEVELS, (0, 51, 128, 0, 128, 0), strict=True):
        assert np.array_equal(OPERATIONS["Solarize"](image, level, draws), ra.solarize(image, threshold))
        cut = ra.cutout(image, round(40 * level), 112, 56)
        assert np.array_equal(OPERATIONS["Cutout"](image, level, draws), cut)


def test_pixels_keep_their_share_at_other_sizes() -> None:
    image = np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)  # a quarter of 224
    moved = OPERATIONS["TranslateX"](image, 1.0, np.zeros(2))
    assert np.array_equal(moved[:, :-25], image[:, 25:])
    assert np.array_equal(OPERATIONS["Cutout"](image, 1.0, np.array([0.5, 0.5])), ra.cutout(image, 10, 28, 28))


def test_operations_are_chosen_evenly_and_follow_one_another() -> None:
    assert len(OPERATIONS) == 16
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    operations = list(OPERATIONS.values())
    counts = np.zeros(16, int)
    for sample in range(800):
        draws = random_numbers.uniform(0, 9, sample, np.arange(6))
        first, second = (int(draw * 16) for draw in draws[[0, 3]])
        counts[first] += 1
        expected = operations[second](operations[first](image, 1.0, draws[1:3]), 1.0, draws[4:6])
        assert np.array_equal(randaugment(image, 2, 10, draws), expected)
    assert counts.min() > 20
    assert counts.max() < 85


@pytest.mark.parametrize("size", [1, 2, 7])
def test_tiny_images(size: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    before = image.copy()
    for name, change in OPERATIONS.items():
        for level in LEVELS:
            found = change(image, level, np.array([0.9, 0.4]))
            assert (found.shape, found.dtype) == (image.shape, image.dtype), name
    assert np.array_equal(image, before)
