"""Few-shot accuracy is the ridge regression it says it is, on exactly the images that big_vision would choose."""

import time

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from pipeline.evaluate import fewshot


def features(n: int, d: int, num_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weakly separated classes, balanced, in features of unequal scale and offset."""
    labels = np.random.default_rng(seed).permutation(n) % num_classes
    centres = np.random.default_rng(99).normal(size=(num_classes, d))
    noise = np.random.default_rng(seed + 1).normal(size=(n, d))
    return ((0.6 * centres[labels] + noise) * np.linspace(0.1, 30, d) + 5).astype(np.float32), labels


@pytest.mark.parametrize(("n", "d"), [(60, 12), (13, 12), (12, 12), (20, 50)])
@pytest.mark.parametrize("l2", [fewshot.L2, 1.0])
def test_equals_scikit_learns_ridge(n: int, d: int, l2: float) -> None:
    num_classes = 6  # Of which the last is in no shot.
    train, labels = features(n, d, num_classes - 1, seed=1)
    test, test_labels = features(1500, d, num_classes - 1, seed=3)
    assert l2 != fewshot.L2 or l2 == 1024
    mean, std = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    x, x_test = (
        np.pad((part - mean) / (std + 1e-5), ((0, 0), (0, 1)), constant_values=100.0) for part in (train, test)
    )
    targets = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(x, targets)
    expected = ridge.predict(x_test).argmax(1)
    assert np.array_equal(fewshot.classify(train, labels, test, num_classes, l2), expected)
    found = fewshot.accuracy(train, labels, test, test_labels[:, None], num_classes, l2)
    assert found == (expected == test_labels).mean()
    assert len(np.unique(expected)) > 1


def test_any_label_is_right_and_minus_one_never() -> None:
    train = np.array([[-1.0], [1.0]], np.float32)
    test = np.array([[-2.0], [2.0], [2.0], [-2.0]], np.float32)
    labels = np.array([[1, 0], [0, -1], [1, -1], [-1, -1]])
    assert fewshot.accuracy(train, np.array([0, 1]), test, labels, 2) == 0.5


def test_shots_are_those_of_big_vision() -> None:
    labels = np.random.default_rng(0).integers(0, 9, 200)
    labels[labels == 4] = -1  # A class without samples, and samples without a class.
    for seed in range(3):
        generator = np.random.default_rng(seed)
        expected = [generator.permutation(np.where(labels == c)[0])[:10] for c in range(9)]
        assert np.array_equal(fewshot.choose_shots(labels, 9, 10, seed), np.concatenate(expected))


def test_shots_are_nested_and_repeatable() -> None:
    labels = np.repeat(np.arange(5), [40, 3, 40, 25, 40])
    chosen = {shots: fewshot.choose_shots(labels, 5, shots, seed=1) for shots in (1, 5, 10, 25)}
    for fewer, more in ((1, 5), (5, 10), (10, 25)):
        assert set(chosen[fewer]) < set(chosen[more])
    assert np.bincount(labels[chosen[5]]).tolist() == [5, 3, 5, 5, 5]
    assert np.array_equal(chosen[5], fewshot.choose_shots(labels, 5, 5, seed=1))
    assert not np.array_equal(chosen[5], fewshot.choose_shots(labels, 5, 5, seed=2))


def test_choosing_from_imagenet_21k_takes_seconds() -> None:
    labels = np.random.default_rng(0).integers(0, 21_843, 2_000_000)
    begin = time.process_time()
    chosen = fewshot.choose_shots(labels, 21_843, 5, 0)
    assert time.process_time() - begin < 5
    assert len(chosen) == 5 * 21_843
