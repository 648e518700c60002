"""RankMe and the deviation of features equal their definitions, and a collapse is told from its absence."""

import numpy as np
import pytest

from pipeline.evaluate.classify import Features
from pipeline.evaluate.probes.rankme import collapse, feature_std, rankme, spread


def features(n: int, d: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
    return (mean + scale * np.random.default_rng(0).normal(size=(n, d))).astype(np.float32)


def test_rankme_is_the_paper_s_formula() -> None:
    """From the eigenvalues of the Gram matrix, not centred; in the matrix of equal singular values it is their
    number.
    """
    found = features(300, 20) * np.linspace(0.1, 3, 20, dtype=np.float32) + 1
    sigma = np.sqrt(np.linalg.eigvalsh(found.T.astype(np.float64) @ found))
    p = sigma / sigma.sum() + 1e-7
    assert rankme(found) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)
    assert rankme(np.eye(8, 12, dtype=np.float32)) == pytest.approx(8, rel=1e-4)
    assert rankme(np.ones((50, 12), np.float32)) == pytest.approx(1, abs=1e-3)
    assert np.isnan(rankme(np.ones((0, 12), np.float32)))


def test_deviation_of_features_of_length_one() -> None:
    found = features(400, 16, mean=0.5) * np.linspace(1, 9, 400, dtype=np.float32)[:, None]
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    assert feature_std(found) == pytest.approx(unit.std(axis=0).mean() * 4, rel=1e-5)
    assert feature_std(features(4000, 64)) == pytest.approx(1, abs=0.01)
    assert feature_std(np.full((9, 4), 7, np.float32)) == pytest.approx(0, abs=1e-7)
    assert np.isnan(feature_std(np.ones((0, 4), np.float32)))


def test_what_cannot_be_read_is_left_out() -> None:
    values = features(60, 8)
    values[3] = np.nan
    readable = np.arange(60) != 5
    found = spread(Features(values, readable, {5: "cut"}))
    kept = np.delete(values, [3, 5], axis=0)
    assert found == {"rankme": rankme(kept), "feature_std": feature_std(kept), "images": 58, "dimensions": 8}


@pytest.mark.parametrize(
    ("values", "collapsed"),
    [
        (features(500, 32), False),
        (features(500, 32, scale=0.1, mean=1.0), False),  # A common direction is no collapse by itself.
        (features(500, 32, scale=1e-3, mean=1.0), True),  # All images have the same features but for rounding.
        (features(500, 1) * np.ones(32, np.float32), True),  # One direction.
        (features(500, 32)[:0], False),
    ],
)
def test_a_collapse_is_said_with_what_to_change(values: np.ndarray, collapsed: bool) -> None:
    said = collapse(spread(Features(values, np.ones(len(values), bool), {})))
    assert bool(said) == collapsed
    assert ("optimizer.lr" in said and "\n" not in said) == collapsed
