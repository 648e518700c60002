"""Scores of grades, of several labels an image and of numbers: functions of weighted samples, and thresholds.

Shapes: n samples, K classes, S scores. weights: (n,), how often each sample counts: once, or as often as a bootstrap
draws it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Scores (S,) of weighted samples.
Measure = Callable[[np.ndarray], np.ndarray]


class Moments(NamedTuple):
    """Weighted means, variances and the covariance of two columns."""

    mean: tuple[float, float]
    var: tuple[float, float]
    cov: float

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray, weights: np.ndarray) -> "Moments":
        total = weights.sum()
        means = float(weights @ one / total), float(weights @ other / total)
        one, other = one - means[0], other - means[1]
        variances = float(weights @ one**2 / total), float(weights @ other**2 / total)
        return cls(means, variances, float(weights @ (one * other) / total))


def quadratic_kappa(true: np.ndarray, predicted: np.ndarray, weights: np.ndarray) -> float:
    """Cohen's kappa with quadratic weights (Cohen 1968) of grades, numbers (n,): 1 for equal ones, 0 for chance.

    One minus the mean squared difference over that of independent grades, so the matrix of counts is not needed. NaN
    where all grades of both are the same.
    """
    (first, second), (var_first, var_second), cov = Moments.of(true, predicted, weights)
    by_chance = var_first + var_second + (first - second) ** 2
    return 2 * cov / by_chance if by_chance > 0 else float("nan")


# ---------------------------------------------------------------------- several labels an image
class Ranking:
    """The samples in the order of one class's scores, (n,), ready to be weighted. has: bool (n,), which have the class.

    Samples of equal scores are taken together, as in scikit-learn.
    """

    def __init__(self, scores: np.ndarray, has: np.ndarray) -> None:
        self.order = np.argsort(-scores, kind="stable")
        self.scores, self.has = scores[self.order], has[self.order]
        # For each sample, the last one of its score.
        self.last = np.searchsorted(-self.scores, -self.scores, side="right") - 1
        self.ends = np.unique(self.last)

    def average_precision(self, weights: np.ndarray) -> float:
        """Mean over the samples with the class of the precision among those of at least their score; NaN without
        any.
        """
        counts = weights[self.order]
        hits = counts * self.has
        found, total = np.cumsum(hits)[self.last], np.cumsum(counts)[self.last]
        at = hits > 0
        return float((hits[at] * found[at] / total[at]).sum() / hits.sum()) if at.any() else float("nan")

    def best_threshold(self) -> float:
        """The threshold with the largest F1, half-way between two scores; NaN without samples of the class."""
        if not self.has.any():
            return float("nan")
        found = np.cumsum(self.has)[self.ends]
        best = int(np.argmax(2 * found / (self.ends + 1 + self.has.sum())))
        below = self.scores[self.ends[best] + 1] if best + 1 < len(self.ends) else 0.0
        return float(self.scores[self.ends[best]] + below) / 2
