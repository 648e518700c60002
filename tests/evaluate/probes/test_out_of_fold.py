"""Wrong labels are found by a linear layer that was fitted to other samples."""

import numpy as np
import pytest

from pipeline.evaluate.classify import Features
from pipeline.evaluate.probes.out_of_fold import divide, predict_out_of_fold

N, D, K = 300, 16, 4


def clusters(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(values (N, D), true class of each)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, K, N)
    return (rng.normal(size=(K, D)) * 2)[labels] + rng.normal(size=(N, D)), labels


def test_changed_labels_are_the_least_probable() -> None:
    values, true = clusters()
    labels = true.copy()
    labels[[5, 50, 250]] = (true[[5, 50, 250]] + 1) % K
    features = Features(values.astype(np.float32), np.ones(N, bool), {})
    predicted, confidence, of_label = predict_out_of_fold(features, labels, K, 5)
    assert set(np.argsort(of_label)[:3]) == {5, 50, 250}
    assert (predicted == true).mean() > 0.97
    assert np.all(confidence >= of_label - 1e-9)
    assert confidence[predicted == true].mean() > 0.9


def test_a_sample_is_not_predicted_by_itself() -> None:
    """Labels at random: whatever was fitted to a sample would know it."""
    values, _ = clusters()
    labels = np.random.default_rng(1).integers(0, K, N)
    features = Features(values.astype(np.float32), np.ones(N, bool), {})
    predicted, confidence, _ = predict_out_of_fold(features, labels, K, 5)
    assert (predicted == labels).mean() == pytest.approx(1 / K, abs=0.1)
    assert confidence.mean() < 0.4


def test_unreadable_and_unlabelled_samples_have_no_class() -> None:
    values, labels = clusters()
    readable = np.arange(N) != 3
    labels[7], values[9, 0] = -1, np.nan
    predicted, *_ = predict_out_of_fold(Features(values.astype(np.float32), readable, {}), labels, K, 2)
    assert np.flatnonzero(predicted < 0).tolist() == [3, 7, 9]


def test_folds_have_all_classes_and_divide_no_group() -> None:
    labels = np.arange(N) % K
    alone = divide(labels, 5, None)
    counts = np.array([[((alone == fold) & (labels == c)).sum() for c in range(K)] for fold in range(5)])
    assert counts.min() >= counts.max() - 1
    groups = np.arange(N) // 7
    together = divide(labels, 5, groups)
    assert all(len(set(together[groups == group])) == 1 for group in range(groups[-1] + 1))
    assert len(set(together)) == 5
