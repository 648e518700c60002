"""A saturating power law, error = floor + scale * x ** -exponent, fitted to the runs of a model, with bootstrap
intervals.

x is pre-training compute or a number of images, error 1 - score. The form is that of Zhai et al. 2022 ("Scaling Vision
Transformers") without the shift of x, which needs more points than a study has. The noise is the same for all runs
(absolute, not relative).

Intervals are 95 % percentiles of refits to resampled residuals (`scipy.stats.bootstrap`). The residuals of n runs
around a law of 3 parameters are too small, and percentiles know no Student's t, so residuals are enlarged by sqrt(n /
(n - 3)) * t / z ("expanded percentile", Hesterberg 2015). Coverage, also where it is below 95 %:
`tests/measure/measure_fit.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.base.random_numbers import Purpose, torch_seed
from pipeline.evaluate.intervals import quantile

NUM_PARAMETERS = 3
# Published exponents are 0.05 (Kaplan et al. 2020, compute) to 0.34 (Hoffmann et al. 2022, parameters). Below the range
# the law is a straight line in log(x), of which the floor cannot be told; above, a step from one size to the next.
_EXPONENTS = (0.02, 3.0)
_COARSE, _ZOOM, _ROUNDS = 32, 9, 6
# A scatter of cells that seeds explain with this probability or more is pooled with theirs (the "sometimes pool" rule
# of Bancroft 1964): at 0.05 a scatter of cells as large as that of seeds would often go unnoticed.
_POOLED_FROM = 0.25
_RESAMPLES = 2000
_LEVELS = (0.025, 0.975)


Runs = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray]  # x and errors of the runs of one law.


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """A fitted law. scale: the error above the floor at the largest x. x, errors: of the runs, (n,) float64.

    noise: residuals of all runs whose noise is taken to be the same, (N,), enlarged for their degrees of freedom.
    refits: floor, scale and exponent of each resample, (3, D).
    """

    floor: Estimate
    scale: Estimate
    exponent: Estimate
    x: np.ndarray = field(repr=False)
    errors: np.ndarray = field(repr=False)
    noise: np.ndarray = field(repr=False)
    refits: np.ndarray = field(repr=False)
    seed: int

    @property
    def why_not(self) -> str:
        """Why nothing follows from this fit; "" if something does."""
        if self.scale.value == 0:
            return "the error does not fall"
        return "the fall of the error may be noise" if self.scale.low == 0 else ""

    def curve(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The error at each x, whether or not the law says something there, and its 95 % band: three of shape (k,)."""
        law = _error((self.floor.value, self.scale.value, self.exponent.value), x / self.x.max())
        low, high = np.quantile(self._refitted(x), _LEVELS, axis=1)
        return law, np.minimum(low, law), np.maximum(high, law)

    def _refitted(self, x: np.ndarray) -> np.ndarray:
        """The error of each refit: x (k,) -> (k, D)."""
        return _error(self.refits, x[:, None] / self.x.max())

    def predict(self, x: float, num_runs: int = 1) -> Estimate | str:
        """The mean error of new runs at x, with an interval that includes their scatter; or why nothing can be said."""
        found, span = self.expected(x, num_runs), float(np.ptp(self.errors))
        if not self.why_not and found.high - found.low > span:
            return f"its interval is wider than the range of all measured errors, {100 * span:.2f} points"
        return self.why_not or found

    def expected(self, x: float, num_runs: int = 1) -> Estimate:
        """Like `predict`, but never refuses."""
        at = np.array([float(x)])
        scatter = np.random.default_rng(self.seed).choice(self.noise, (self.refits.shape[1], num_runs)).mean(1)
        ends = np.clip(np.quantile(self._refitted(at) + scatter, _LEVELS), 0, 1)
        return _estimate(float(self.curve(at)[0][0]), *ends)


def _estimate(value: float, low: float, high: float) -> Estimate:
    return Estimate(value, min(float(low), value), max(float(high), value))


def _error(law: Sequence[float] | np.ndarray, u: np.ndarray) -> np.ndarray:
    """law: floor, scale and exponent."""
    return np.asarray(law[0] + law[1] * u ** -np.asarray(law[2]))


def fit_power_laws(runs: Mapping[str, Runs], seed: int, noise: PowerLaw | None = None) -> dict[str, PowerLaw]:
    """Fit a law to each (x > 0, errors in [0, 1]). Their noise is taken to be the same, because a few sizes tell little
    of it.

    seed: of the resamples. noise: is taken from this law instead. A law needs as many sizes as parameters, without
    `noise` one run more. Where the runs of one x deviate from the law together, their mean counts as one run: its seeds
    tell little more than one.
    """
    # By name, so that the order of the laws does not matter.
    ordered = sorted(runs.items())
    arrays = {name: (np.asarray(x, np.float64), np.asarray(errors, np.float64)) for name, (x, errors) in ordered}
    best = {name: np.concatenate(minimise(errors[None], x / x.max())) for name, (x, errors) in arrays.items()}
    residuals = {name: errors - _error(best[name], x / x.max()) for name, (x, errors) in arrays.items()}
    if noise:
        pool = noise.noise
    elif _cells_deviate([(x, residuals[name]) for name, (x, _) in arrays.items()]):
        return fit_power_laws({name: _means(*of_one) for name, of_one in arrays.items()}, seed)
    else:
        pool = np.concatenate(list(residuals.values()))
        freedom = len(pool) - NUM_PARAMETERS * len(runs)
        pool *= math.sqrt(len(pool) / freedom) * quantile(freedom) / quantile()
    found = {}
    for stream, (name, (x, errors)) in enumerate(arrays.items()):
        own_seed = torch_seed(seed, Purpose.STUDY_BOOTSTRAP, stream)
        lows, highs, refits = _resampled(errors - residuals[name], x / x.max(), pool, own_seed)
        floor, scale, exponent = map(_estimate, best[name].tolist(), lows, highs)
        found[name] = PowerLaw(floor, scale, exponent, x, errors, pool, refits, own_seed)
    return found


def _resampled(
    law: np.ndarray, u: np.ndarray, residuals: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper ends of the parameters' intervals, each (3,), and the refits, (3, D)."""
    from scipy.stats import bootstrap  # Imported here because it takes 0.5 s.

    def refit(drawn: np.ndarray, axis: int) -> np.ndarray:
        # There are at least as many residuals as runs.
        return np.stack(minimise(law + drawn[..., : len(u)].reshape(-1, len(u)), u)).reshape(3, *drawn.shape[:-1])

    found = bootstrap((residuals,), refit, n_resamples=_RESAMPLES, method="percentile", rng=seed)
    return *found.confidence_interval, found.bootstrap_distribution


def _means(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each x once, and the mean of its values."""
    sizes, cells = np.unique(x, return_inverse=True)
    return sizes, np.bincount(cells, values) / np.bincount(cells)


def _cells_deviate(residuals: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether runs of one x deviate from their laws together, by more than their seeds explain (F-test of lack of
    fit).
    """
    from scipy.special import fdtrc

    squares, freedom = np.zeros(2), np.zeros(2)  # Between cells; between seeds.
    for x, of_one in residuals:
        sizes, means = _means(x, of_one)
        of_seeds = float(((of_one - means[np.searchsorted(sizes, x)]) ** 2).sum())
        squares += float((of_one**2).sum()) - of_seeds, of_seeds
        freedom += len(sizes) - NUM_PARAMETERS, len(x) - len(sizes)
    if not freedom.all():
        return False
    ratio = (squares[0] / freedom[0]) / max(squares[1] / freedom[1], 1e-12)
    return bool(fdtrc(*freedom, ratio) < _POOLED_FROM)


def minimise(errors: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, ...]:
    """Least squares of floor + scale * u ** -exponent, floor and scale at least 0, to D sets of errors at once.

    errors: (D, n); u: (n,), x as a share of the largest, so that nothing depends on its unit. Returns floor, scale and
    exponent, each (D,). Given an exponent, the other two have a closed form; the exponent is searched on a grid that
    narrows around the best, so the result is deterministic.
    """
    rows = np.arange(len(errors))
    grid = np.tile(np.geomspace(*_EXPONENTS, _COARSE), (len(errors), 1))
    for _ in range(_ROUNDS):
        best = _linear(errors, u, grid)[2].argmin(1)
        low, high = grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, grid.shape[1] - 1)]
        grid = np.geomspace(low, high, _ZOOM, axis=1)
    floor, scale, squares = _linear(errors, u, grid)
    best = squares.argmin(1)
    return floor[rows, best], scale[rows, best], grid[rows, best]


def _linear(errors: np.ndarray, u: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best floor and scale, both at least 0, and their sum of squares of each exponent. exponents: (D, K)."""
    powers = u ** -exponents[:, :, None]
    y = errors[:, None, :]
    without_floor = np.maximum((y * powers).sum(-1) / (powers**2).sum(-1), 0)
    mean_power, mean = powers.mean(-1), y.mean(-1)
    centred = powers - mean_power[..., None]
    scale = np.maximum(((y - mean[..., None]) * centred).sum(-1) / (centred**2).sum(-1), 0)
    floor = mean - scale * mean_power
    scale, floor = np.where(floor < 0, without_floor, scale), np.where(floor < 0, 0.0, floor)
    return floor, scale, ((y - floor[..., None] - scale[..., None] * powers) ** 2).sum(-1)


# -------------------------------------------------------------------- what follows from laws
@dataclass(frozen=True)
class Holdout:
    """A check of a law: fitted without the runs of the largest x, it predicts their mean error."""

    prediction: Estimate
    error: float

    @property
    def is_inside(self) -> bool:
        return self.prediction.low <= self.error <= self.prediction.high


def leave_largest_out(law: PowerLaw, x: Sequence[float], errors: Sequence[float]) -> Holdout | str:
    """Predict the largest runs from the others, or return why not. Noise: the others', or `law`'s if that is unusable.

    x, errors: of the runs of `law`.
    """
    why_not = "too few runs are left"
    shared = [(law, law.x, law.errors)] if len(law.noise) > len(law.x) else []
    for noise, xs, of_runs in [(None, np.asarray(x), np.asarray(errors)), *shared]:
        is_left = xs < xs.max()
        if len(np.unique(xs[is_left])) < NUM_PARAMETERS or (is_left.sum() == NUM_PARAMETERS and noise is None):
            continue
        fit = fit_power_laws({"": (xs[is_left], of_runs[is_left])}, law.seed, noise)[""]
        found = fit.predict(float(xs.max()), int((~is_left).sum()))
        if isinstance(found, Estimate):
            return Holdout(found, float(of_runs[~is_left].mean()))
        why_not = found
    return why_not
