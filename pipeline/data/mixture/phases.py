"""Reads data.path and data.mix: the sets of a run, and the phases of their weights.

`Shares` says which set of a mixture each sample comes from: exact shares, spread evenly, as a pure function of the
position.

Weights become whole numbers a_i with sum A, and the pattern of A samples repeats, so that any position is found without
those before it. Within it, sample j (from 0) of set i may come when n a_i / A - j has reached 1 / (2 sets - 2), where n
counts the samples up to and with it, and of those that may come, the one whose difference would first exceed 1 - 1 / (2
sets - 2) does. Then, for every n, the first n samples hold n a_i / A of set i with an error of at most 1 - 1 / (2 sets
- 2), below one sample, and no rule has a smaller one for all weights (Tijdeman 1980, "The chairman assignment
problem"). So a count from the start is the exact one rounded up or down, as by the method of the largest remainder, at
every n at once; one between any two samples is less than two from the exact one, at most one for two sets, and exact
where the period divides the number of samples.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipeline.base.errors import UserError
from pipeline.settings.run import DataConfig, MixedSet

# What a later entry of a set may leave out, but not change.
_DETAILS = ("exclude", "limit")
_DEFAULT = MixedSet(path="", weight=1)
# The longest pattern. Weights whose smallest whole numbers sum to more are replaced by the nearest that fit.
MAX_PERIOD = 2**16


class Shares:
    """The sets of samples 0, 1, 2, ... of a mixture.

    weights: one number a set, 0 for a set that is not used; each is taken as the decimal number that it is written as.
    Raises UserError if one is below half of 1 / MAX_PERIOD of the sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = whole_numbers(weights)  # (sets,) int64, of one period
        self.period = int(self.counts.sum())
        self._sets = _pattern(self.counts)
        # (sets, period + 1): how many of the first n samples of a period come from each set.
        is_from = self._sets == np.arange(len(self.counts))[:, None]
        self._before = np.concatenate([np.zeros((len(self.counts), 1), np.int32), is_from.cumsum(1, dtype=np.int32)], 1)

    def share(self, number: int) -> Fraction:
        """The share of a set."""
        return Fraction(int(self.counts[number]), self.period)

    def first(self, num_samples: int) -> np.ndarray:
        """How many of the first `num_samples` samples come from each set, int64 (sets,)."""
        periods, rest = divmod(num_samples, self.period)
        return periods * self.counts + self._before[:, rest]

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(set, number of samples of that set before) of the samples at these positions, int64 each."""
        periods, slots = np.divmod(positions, self.period)
        sets = self._sets[slots].astype(np.int64)
        return sets, periods * self.counts[sets] + self._before[sets, slots]


def whole_numbers(weights: Sequence[float]) -> np.ndarray:
    """The smallest whole numbers in proportion to the weights, int64, or the nearest with a sum up to MAX_PERIOD.
    Raises as `Shares`.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor <= MAX_PERIOD:
        return np.array([number // divisor for number in whole], np.int64)
    shares = np.array([float(weight / total) for weight in exact])
    periods = np.arange(1, MAX_PERIOD + 1)
    rounded = np.rint(periods[:, None] * shares)
    fits = (rounded.sum(1) == periods) & ((rounded > 0) == (shares > 0)).all(1)
    if not fits.any():
        raise UserError(f"data.weight and data.mix: a weight is below {0.5 / MAX_PERIOD:.1e} of the sum")
    errors = np.abs(rounded / periods[:, None] - shares).max(1)
    return rounded[np.argmin(np.where(fits, errors, np.inf))].astype(np.int64)


def _pattern(counts: np.ndarray) -> np.ndarray:
    """The set of each sample of one period, uint16. counts: whole numbers."""
    period, used = int(counts.sum()), np.flatnonzero(counts).tolist()
    if len(used) == 1:
        return np.full(period, used[0], np.uint16)
    parts = 2 * len(used) - 2
    common = math.lcm(*counts[used].tolist())
    beginning: list[list[tuple[int, int]]] = [[] for _ in range(period)]
    for number in used:
        size = int(counts[number])
        for j in range(size):
            # In units that all sets share, so that whole numbers suffice.
            deadline = (parts * (j + 1) - 1) * (common // size)
            beginning[-(-(parts * j + 1) * period // (parts * size)) - 1].append((deadline, number))
    pattern, due = np.empty(period, np.uint16), list[tuple[int, int]]()
    for slot in range(period):
        for sample in beginning[slot]:
            heapq.heappush(due, sample)
        pattern[slot] = heapq.heappop(due)[1]
    return pattern


class Phase(NamedTuple):
    """The shares of the sets from a batch on. first_batch: counted from 0."""

    first_batch: int
    shares: Shares


class Mixture(NamedTuple):
    """sets: data.path first, then those of data.mix as they come. phases: ascending, from batch 0 on."""

    sets: tuple[MixedSet, ...]
    phases: tuple[Phase, ...]

    def first_share(self, number: int) -> float:
        """The share of a set in the first phase that uses it; 0 if none does."""
        return next((float(share) for phase in self.phases if (share := phase.shares.share(number))), 0.0)


def mixture_of(data: DataConfig) -> Mixture:
    """The sets and phases of a run. Raises UserError for entries that contradict one another."""
    main = MixedSet(path=data.path, weight=data.weight, split=data.train_split, exclude=data.exclude, limit=data.limit)
    sets, weights = {main.name: main}, {(0, main.name): main.weight}
    for number, entry in enumerate(data.mix):
        where = f"data.mix[{number}]"
        if (entry.from_step, entry.name) in weights:
            raise UserError(
                f"{where}: {entry.path}, split {entry.split!r}, has a weight from step {entry.from_step} already (that"
                " of data.path is data.weight). Leave one of them out, or give one of them labels: false"
                " (train.loss=pseudo_labels)."
            )
        weights[entry.from_step, entry.name] = entry.weight
        known = sets.setdefault(entry.name, entry)
        for name in _DETAILS:
            if getattr(entry, name) not in (getattr(known, name), getattr(_DEFAULT, name)):
                raise UserError(
                    f"{where}.{name} differs from that of the same set before: a later entry changes its weight alone."
                )
    phases, now = [], dict.fromkeys(sets, 0.0)
    for start in sorted({start for start, _ in weights}):
        now |= {name: weight for (at, name), weight in weights.items() if at == start}
        if not sum(now.values()):
            raise UserError(f"the weights of all data sets are 0 from step {start} on: give one of them another.")
        phases.append(Phase(start, Shares([*now.values()])))
    return Mixture(tuple(sets.values()), tuple(phases))
