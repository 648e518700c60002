"""Whether two scores differ by more than noise: differences with 95 % intervals, p-values, and a correction for many
pairs.

Two kinds of noise: which images are in the test set (two proportions; McNemar for the same images), and
the seed of training (Student's t over seeds, or over the differences of the same seeds). The tests of the one say
nothing about the other: `tests/measure/measure_intervals.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.evaluate.intervals import freedom_of_groups, grouped_error, of_samples, quantile, rounding

PROPORTIONS = "two proportions, over test images"
MCNEMAR = "McNemar, over the same test images"
GROUPED = "paired Student's t, over groups of the same test images"
STUDENT = "Student's t, over seeds"
PAIRED = "paired Student's t, over the same seeds"
LEVEL = 0.05


@dataclass(frozen=True)
class ScoreDifference:
    """First score minus second, in the unit of the scores. low, high: the 95 % interval. p: of the test named by
    `method`.
    """

    value: float
    low: float
    high: float
    p: float
    method: str

    @property
    def noise(self) -> str:
        """The noise that the test knows, in words: it knows no other."""
        over_groups = "groups of " * (self.method == GROUPED)
        return f"noise of the {'seeds' if self.method in (STUDENT, PAIRED) else f'{over_groups}test images'}"


def of_proportions(first: float, num_first: float, second: float, num_second: float) -> ScoreDifference:
    """Two accuracies, each on its own number of images.

    The interval is Newcombe's, from the two Wilson intervals; p is of the pooled z-test. On the same images both err on
    the side of "noise", because accuracies on the same images vary together.
    """
    a, b = of_samples(first, num_first), of_samples(second, num_second)
    value = first - second
    low = value - math.hypot(first - a.low, b.high - second)
    high = value + math.hypot(a.high - first, second - b.low)
    pooled = (first * num_first + second * num_second) / (num_first + num_second)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / num_first + 1 / num_second))
    p = math.erfc(abs(value) / spread / math.sqrt(2)) if spread else 1.0
    return ScoreDifference(value, max(-1.0, low), min(1.0, high), p, PROPORTIONS)


def of_same_images(first_right: np.ndarray, second_right: np.ndarray) -> ScoreDifference:
    """Two models on the same images. first_right, second_right: bool (n,), whether each was right on each image.

    p is McNemar's: exact binomial on the images where one of the two is right. The interval is Bonett and Price's
    (adjusted Wald).
    """
    from scipy.stats import binomtest  # Imported here because it takes a second.

    num = len(first_right)
    only_first = int(np.count_nonzero(first_right & ~second_right))
    only_second = int(np.count_nonzero(~first_right & second_right))
    p = float(binomtest(only_first, only_first + only_second).pvalue) if only_first + only_second else 1.0
    a, b = (only_first + 1) / (num + 2), (only_second + 1) / (num + 2)
    half = quantile() * math.sqrt((a + b - (a - b) ** 2) / (num + 2))
    value = (only_first - only_second) / num
    return ScoreDifference(value, max(-1.0, a - b - half), min(1.0, a - b + half), p, MCNEMAR)


def of_same_groups(first_right: np.ndarray, second_right: np.ndarray, groups: np.ndarray) -> ScoreDifference:
    """Two models on the same images, in groups of images that are alike: Student's t on what the groups add to the
    difference.

    first_right, second_right: bool (n,), whether each was right on each image. groups: int64 (n,). Of one group nothing
    follows. As for seeds, the scatter is at least that of rounding to whole images.
    """
    difference = first_right.astype(np.float64) - second_right
    numbers = np.unique(groups, return_inverse=True)[1]
    sums, sizes = np.bincount(numbers, weights=difference), np.bincount(numbers)
    if len(sizes) < 2:
        return ScoreDifference(float(difference.mean()), -1.0, 1.0, 1.0, GROUPED)
    least = math.sqrt(2 / len(sizes)) * rounding(float(sizes.mean()))
    error = max(grouped_error(sums, sizes), least)
    return _by_t(float(difference.mean()), error, freedom_of_groups(sizes), GROUPED)


def of_seeds(
    first: Sequence[float], second: Sequence[float], num_test: int = 0, is_share: bool = True
) -> ScoreDifference:
    """Two settings, each trained with several seeds: Student's t-test of two samples with a common variance, at least
    that of `rounding`.

    One of the two may have a single seed; its variance is then taken to be the other's. num_test: images of each score,
    0 if unknown. is_share: whether scores are in [0, 1].
    """
    n, m = len(first), len(second)
    squares = sum(float(np.var(values)) * len(values) for values in (first, second))
    freedom = n + m - 2
    error = max(math.sqrt(squares / freedom), rounding(num_test)) * math.sqrt(1 / n + 1 / m)
    limit = 1.0 if is_share else math.inf
    return _by_t(float(np.mean(first) - np.mean(second)), error, freedom, STUDENT, limit)


def of_same_seeds(first: Sequence[float], second: Sequence[float], num_test: int = 0) -> ScoreDifference:
    """Two settings, each trained with the same seeds, at least two, in the same order: Student's t-test of the seeds'
    differences.

    What the seeds of both have in common, such as the subset of the data, cancels. num_test: as of `of_seeds`.
    """
    differences = np.subtract(first, second)
    error = max(float(differences.std(ddof=1)), math.sqrt(2) * rounding(num_test)) / math.sqrt(len(differences))
    return _by_t(float(differences.mean()), error, len(differences) - 1, PAIRED)


def _by_t(value: float, error: float, freedom: float, method: str, limit: float = 1.0) -> ScoreDifference:
    """error: standard error of the value, known with so many degrees of freedom; of 0, that is without any scatter,
    nothing follows. limit: the largest difference there can be.
    """
    from scipy.special import stdtr  # Imported here because it takes 0.2 s.

    half = quantile(freedom) * error
    # The scatter of equal scores may be 1e-17 by rounding.
    p = 2 * float(stdtr(freedom, -abs(value) / error)) if error > 1e-12 else 1.0
    return ScoreDifference(value, max(-limit, value - half), min(limit, value + half), p, method)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for the number of comparisons by Holm's method, in the same order.

    With these, the probability of calling even one of all pairs different although it is not is at most the level.
    """
    order = np.argsort(p_values, kind="stable")
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.arange(len(order), 0, -1) * np.asarray(p_values)[order]))
    return corrected.tolist()


def in_words(difference: ScoreDifference, corrected: float) -> str:
    """Whether a difference is more than the noise that its test knows. corrected: its p-value by `holm`."""
    if corrected < LEVEL:
        return f"more than {difference.noise}"
    if difference.p < LEVEL:
        return "may be noise: not sure with so many pairs"
    return "may be noise"
