"""A saturating power law of a family of models: error = floor + scale * x ** -exponent, with intervals that cover.

x is pre-training compute (exaFLOPs) or a number of images, error 1 - score. The form is that of Zhai et al. 2022 ("Scaling Vision
Transformers": E = a (C + d) ** -b + c) without their d, which bends the law for the smallest models and needs more points than a
study has; and of Hoffmann et al. 2022 with one variable instead of two.

Noise: the same standard deviation for all runs of a family (absolute, not relative). An accuracy's binomial noise,
sqrt(e (1 - e) / images), is within 15 % of its largest value for errors of 0.25 to 0.75, where small studies are; noise
proportional to the error would let a floor near 0 take all weight, and the fit would no longer be linear in floor and scale.

Intervals: profile likelihood with Student's t, the values of all laws whose sum of squares is at most minimum + t**2 * variance.
Percentiles of resampled residuals, or of resampled cells and seeds, are too narrow for 4 or 5 sizes of one seed: see
`tests/measure/measure_fit.py`. The variance is of cells, not of seeds, where cells deviate from the law by more (`Noise`). Three
limits, measured there: with 4 or 5 sizes such a deviation may go unnoticed (0.88 of the intervals contain the truth, at worst);
where noise is proportional to the error, the intervals of scale and exponent are too narrow (0.78 at worst), not those of predictions;
and of 4 sizes of one seed, whose noise is known with one degree of freedom, those predictions are not refused whose noise looks small by
chance (0.88 of these hold, where three in four are refused).
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.evaluate.intervals import quantile
from pipeline.study.laws.fit_numbers import Noise, Region, minimise, region

# A law is not used beyond so many times the largest x measured, or below the smallest by the same factor. One that fits
# says nothing of a floor or bend that only shows further on, and `leave_largest_out` checks one step of 2 to 4 times.
MAX_EXTRAPOLATION = 10.0
_PARAMETERS = 3


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; high is inf where the data give no upper bound."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """An error at x. low, high: interval of the error of a new run (of the mean of several, if asked for), which includes its scatter."""

    x: float
    error: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """A fitted law. floor, scale (the error above the floor at x = 1), exponent: with their 95 % intervals.

    deviation: standard deviation of a new run around the law, in error. x, errors: of the runs, (n,) float64; cells: the number of
    each run's cell, (n,) int64.
    """

    floor: Estimate
    scale: Estimate
    exponent: Estimate
    noise: Noise
    x: np.ndarray = field(repr=False)
    errors: np.ndarray = field(repr=False)
    cells: np.ndarray = field(repr=False)
    own_noise: Noise = field(repr=False)
    region: Region = field(repr=False)
    unit: str

    @property
    def num_runs(self) -> int:
        return len(self.x)

    @property
    def num_cells(self) -> int:
        return int(self.cells.max()) + 1

    @property
    def deviation(self) -> float:
        return math.sqrt(self.noise.cell_variance + self.noise.seed_variance)

    @property
    def supported(self) -> tuple[float, float]:
        """Smallest and largest x at which the law is used."""
        return float(self.x.min()) / MAX_EXTRAPOLATION, float(self.x.max()) * MAX_EXTRAPOLATION

    @functools.cached_property
    def why_not(self) -> str:
        """A sentence that says why nothing follows from this fit; "" if something does."""
        low, high = float(self.x.min()), float(self.x.max())
        span = f"from {low:.4g} to {high:.4g} {self.unit}"
        if self.scale.value == 0:
            first, last = (float(self.errors[self.x == x].mean()) for x in (low, high))
            return f"The fit says nothing: the error does not fall {span} (it is {first:.4f} and {last:.4f})."
        if self.scale.low == 0:
            at_low, at_high = self.law(np.array([low, high])).tolist()
            freedom = self.noise.freedom
            return (
                f"The fit says nothing: the fitted fall of the error {span}, {at_low - at_high:.4f}, may be noise (standard deviation of a run "
                f"{self.deviation:.4f}, {counted(freedom, 'degree')} of freedom). More sizes, a wider range or more seeds may show it."
            )
        return ""

    def curve(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The law and its interval, to be drawn: x (k,) -> error, low, high, each (k,). Refuses nothing; see `predict`."""
        law = self.law(x)
        low, high = self.region.errors(x / self.x.max())
        return law, np.minimum(low, law), np.minimum(np.maximum(high, law), 1.0)

    def predict(self, x: float, num_runs: int = 1) -> Prediction:
        """The error at x with intervals; num_runs: of a new cell, of whose mean error the interval is.

        Raises UserError if the fit says nothing, x is further than MAX_EXTRAPOLATION from the runs, or the interval is wider
        than the range of all measured errors.
        """
        if self.why_not:
            raise UserError(self.why_not)
        smallest, largest = self.supported
        if not smallest <= x <= largest:
            near = self.x.max() if x > largest else self.x.min()
            raise UserError(
                f"No prediction at {x:.4g} {self.unit}: the fit is used from {smallest:.4g} to {largest:.4g}, {MAX_EXTRAPOLATION:g} times "
                f"beyond its runs; measure nearer to it (now {near:.4g})."
            )
        found = self.expected(x, num_runs)
        span = float(np.ptp(self.errors))
        if found.high - found.low > span:
            raise UserError(
                f"No prediction at {x:.4g} {self.unit}: its 95% interval, {found.low:.4f} to {found.high:.4f}, is wider "
                f"than the range of all measured errors, {span:.4f}; add seeds or sizes."
            )
        return found

    def expected(self, x: float, num_runs: int = 1) -> Prediction:
        """As `predict`, but refuses nothing."""
        law, low, high = (float(values[0]) for values in self.curve(np.array([float(x)])))
        variance = self.noise.cell_variance + self.noise.seed_variance / num_runs
        scatter = quantile(self.noise.freedom) * math.sqrt(variance)
        return Prediction(
            float(x),
            law,
            max(0.0, law - math.hypot(law - low, scatter)),
            min(1.0, law + math.hypot(high - law, scatter)),
        )

    def law(self, x: np.ndarray) -> np.ndarray:
        """The error without its interval. Refuses nothing."""
        return self.floor.value + self.scale.value * x**-self.exponent.value


@dataclass(frozen=True, eq=False)
class Holdout:
    """A check of a law: fitted without the runs of the largest x, it predicts their mean error. is_inside: of the interval."""

    fit: PowerLaw
    prediction: Prediction
    error: float
    num_runs: int

    @property
    def is_inside(self) -> bool:
        return self.prediction.low <= self.error <= self.prediction.high


def fit_power_law(
    x: Sequence[float],
    error: Sequence[float],
    cell: Sequence[str],
    *,
    noise: Noise | None = None,
    unit: str = "exaFLOPs",
) -> PowerLaw:
    """Fit one family of at least 4 sizes. x: > 0; error: in [0, 1]; cell: name of each run's cell, equal for runs that differ in their seed only.

    noise: in place of this family's own (`common_noise`). unit: of x, for messages.

    The floor may exceed the smallest error, which may be low by chance: a limit there makes the intervals too narrow.
    """
    xs, errors = _arrays(x, error)
    assert len(np.unique(xs)) > _PARAMETERS
    return _fitted(xs, errors, cell, noise, unit)


def common_noise(fits: Iterable[PowerLaw]) -> Noise:
    """The noise of several families together, for `fit_power_law(noise=...)`: four sizes of one seed alone have one degree of freedom."""
    return functools.reduce(operator.add, (fit.own_noise for fit in fits))


def leave_largest_out(
    x: Sequence[float],
    error: Sequence[float],
    cell: Sequence[str],
    *,
    noise: Noise | None = None,
    unit: str = "exaFLOPs",
) -> Holdout:
    """Fit without the largest x, and predict it. Arguments: as of `fit_power_law`.

    Fits also as many sizes as there are parameters, if several seeds (or `noise`) tell the noise. Raises UserError for fewer, and as
    `predict`.
    """
    all_x, all_errors = _arrays(x, error)
    is_left = all_x < all_x.max()
    left_cells = [name for name, is_one in zip(cell, is_left, strict=True) if is_one]
    sizes = len(np.unique(all_x[is_left]))
    if sizes < _PARAMETERS or (len(left_cells) == _PARAMETERS and noise is None):
        raise UserError(
            f"Leaving the largest of {sizes + 1} different {unit} out leaves {counted(len(left_cells), 'run')} at {sizes}; a fit of {_PARAMETERS} "
            f"parameters needs {_PARAMETERS + 1} sizes, or {_PARAMETERS} with several seeds."
        )
    fit = _fitted(all_x[is_left], all_errors[is_left], left_cells, noise, unit)
    holdout = all_errors[~is_left]
    return Holdout(fit, fit.predict(float(all_x.max()), len(holdout)), float(holdout.mean()), len(holdout))


def _arrays(x: Sequence[float], error: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    xs, errors = np.asarray(x, dtype=np.float64), np.asarray(error, dtype=np.float64)
    assert ((xs > 0) & (errors >= 0) & (errors <= 1)).all()
    return xs, errors


def _fitted(x: np.ndarray, errors: np.ndarray, cell: Sequence[str], noise: Noise | None, unit: str) -> PowerLaw:
    cells = np.unique(np.asarray(cell), return_inverse=True)[1]
    num_cells, largest = int(cells.max()) + 1, float(x.max())
    u = x / largest
    floor, scale, exponent, squares = (float(values[0]) for values in minimise(errors[None], u))
    means = np.bincount(cells, errors) / np.bincount(cells)
    seed_squares = float(((errors - means[cells]) ** 2).sum())
    own_noise = Noise(
        max(0.0, squares - seed_squares),
        num_cells - _PARAMETERS,
        seed_squares,
        len(x) - num_cells,
        num_cells,
        len(x),
    )
    used = own_noise if noise is None else noise
    assert used.freedom > 0
    best = floor, scale, exponent
    laws = region(errors, u, best, squares + quantile(used.freedom) ** 2 * used.variance)
    with np.errstate(over="ignore"):
        at_one = [scales * largest**laws.exponents for scales in (laws.low_scales, laws.high_scales)]
    return PowerLaw(
        floor=Estimate(floor, float(laws.floors.min()), float(laws.floors.max())),
        scale=Estimate(scale * largest**exponent, float(at_one[0].min()), float(at_one[1].max())),
        exponent=Estimate(exponent, float(laws.exponents.min()), float(laws.exponents.max())),
        noise=used,
        x=x,
        errors=errors,
        cells=cells,
        own_noise=own_noise,
        region=laws,
        unit=unit,
    )
