"""95 % confidence intervals of scores: over repeated runs if there are several, else over the test samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose

OVER_SEEDS = "over seeds"
OVER_SAMPLES = "over test samples"
# So many numbers are read by all draws together, but there are at least and at most so many draws.
_DRAWN_VALUES, _MIN_DRAWS, _MAX_DRAWS = 1_000_000_000, 100, 1_000


@dataclass(frozen=True)
class Interval:
    """low, high: scores, accuracies in [0, 1]. over: the source of the spread, OVER_SEEDS or OVER_SAMPLES."""

    low: float
    high: float
    over: str


def quantile(freedom: float = math.inf) -> float:
    """Half the width of a two-sided 95 % interval, in standard errors: Student's t; with infinite freedom, the normal
    distribution's.
    """
    from scipy.special import stdtrit  # Imported here because it takes 0.2 s.

    return float(stdtrit(freedom, 0.975))


def sample_deviation(accuracies: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1) over repeated runs; None for a single run."""
    return float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None


def rounding(num_test: float) -> float:
    """Standard deviation of rounding an accuracy to whole images of `num_test`; 0 where their number is unknown.

    Lower bound of the deviation over seeds: equal accuracies on a few images do not prove that seeds do not differ.
    """
    return 12**-0.5 / num_test if num_test else 0.0


def of_seeds(accuracies: Sequence[float], num_test: float = 0, is_share: bool = True) -> Interval:
    """Interval of the mean of at least two runs: Student's t on their sample standard deviation, at least `rounding`.

    num_test: images of each accuracy, 0 if unknown. is_share: whether the scores are in [0, 1]. The interval holds for
    other seeds on these images, not for other images.
    """
    n = len(accuracies)
    half = quantile(n - 1) * max(float(np.std(accuracies, ddof=1)), rounding(num_test)) / n**0.5
    mean = float(np.mean(accuracies))
    return _around(mean, half, OVER_SEEDS) if is_share else Interval(mean - half, mean + half, OVER_SEEDS)


def effective_number(right: np.ndarray, sizes: np.ndarray) -> float:
    """Number of independent samples whose accuracy would be as uncertain as that of samples in groups, which are right
    together.

    right: (G,), how many of each group's samples are right, or their mean over seeds. sizes: (G,), its samples; groups
    without any are ignored. By the variance between groups, made smaller for few groups by quantiles of Student's t
    (Korn and Graubard 1998); at most the number of samples, at least 1. As Agresti and Coull add samples, half a group
    that is all right and half a group that is all wrong are
    added: one error or none in many groups does not say that groups never differ.
    """
    right, sizes = right[sizes > 0], sizes[sizes > 0]
    num_samples, half = float(sizes.sum()), sizes.mean() / 2
    with_two = np.append(right, [half, 0.0]), np.append(sizes, [half, half])
    accuracy = float(with_two[0].sum() / with_two[1].sum())
    found = min(num_samples, accuracy * (1 - accuracy) / grouped_error(*with_two) ** 2)
    return max(1.0, found * (quantile(max(1.0, num_samples - 1)) / quantile(freedom_of_groups(sizes))) ** 2)


def grouped_error(sums: np.ndarray, sizes: np.ndarray) -> float:
    """Standard error of the mean over samples in at least two groups, by leaving out one group after the other
    (jackknife).

    sums: (G,) of each group's values. sizes: (G,), its samples.
    """
    share = sizes / sizes.sum()
    rest = (sums - sums.sum() * share) / (1 - share) / sizes.sum()
    return float(np.sqrt((1 - 1 / len(sizes)) * (rest**2).sum()))


def freedom_of_groups(sizes: np.ndarray) -> float:
    """Degrees of freedom of such an error: of equal groups their number less one, fewer where some are much larger
    (Kish), at least 1.
    """
    return max(1.0, float(sizes.sum() ** 2 / (sizes.astype(np.float64) ** 2).sum()) - 1)


def of_samples(accuracy: float, num_test: float) -> Interval:
    """Interval of one run's accuracy on `num_test` samples: Wilson's score interval, also valid near 0 and 1.

    num_test: of samples in groups, their `effective_number`.
    """
    z = quantile()
    centre = (accuracy + z**2 / (2 * num_test)) / (1 + z**2 / num_test)
    spread = accuracy * (1 - accuracy) / num_test + (z / (2 * num_test)) ** 2
    half = z * spread**0.5 / (1 + z**2 / num_test)
    found = _around(centre, half, OVER_SAMPLES)
    # Of 0 and 1 the accuracy is an end, which rounding may put on its other side.
    return Interval(min(found.low, accuracy), max(found.high, accuracy), OVER_SAMPLES)


def of_tasks(accuracies: Sequence[float], num_tests: Sequence[int]) -> Interval:
    """Interval of the mean over tasks, each measured once: normal approximation with the sum of binomial variances."""
    p, n = np.asarray(accuracies), np.asarray(num_tests)
    return _around(float(p.mean()), quantile() * float(np.sqrt((p * (1 - p) / n).sum())) / len(p), OVER_SAMPLES)


def _around(mean: float, half: float, over: str) -> Interval:
    """The interval mean +- half, clipped to [0, 1], which approximations and rounding may exceed."""
    return Interval(max(0.0, mean - half), min(1.0, mean + half), over)


# How a score is stretched so that its scatter is nearly the same on both sides, and back.
Scale = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]
CORRELATION: Scale = (np.arctanh, np.tanh)  # Fisher's z.
ERROR: Scale = (np.log, np.exp)
EXPLAINED: Scale = (lambda r2: np.log1p(-r2), lambda stretched: -np.expm1(stretched))
SHARE: Scale = (lambda share: np.log(share) - np.log1p(-share), lambda stretched: 1 / (1 + np.exp(-stretched)))


def bootstrapped(
    measure: Callable[[np.ndarray], np.ndarray],
    scales: Sequence[Scale],
    num: int,
    groups: np.ndarray | None = None,
    columns: int = 1,
) -> np.ndarray:
    """float64 (3, S): scores of n samples, and the low and high ends of their intervals, by Student's t on the scatter
    of the stretched scores of samples that are drawn anew, with replacement.

    measure: how often each sample was drawn, float64 (n,), -> scores (S,), each with its scale. groups: int64 (n,), of
    samples that are alike and drawn together. columns: how many numbers of each sample it reads. Of a perfect score,
    percentiles of the draws. NaN for a single sample or group, and for scores that fewer than half of the draws have.
    """
    values = measure(np.ones(num))
    found = np.stack([values, *np.full((2, len(values)), np.nan)])
    units = np.arange(num) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(units)
    if len(sizes) < 2:
        return found
    purpose, places = Purpose.named("bootstrap of scores"), np.arange(len(sizes))
    scores = []
    for draw in range(min(_MAX_DRAWS, max(_MIN_DRAWS, _DRAWN_VALUES // (num * columns)))):
        drawn = (random_numbers.uniform(0, purpose, draw, places) * len(sizes)).astype(np.int64)
        scores.append(measure(np.bincount(drawn, minlength=len(sizes))[units].astype(np.float64)))
    # The scatter of draws is that of n samples divided by n, not n - 1, which matters for few groups.
    freedom = num - 1.0 if groups is None else freedom_of_groups(sizes)
    width = math.sqrt(1 + 1 / freedom) * quantile(freedom)
    for place, (column, (stretch, back)) in enumerate(zip(np.transpose(scores), scales, strict=True)):
        known = column[np.isfinite(column)]
        if 2 * len(known) < len(column):
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            middle, stretched = stretch(values[place]), stretch(known)
        finite = stretched[np.isfinite(stretched)]
        if np.isfinite(middle) and 2 * len(finite) >= len(known):
            half = width * finite.std()
            found[1:, place] = np.sort(back(np.array([middle - half, middle + half])))
        else:
            found[1:, place] = np.quantile(known, [0.025, 0.975])
    return found
