"""Distortions of views: independent, within their ranges, and a function of (seed, epoch, sample)."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from pipeline.base import random_numbers
from pipeline.data.loading.distort import distort, erased_box
from pipeline.data.loading.randaugment import grey
from pipeline.data.loading.views import write_train_view
from pipeline.settings.run import AugmentConfig

JITTER = {"color_jitter": 0.4, "saturation": 0.2, "hue": 0.1, "color_jitter_probability": 0.9}
ALL = {
    "three_augment": 0.5,
    **JITTER,
    "channel_brightness": 0.3,
    "channel_contrast": 0.3,
    "grey": 0.2,
    "blur": 0.5,
    "solarise": 0.2,
    "randaugment_layers": 2,
    "randaugment_magnitude": 15,
    "noise": 0.1,
    "erase": 0.5,
    "drop_channels": 0.2,
}
ALONE = [
    {"three_augment": 0.9},
    JITTER,
    {"channel_brightness": 0.3, "channel_contrast": 0.3},
    {"grey": 0.5},
    {"blur": 1.0},
    {"solarise": 0.5},
    {"randaugment_layers": 2},
    {"noise": 0.1},
    {"erase": 1.0},
    {"drop_channels": 0.5},
]


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    return cv2.resize(small, (64, 64), interpolation=cv2.INTER_CUBIC)


def distorted(image: np.ndarray, seed: int = 0, epoch: int = 0, sample: int = 0, **config: Any) -> np.ndarray:
    image = image.copy()
    distort(image, AugmentConfig(**config), seed, epoch, sample)
    return image


@pytest.mark.parametrize("config", [{"color_jitter": 0.4}, JITTER, {"blur": 1.0}, ALONE[2], *ALONE[6:9], ALL])
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
    settings = {"randaugment_layers": 2, "color_jitter": 0.4}
    differs = 0
    for sample in range(40):
        default, other = (
            distorted(image, sample=sample, **settings, **more)
            for more in ({}, {"randaugment_contrast": "pixel_count"})
        )
        differs += not np.array_equal(default, other)
    assert 0 < differs < 20  # Contrast is one of 16 operations, and two are applied.


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


def test_three_augment_is_one_of_grey_solarise_and_blur(image: np.ndarray) -> None:
    solarised = ImageOps.solarize(Image.fromarray(image), 128)
    found = [distorted(image, sample=sample, three_augment=1.0) for sample in range(120)]
    counts = [sum(np.array_equal(one, other) for one in found) for other in (grey(image), solarised)]
    assert all(25 < count < 55 for count in (*counts, 120 - sum(counts))), counts


@pytest.mark.parametrize("name", ["grey", "solarise", "blur", "erase", "color_jitter_probability"])
def test_a_distortion_happens_as_often_as_asked(name: str, image: np.ndarray) -> None:
    changed = [
        not np.array_equal(distorted(image, sample=i, color_jitter=0.4 * (name[:5] == "color"), **{name: 0.25}), image)
        for i in range(400)
    ]
    assert 66 < sum(changed) < 134  # 4 standard deviations


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
