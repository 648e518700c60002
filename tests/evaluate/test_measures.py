"""Scores of numbers and several labels, against scikit-learn and scipy, and the coverage of their intervals."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from pipeline.evaluate.intervals import EXPLAINED, bootstrapped
from pipeline.evaluate.measures import average_precision, mae, places, r2, rmse, spearman


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_scores_of_weighted_numbers_equal_scikit_learns_and_scipys(rng: np.random.Generator) -> None:
    """With ties; a weight is as many copies."""
    true = rng.integers(0, 40, 90) / 4
    predicted, drawn = np.round(true + rng.normal(0, 2, 90)), rng.integers(0, 3, 90)
    weights, copies = drawn.astype(float), (np.repeat(true, drawn), np.repeat(predicted, drawn))
    assert r2(true, predicted, weights) == pytest.approx(metrics.r2_score(*copies))
    assert rmse(true, predicted, weights) == pytest.approx(metrics.root_mean_squared_error(*copies))
    assert mae(true, predicted, weights) == pytest.approx(metrics.mean_absolute_error(*copies))
    found = spearman(places(true), places(predicted), weights)
    assert found == pytest.approx(stats.spearmanr(*copies).statistic)
    same, none = np.full(90, 2.0), np.zeros(90)
    assert np.isnan(r2(same, predicted, weights))
    assert np.isnan(spearman(places(same), places(predicted), weights))
    assert np.isnan([score(true, predicted, none) for score in (r2, rmse, mae)]).all()


def test_average_precision_equals_scikit_learns(rng: np.random.Generator) -> None:
    """With ties: probabilities of two digits."""
    for _ in range(5):
        has = rng.random(80) < 0.2
        scores = np.round(np.clip(rng.random(80) * 0.7 + 0.3 * has, 0, 1), 2)
        drawn, measure = rng.integers(0, 3, 80), average_precision(scores, has)
        expected = metrics.average_precision_score(has, scores, sample_weight=drawn)
        assert measure(drawn.astype(float)) == pytest.approx(expected, abs=1e-12)
    none = average_precision(scores, np.zeros(80, bool))
    assert np.isnan(none(np.ones(80)))


def _interval(true: np.ndarray, predicted: np.ndarray, groups: np.ndarray | None) -> list[float]:
    def measure(weights: np.ndarray) -> np.ndarray:
        return np.array([r2(true, predicted, weights)])

    value, *ends = bootstrapped(measure, [EXPLAINED], len(true), groups, 5_000_000 // len(true))[:, 0].tolist()
    assert value == _r2(true, predicted)
    return ends


def _r2(true: np.ndarray, predicted: np.ndarray) -> float:
    return r2(true, predicted, np.ones(len(true)))


@pytest.mark.parametrize(("num_groups", "size", "least"), [(0, 150, 0.88), (8, 25, 0.85)])
def test_intervals_cover_the_truth(rng: np.random.Generator, num_groups: int, size: int, least: float) -> None:
    """Of 60 draws, whose groups differ in how they are measured; over images, intervals of few groups are far too
    narrow.
    """

    def draw(num: int, each: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        groups = np.repeat(np.arange(num), each)
        true = rng.normal(size=len(groups))
        bias = 0.5 * rng.normal(size=num)[groups] * bool(num_groups)
        return true, true + bias + 0.4 * rng.normal(size=len(groups)), groups

    truth = _r2(*draw(20_000, 1 if not num_groups else size)[:2])
    covered, of_images = 0, 0
    for _ in range(60):
        true, predicted, groups = draw(num_groups, size) if num_groups else draw(size, 1)
        for of in (groups, None):
            low, high = _interval(true, predicted, of)
            covered += of is groups and low <= truth <= high
            of_images += of is None and low <= truth <= high
    assert covered / 60 >= least
    if num_groups:
        assert of_images < covered


def test_of_one_group_and_of_a_perfect_score(rng: np.random.Generator) -> None:
    true = rng.normal(size=300)
    good = true + rng.normal(0, 0.3, 300)
    assert np.isnan(_interval(true, good, np.zeros(300, int))).all()
    assert _interval(true, true, None) == [1.0, 1.0]
