"""Scores of numbers and of several labels an image: functions of weighted samples.

Shapes: n samples, K classes, S scores. weights: (n,), how often each sample counts: once, or as often as a bootstrap
draws it.
"""

from collections.abc import Callable

import numpy as np

# Scores (S,) of weighted samples.
Measure = Callable[[np.ndarray], np.ndarray]


def mean_of_known(rows: np.ndarray) -> np.ndarray:
    """The mean (...) of the rows (k, ...) without NaN, which places without any have."""
    known = np.isfinite(rows)
    total, count = np.where(known, rows, 0).sum(0), known.sum(0)
    return np.divide(total, count, out=np.full(rows.shape[1:], np.nan), where=count > 0)


# ---------------------------------------------------------------------- numbers: NaN without samples
def r2(true: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> float:
    """The coefficient of determination, 1 - sum((true - predicted)^2) / sum((true - mean(true))^2): 1 is perfect, 0 as
    good as always saying the mean of the values scored, below 0 worse. NaN for values that are all the same.
    """
    if not (count := weights.sum()):
        return float("nan")
    total = weights @ np.square(true - weights @ true / count)
    return float(1 - weights @ np.square(true - predicted) / total) if total > 0 else float("nan")


def rmse(true: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> float:
    """The root of the mean squared error."""
    count = weights.sum()
    return float(np.sqrt(weights @ np.square(true - predicted) / count)) if count else float("nan")


def mae(true: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> float:
    """The mean absolute error."""
    count = weights.sum()
    return float(weights @ np.abs(true - predicted) / count) if count else float("nan")


def places(values: np.ndarray) -> np.ndarray:
    """int64 (n,): the place of each value among the different ones, for `spearman`."""
    return np.unique(values, return_inverse=True)[1]


def spearman(true: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> float:
    """Spearman's rank correlation of `places`; equal values share the mean of their ranks. NaN where either is
    constant.
    """
    if not (total := weights.sum()):
        return float("nan")
    ranks = (_ranks(places, weights) for places in (true, predicted))
    one, other = (of - weights @ of / total for of in ranks)
    variances = float(weights @ one**2 / total), float(weights @ other**2 / total)
    cov = float(weights @ (one * other) / total)
    return cov / (variances[0] * variances[1]) ** 0.5 if min(variances) > 0 else float("nan")


def _ranks(places: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """float64 (n,), the rank of each sample where each is there as often as its weight says."""
    counts = np.bincount(places, weights=weights)
    return (np.cumsum(counts) - counts / 2)[places]


# ---------------------------------------------------------------------- several labels an image
def average_precision(scores: np.ndarray, has: np.ndarray) -> Callable[[np.ndarray], float]:
    """Weights -> mean over the samples with a class of the precision among those of at least their score; NaN without
    any. scores: (n,), of the class. has: bool (n,), which have it.

    Samples of equal scores are taken together, as in scikit-learn.
    """
    order = np.argsort(-scores, kind="stable")
    ordered, has = scores[order], has[order]
    # For each sample, the last one of its score.
    last = np.searchsorted(-ordered, -ordered, side="right") - 1

    def measure(weights: np.ndarray) -> float:
        counts = weights[order]
        hits = counts * has
        found, total = np.cumsum(hits)[last], np.cumsum(counts)[last]
        at = hits > 0
        return float((hits[at] * found[at] / total[at]).sum() / hits.sum()) if at.any() else float("nan")

    return measure
