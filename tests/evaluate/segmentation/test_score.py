"""The score: its formula, its interval, windows, and interpolation a few rows at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_pairs import NUM_CLASSES, SIDE, settings
from scipy import stats
from torch.nn.functional import interpolate

from pipeline.evaluate.loaded_model import LoadedModel, load_model
from pipeline.evaluate.segmentation import linear
from pipeline.evaluate.segmentation.linear import linear_head, patch_tokens


def counted(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Of images with one row each."""
    return np.stack([linear.count_pixels(*rows, num_classes) for rows in zip(true, predicted, strict=True)])


def scored(counts: np.ndarray, groups: object = ()) -> dict[str, Any]:
    return linear.score(counts, np.array(groups, np.int64))


def test_groups_are_drawn_whole() -> None:
    """As images that are the sum of each group's; of one group nothing follows."""
    rng = np.random.default_rng(0)
    counts = counted(rng.integers(-1, 4, (12, 50)), rng.integers(0, 4, (12, 50)), 4)
    found = scored(counts, [5, 5, 7, 7, 7, 7, 7, 2, 2, 2, 2, 2])
    summed = np.stack([counts[of].sum(0) for of in (slice(7, 12), slice(0, 2), slice(2, 7))])
    draws, pixels = linear._resampled(summed.astype(float)), summed[:, 2].sum(1)
    freedom = pixels.sum() ** 2 / (pixels**2).sum() - 1
    half = stats.t.ppf(0.975, freedom) * draws.std() * (3 / 2) ** 0.5
    miou = found["miou"]
    assert found["interval"] == pytest.approx([max(0, miou - half), min(1, miou + half)])
    assert (miou, found["num_groups"]) == (scored(counts)["miou"], 3)
    assert scored(counts)["num_groups"] is None
    assert np.isnan(scored(counts, np.zeros(12))["interval"]).all()


def test_the_score_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(-1, 4, (6, 50)), rng.integers(0, 4, (6, 50))
    found = scored(counted(true, predicted, 5))  # The fifth class is neither predicted nor true.
    known = true >= 0
    parts = [(known & (true == c), known & (predicted == c)) for c in range(4)]
    assert found["miou"] == pytest.approx(np.mean([(own & other).sum() / (own | other).sum() for own, other in parts]))


def test_the_interval_is_over_images() -> None:
    """Of 100 images of which each is wholly right or wholly wrong, it is that of the number of right images."""
    rng = np.random.default_rng(1)
    true = np.tile([0, 1], (100, 30))
    predicted = np.where(rng.random((100, 1)) < 0.7, true, 1 - true)
    found = scored(counted(true, predicted, 2))
    right = (true == predicted).mean()
    assert found["miou"] == pytest.approx(right / (2 - right))
    ends = [
        p / (2 - p)
        for p in (right - 1.96 * (right * (1 - right) / 100) ** 0.5, right + 1.96 * (right * (1 - right) / 100) ** 0.5)
    ]
    assert found["interval"] == pytest.approx(ends, abs=0.02)
    one = scored(counted(true[:1], predicted[:1], 2))
    assert one["miou"] == 1
    assert np.isnan(one["interval"]).all()


@pytest.fixture
def loaded(weights: Path) -> LoadedModel:
    return load_model(settings("i", "m", f"weights={weights}"))


def test_windows_cover_the_image_and_are_averaged(loaded: LoadedModel) -> None:
    head = linear_head(32, NUM_CLASSES, seed=0).eval()
    image = np.random.default_rng(0).integers(0, 256, (2 * SIDE, 5 * SIDE, 3), dtype=np.uint8)
    side = 2 * SIDE

    def expected_at(window: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return (
                interpolate(
                    head(patch_tokens(loaded, torch.from_numpy(window[None]))), size=(side, side), mode="bilinear"
                )[0]
                .argmax(0)
                .numpy()
            )

    # Of a stride of two thirds of 16 px: 0, 11, 22, and the last ends with the image.
    total, times = torch.zeros(NUM_CLASSES, side, 5 * SIDE), torch.zeros(5 * SIDE)
    for left in (0, 11, 22, 24):
        with torch.no_grad():
            of_window = head(patch_tokens(loaded, torch.from_numpy(image[None, :, left : left + side])))
        total[..., left : left + side] += interpolate(of_window, size=(side, side), mode="bilinear")[0]
        times[left : left + side] += 1
    expected = (total / times).argmax(0).numpy()
    for batch in (1, 3, 64):
        assert np.array_equal(linear.segment(image, loaded, head, settings("i", "m", f"batch={batch}")), expected)
    # Twice as large, it is resized first, and the result has its own size.
    twice = image.repeat(2, 0).repeat(2, 1)
    found = linear.segment(twice, loaded, head, settings())
    assert found.shape == twice.shape[:2]
    assert (found[::2, ::2] == expected).mean() > 0.9
    # With short_side, its own pixels are read, in windows of the same size.
    assert np.array_equal(
        linear.segment(twice, loaded, head, settings("i", "m", "short_side=32"))[:11, :11],
        expected_at(twice[:16, :16])[:11, :11],
    )


def test_interpolation_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 6, 5, generator=torch.Generator().manual_seed(0))
    whole = interpolate(logits[None], size=(40, 31), mode="bilinear", align_corners=False)[0].argmax(0)
    for rows_at_once in (1, 3, 7, 100):
        monkeypatch.setattr(linear, "_MAX_LOGITS", rows_at_once * 7 * 31)
        assert torch.equal(linear._largest(logits, (40, 31)), whole)
