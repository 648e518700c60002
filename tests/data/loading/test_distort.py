"""Colour jitter, RandAugment and random erasing: independent, within their ranges, and a function of (seed, epoch, sample)."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from pipeline.base import random_numbers
from pipeline.data.loading.augment import write_train_view
from pipeline.data.loading.distort import color_jitter, distort, erased_box
from pipeline.settings.run import AugmentConfig

ALL = {"color_jitter": 0.4, "randaugment_layers": 2, "randaugment_magnitude": 15, "erase": 0.5}
ALONE = [{"color_jitter": 0.4}, {"randaugment_layers": 2}, {"erase": 1.0}]


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    return cv2.resize(small, (64, 64), interpolation=cv2.INTER_CUBIC)


def distorted(image: np.ndarray, seed: int = 0, epoch: int = 0, sample: int = 0, **config: Any) -> np.ndarray:
    image = image.copy()
    distort(image, AugmentConfig(**config), seed, epoch, sample)
    return image


@pytest.mark.parametrize("config", [*ALONE, ALL])
def test_same_identity_same_pixels_in_any_thread(config: dict[str, float], image: np.ndarray) -> None:
    expected = [distorted(image, sample=sample, **config) for sample in range(40)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda sample: distorted(image, sample=sample, **config), range(40)))
    assert all(np.array_equal(a, b) for a, b in zip(expected, together, strict=True))
    for other in ({"seed": 1}, {"epoch": 1}, {"sample": 40}):
        changed = [
            not np.array_equal(
                expected[0 if "sample" in other else sample], distorted(image, **{"sample": sample, **other}, **config)
            )
            for sample in range(40)
        ]
        assert np.mean(changed) > 0.8, other


def test_contrast_of_randaugment_is_chosen_by_a_setting(image: np.ndarray) -> None:
    """The default is the image's mean, as before the setting existed; color_jitter always uses it."""
    settings = {"randaugment_layers": 2, "color_jitter": 0.4}
    differs = 0
    for sample in range(40):
        default = distorted(image, sample=sample, **settings)
        assert np.array_equal(default, distorted(image, sample=sample, randaugment_contrast="mean", **settings))
        differs += not np.array_equal(
            default, distorted(image, sample=sample, randaugment_contrast="pixel_count", **settings)
        )
        jittered = [distorted(image, sample=sample, color_jitter=0.4, randaugment_contrast=grey)
                    for grey in ("mean", "pixel_count")]  # fmt: skip
        assert np.array_equal(*jittered)
    assert 0 < differs < 20  # Contrast is one of 16 operations, and two are applied.


def test_nothing_is_the_default(image: np.ndarray) -> None:
    assert np.array_equal(distorted(image), image)


def test_each_draws_for_itself(image: np.ndarray) -> None:
    for sample in range(20):
        one_by_one = image
        for config in ALONE:
            one_by_one = distorted(one_by_one, sample=sample, **config)
        together = {name: value for config in ALONE for name, value in config.items()}
        assert np.array_equal(distorted(image, sample=sample, **together), one_by_one)


def test_a_view_is_flipped_before_it_is_distorted(image: np.ndarray) -> None:
    for sample in range(10):
        plain, found = np.empty((2, 64, 64, 3), np.uint8)
        write_train_view(image, plain, AugmentConfig(crop="none"), 0, 0, sample)
        write_train_view(image, found, AugmentConfig(crop="none", **ALL), 0, 0, sample)
        assert np.array_equal(found, distorted(plain, sample=sample, **ALL))


def test_color_jitter_against_pillow(image: np.ndarray) -> None:
    enhance = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    orders = set()
    for sample in range(60):
        draws = random_numbers.uniform(0, 1, sample, np.arange(6))
        expected = Image.fromarray(image)
        order = np.argsort(draws[3:])
        for i in order:
            expected = enhance[i](expected).enhance(0.6 + 0.8 * draws[i])
        assert np.abs(color_jitter(image, 0.4, draws).astype(int) - np.asarray(expected)).max() <= 3
        orders.add(tuple(order))
    assert len(orders) == 6


def test_erased_boxes_fill_their_range() -> None:
    top, left, height, width = np.array(
        [erased_box(224, 224, random_numbers.uniform(0, 1, i, np.arange(40))) for i in range(2000)]
    ).T
    share, aspect = height * width / 224**2, height / width
    assert 0.018 < share.min() < 0.025
    assert 0.31 < share.max() < 0.335
    assert 0.28 < aspect.min() < 0.33
    assert 3.1 < aspect.max() < 3.5
    assert abs(np.log(aspect).mean()) < 0.06  # Wide as often as high.
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height).max() == 224
    assert (left + width).max() == 224
    boxes = np.array([erased_box(100, 300, random_numbers.uniform(0, 1, i, np.arange(40))) for i in range(500)])
    assert (boxes[:, 0] + boxes[:, 2]).max() == 100
    assert (boxes[:, 1] + boxes[:, 3]).max() == 300
    assert erased_box(1, 1, random_numbers.uniform(0, 1, np.arange(40))) == (0, 0, 0, 0)


def test_erasing_happens_as_often_as_asked_and_leaves_the_rest(image: np.ndarray) -> None:
    changed = []
    for sample in range(400):
        found = distorted(image, sample=sample, erase=0.25)
        differs = (found != image).any(axis=2)
        changed.append(differs.any())
        if changed[-1]:
            rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
            box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert differs[box].mean() > 0.97  # One box, of noise.
            if differs[box].sum() > 200:
                assert 110 < found[box].mean() < 145
                assert found[box].std() > 60
    assert 66 < sum(changed) < 134  # 4 standard deviations
