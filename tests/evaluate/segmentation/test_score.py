"""The score: its formula, its interval, windows, and interpolation a few classes at a time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_pairs import NUM_CLASSES, SIDE, settings
from scipy import stats
from torch.nn.functional import interpolate

from pipeline.evaluate.loaded_model import LoadedModel, load_model
from pipeline.evaluate.segmentation import report, score
from pipeline.evaluate.segmentation.counts import PixelCounts, as_file, parse_counts, resampled_miou, scores_of
from pipeline.evaluate.segmentation.linear import LinearHead, PatchTokens
from pipeline.evaluate.segmentation.masks import MaskClasses
from pipeline.review import statistics


def counted(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> PixelCounts:
    """Of images with one row each."""
    counts = PixelCounts(np.arange(len(true)), *(np.zeros((len(true), num_classes), np.int64) for _ in range(3)))
    for number in range(len(true)):
        score._add(counts, number, true[number][None], predicted[number][None])
    return counts


def test_groups_are_drawn_whole() -> None:
    """As images that are the sum of each group's; of one group nothing follows."""
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(-1, 4, (12, 50)), rng.integers(0, 4, (12, 50))
    alone, groups = counted(true, predicted, 4), np.array([5, 5, 7, 7, 7, 7, 7, 2, 2, 2, 2, 2])
    grouped = replace(alone, groups=groups)
    together = [slice(7, 12), slice(0, 2), slice(2, 7)]  # In the order of their numbers.
    summed = PixelCounts(
        np.arange(3),
        *(np.stack([part[of].sum(0) for of in together]) for part in (alone.right, alone.predicted, alone.true)),
    )
    assert np.array_equal(resampled_miou(grouped), resampled_miou(summed))
    assert scores_of(grouped).miou == scores_of(alone).miou
    found, draws = scores_of(grouped), resampled_miou(summed)
    pixels = summed.true.sum(1)
    freedom = pixels.sum() ** 2 / (pixels**2).sum() - 1
    half = stats.t.ppf(0.975, freedom) * draws.std() * (3 / 2) ** 0.5
    assert (found.low, found.high) == pytest.approx((max(0, found.miou - half), min(1, found.miou + half)))
    assert np.array_equal(parse_counts(as_file(grouped), "").groups, groups)
    assert np.array_equal(resampled_miou(replace(alone, groups=np.arange(12))), resampled_miou(alone))
    assert np.isnan(scores_of(replace(alone, groups=np.zeros(12, int))).low)
    classes = MaskClasses(np.arange(4), list("abcd"))
    rows = dict(
        report.summary(
            {
                **report.numbers(grouped, classes, np.ones(4), np.ones(4)),
                "num_samples": 12,
                "num_unreadable": 0,
                "num_turned": 0,
            }
        )
    )
    assert rows["  its 95 % interval over 3 groups"] == f"{found.low:.2%} to {found.high:.2%}"


def test_the_scores_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(-1, 4, (6, 50)), rng.integers(0, 4, (6, 50))
    found = scores_of(counted(true, predicted, 5))
    known = true >= 0
    for c in range(4):
        both, either = known & (true == c) & (predicted == c), known & ((true == c) | (predicted == c))
        assert found.iou[c] == both.sum() / either.sum()
        assert found.recall[c] == both.sum() / (true == c).sum()
    assert np.isnan(found.iou[4]), "neither predicted nor true"
    assert found.miou == pytest.approx(found.iou[:4].mean())
    assert found.pixel_accuracy == (true == predicted)[known].mean()
    assert found.mean_recall == pytest.approx(found.recall[:4].mean())


def test_the_interval_is_over_images() -> None:
    """Of 100 images of which each is wholly right or wholly wrong, it is that of the number of right images."""
    rng = np.random.default_rng(1)
    true = np.tile([0, 1], (100, 30))
    predicted = np.where(rng.random((100, 1)) < 0.7, true, 1 - true)
    found = scores_of(counted(true, predicted, 2))
    right = (true == predicted).mean()
    assert found.miou == pytest.approx(right / (2 - right))
    ends = [
        p / (2 - p)
        for p in (right - 1.96 * (right * (1 - right) / 100) ** 0.5, right + 1.96 * (right * (1 - right) / 100) ** 0.5)
    ]
    assert (found.low, found.high) == pytest.approx(ends, abs=0.02)
    one = scores_of(counted(true[:1], predicted[:1], 2))
    assert one.miou == 1
    assert np.isnan([one.low, one.high]).all()


@pytest.mark.parametrize("num_images", [3, 5, 60])
def test_equal_models_differ_as_often_as_the_level_says(num_images: int) -> None:
    """p is below 0.2 for about a fifth of the pairs that differ by chance alone, also of few images."""
    rng, low = np.random.default_rng(2), 0
    true = np.tile([0, 1], (num_images, 30))
    for _ in range(100):
        hard = rng.random((num_images, 1)) < 0.6  # For both models.
        wrong = [hard & (rng.random((num_images, 60)) < rng.random((num_images, 1))) for _ in range(2)]
        low += _of_same_masks(true, *(np.where(each, 1 - true, true) for each in wrong)).p < 0.2
    assert 10 <= low <= 30


def test_a_model_that_is_better_on_the_same_images_is_found() -> None:
    rng, true = np.random.default_rng(2), np.tile([0, 1], (60, 30))
    better = np.where(rng.random((60, 60)) < 0.02, 1 - true, true)
    worse = np.where(rng.random((60, 60)) < 0.03, 1 - better, better)
    found = _of_same_masks(true, better, worse)
    assert found.low > 0
    assert found.p < 1e-6
    assert _of_same_masks(true, better, better).p == 1


def _of_same_masks(true: np.ndarray, *predicted: np.ndarray) -> statistics.ScoreDifference:
    first, second = (counted(true, each, 2) for each in predicted)
    value = scores_of(first).miou - scores_of(second).miou
    return statistics.of_same_masks(value, resampled_miou(first), resampled_miou(second), first)


@pytest.fixture
def loaded(weights: Path) -> LoadedModel:
    return load_model(settings("i", "m", f"weights={weights}"))


def test_windows_cover_the_image_and_are_averaged(loaded: LoadedModel) -> None:
    tokens, head = PatchTokens(loaded, 1), LinearHead(32, NUM_CLASSES, seed=0).eval()
    image = np.random.default_rng(0).integers(0, 256, (2 * SIDE, 5 * SIDE, 3), dtype=np.uint8)
    side = 2 * SIDE

    def expected_at(window: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return (
                interpolate(head(tokens(torch.from_numpy(window[None]))), size=(side, side), mode="bilinear")[0]
                .argmax(0)
                .numpy()
            )

    # Of a stride of two thirds of 16 px: 0, 11, 22, and the last ends with the image.
    total, times = torch.zeros(NUM_CLASSES, side, 5 * SIDE), torch.zeros(5 * SIDE)
    for left in (0, 11, 22, 24):
        with torch.no_grad():
            of_window = head(tokens(torch.from_numpy(image[None, :, left : left + side])))
        total[..., left : left + side] += interpolate(of_window, size=(side, side), mode="bilinear")[0]
        times[left : left + side] += 1
    expected = (total / times).argmax(0).numpy()
    for batch in (1, 3, 64):
        assert np.array_equal(score.segment(image, tokens, head, settings("i", "m", f"batch={batch}")), expected)
    # Twice as large, it is resized first, and the result has its own size.
    twice = image.repeat(2, 0).repeat(2, 1)
    found = score.segment(twice, tokens, head, settings())
    assert found.shape == twice.shape[:2]
    assert (found[::2, ::2] == expected).mean() > 0.9
    # With short_side, its own pixels are read, in windows of the same size.
    assert np.array_equal(
        score.segment(twice, tokens, head, settings("i", "m", "short_side=32"))[:11, :11],
        expected_at(twice[:16, :16])[:11, :11],
    )


def test_interpolation_a_few_classes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 6, 5, generator=torch.Generator().manual_seed(0))
    whole = interpolate(logits[None], size=(40, 31), mode="bilinear", align_corners=False)[0].argmax(0)
    for classes_at_once in (1, 3, 7, 100):
        monkeypatch.setattr(score, "_MAX_LOGITS", classes_at_once * 40 * 31)
        assert torch.equal(score._largest(logits, (40, 31)), whole)
