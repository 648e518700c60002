"""Distortions and crops against what torchvision 0.28.0 itself made of the same pixels, as uint8 tensors (torch 2.13.0;
images and results are in torchvision.npz).

The largest differences are stated with their reasons; most values are equal.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.base import random_numbers
from pipeline.data.loading import randaugment, views
from pipeline.data.loading.distort import blur, color_jitter, turn_hue
from pipeline.settings.run import AugmentConfig

SAVED = dict(np.load(Path(__file__).parent / "torchvision.npz"))
DISTORTED = dict(zip(SAVED["names"].astype(str).tolist(), SAVED["distorted"], strict=True))


@pytest.mark.parametrize(
    ("name", "function", "most"),
    [
        ("hue", turn_hue, 1),  # Torchvision truncates 255.999 times a value in [0, 1], ours is rounded.
        ("brightness", randaugment.brightness, 0),
        # The mean grey is of rounded values here, of truncated ones there; so is the grey that colours are blended
        # with.
        ("contrast", randaugment.contrast, 1),
        ("saturation", randaugment.color, 1),
        ("blur", blur, 1),  # OpenCV's kernel for uint8 has integers.
    ],
)
def test_a_distortion_of_a_strength(name: str, function: Callable[[np.ndarray, float], np.ndarray], most: int) -> None:
    for case, expected in DISTORTED.items():
        if case.startswith(f"{name} "):
            difference = function(SAVED["small"], float(case.split()[1])).astype(int) - expected
            assert np.abs(difference).max() <= most, case
            assert (difference != 0).mean() < 0.3, case


def test_grey_and_solarise() -> None:
    difference = randaugment.grey(SAVED["small"]).astype(int) - DISTORTED["grey"]
    assert set(np.unique(difference)) <= {0, 1}  # Torchvision truncates the luma, ours is rounded as Pillow's.
    assert np.array_equal(randaugment.solarize(SAVED["small"], 128), DISTORTED["solarise"])


def test_the_parts_of_colour_jitter_in_one_order() -> None:
    """Each part may differ by 1, and later ones enlarge it: by 3 at most."""
    for case in (name for name in DISTORTED if name.startswith("jitter ")):
        order, *values = case.split()[1:]
        brightness, contrast, saturation, hue = map(float, values)
        places = np.argsort([int(part) for part in order]) / 4
        factors = (brightness - 0.6) / 0.8, (contrast - 0.6) / 0.8, (saturation - 0.8) / 0.4
        draws, of_hue = np.array([*factors, *places[:3]]), np.array([(hue + 0.1) / 0.2, places[3]])
        difference = color_jitter(SAVED["small"], 0.4, draws, 0.2, 0.1, of_hue).astype(int) - DISTORTED[case]
        assert np.abs(difference).max() <= 3, case
        assert (difference != 0).mean() < 0.3, case


@pytest.mark.parametrize(("name", "method"), [("bilinear", views.ANTIALIAS), ("bicubic", views.BICUBIC)])
def test_antialiased_crops_are_equal(name: str, method: int) -> None:
    """Shrunk and enlarged; the same kernel of torch."""
    for side in (5, 16):
        found = views.resize(SAVED["large"][2:13, 3:16], (side, side), method)
        assert np.array_equal(found, SAVED[f"{name} {side}"])


def test_random_resized_crops_are_equal() -> None:
    """From the same numbers: uniform area, log-uniform aspect, tries that do not fit, and the central crop after ten of
    them.
    """
    for (height, width, least, most), boxes in zip(SAVED["crops"].tolist(), SAVED["boxes"].tolist(), strict=True):
        config = AugmentConfig(area_min=least, area_max=most)
        for i, expected in enumerate(boxes):
            uniform = random_numbers.uniform(0, 1, i, np.arange(40))
            found = views.random_resized_crop(int(height), int(width), config, uniform.item)
            assert found == tuple(expected)
