"""Few-shot accuracy is that of a ridge regression, on exactly the images that big_vision would choose."""

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from pipeline.evaluate.probes import fewshot


def features(n: int, d: int, num_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weakly separated classes, balanced, in features of unequal scale and offset."""
    labels = np.random.default_rng(seed).permutation(n) % num_classes
    centres = np.random.default_rng(99).normal(size=(num_classes, d))
    noise = np.random.default_rng(seed + 1).normal(size=(n, d))
    return ((0.6 * centres[labels] + noise) * np.linspace(0.1, 30, d) + 5).astype(np.float32), labels


@pytest.mark.parametrize(("n", "d"), [(60, 12), (13, 12), (12, 12), (20, 50)])
def test_scores_are_scikit_learns(n: int, d: int) -> None:
    """Of its Ridge, to 1e-6 of the largest score."""
    num_classes = 6  # The last one has no sample.
    train, labels = features(n, d, num_classes - 1, seed=1)
    test, _ = features(1500, d, num_classes - 1, seed=3)
    mean, std = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    x, x_test = (
        np.pad((part - mean) / (std + 1e-5), ((0, 0), (0, 1)), constant_values=100.0) for part in (train, test)
    )
    targets = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    fitted = fewshot.fit(train, labels, num_classes)
    for l2 in (1024.0, 1.0, 2.0**-10):
        ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(x, targets)
        found = fitted(test, l2)
        expected = ridge.predict(x_test)
        assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
        assert len(np.unique(found.argmax(1))) > 1


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


def test_shots_are_of_as_many_groups_as_there_are() -> None:
    """Five images of a large group, such as of one patient, would be hardly more than one."""
    labels = np.repeat([0, 1, 0], [300, 60, 12])
    groups = np.concatenate([np.zeros(200), np.arange(160) % 3 + 1, np.full(12, 9)]).astype(np.int64)
    for seed in range(5):
        chosen = {k: fewshot.choose_shots(labels, 2, k, seed, groups) for k in (1, 3, 5, 10, 25)}
        for k, rows in chosen.items():
            for label, num_groups in ((0, 5), (1, 3)):
                own = rows[labels[rows] == label]
                counts = np.unique(groups[own], return_counts=True)[1]
                assert (len(own), len(counts), counts.max() - counts.min() <= 1) == (k, min(k, num_groups), True)
            assert set(rows) <= set(chosen[25])
        # Once small groups have given all, the others give more. Of groups of one image, the choice is that without
        # groups.
        assert np.bincount(groups[fewshot.choose_shots(labels, 2, 150, seed, groups)])[9] == 12
        alone = fewshot.choose_shots(labels, 2, 5, seed, np.arange(len(labels)))
        assert np.array_equal(alone, fewshot.choose_shots(labels, 2, 5, seed))
        assert np.array_equal(chosen[1], fewshot.choose_shots(labels, 2, 1, seed))
