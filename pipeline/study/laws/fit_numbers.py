"""Numerics of the fit: least squares for many sets of errors at once, the noise, and the region of laws that agree with the data.

D sets of errors, K exponents, n runs. u: x as a share of the largest x, so that nothing depends on the unit of x.
"""

import operator
from dataclasses import astuple, dataclass

import numpy as np

# Published exponents are 0.05 (Kaplan et al. 2020, compute) to 0.34 (Hoffmann et al. 2022, parameters). Below the range the law is a
# straight line in log(x), of which the floor cannot be told; above, a step from one size to the next.
EXPONENTS = (0.02, 3.0)
# Standard deviation of the noise that is always assumed: scores are rounded, and an exact fit must not divide by zero.
_SMALLEST_NOISE = 1e-6
# A between-cells scatter that seeds explain with this probability or more is pooled with theirs (the "sometimes pool" rule
# of Bancroft 1964): at 0.05 a scatter of cells as large as that of seeds would often go unnoticed.
_POOLED_FROM = 0.25
_COARSE, _ZOOM, _ROUNDS = 32, 9, 6
_REGION_EXPONENTS, _REGION_FLOORS = 81, 41


@dataclass(frozen=True)
class Noise:
    """Deviations of runs from their law, in sums of squares that add up over families (`a + b`): errors in [0, 1], squared.

    cell_squares: of the cells' means from the law, times the runs of the cell; cell_freedom: cells minus parameters.
    seed_squares: of the runs from the mean of their cell; seed_freedom: runs minus cells.
    """

    cell_squares: float
    cell_freedom: int
    seed_squares: float
    seed_freedom: int
    num_cells: int
    num_runs: int

    def __add__(self, other: "Noise") -> "Noise":
        return Noise(*map(operator.add, astuple(self), astuple(other)))

    @property
    def is_of_cells(self) -> bool:
        """Whether cells deviate from the law by more than their seeds explain (F-test of lack of fit)."""
        from scipy.special import fdtrc

        if not (self.cell_freedom and self.seed_freedom):
            return False
        ratio = self._mean_square(self.cell_squares, self.cell_freedom) / self._mean_square(
            self.seed_squares, self.seed_freedom
        )
        return bool(fdtrc(self.cell_freedom, self.seed_freedom, ratio) < _POOLED_FROM)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of `variance`; 0 if the noise cannot be told."""
        return self.cell_freedom if self.is_of_cells else self.cell_freedom + self.seed_freedom

    @property
    def variance(self) -> float:
        """Variance that a run's error has in the fit. Where cells deviate, seeds of one cell tell little more than one seed."""
        if self.is_of_cells:
            return self._mean_square(self.cell_squares, self.cell_freedom)
        return self._mean_square(self.cell_squares + self.seed_squares, self.freedom)

    @property
    def seed_variance(self) -> float:
        return self._mean_square(self.seed_squares, self.seed_freedom) if self.is_of_cells else self.variance

    @property
    def cell_variance(self) -> float:
        """Variance that runs of one cell have in common; 0 where seeds explain all."""
        return max(0.0, self.variance - self.seed_variance) * self.num_cells / self.num_runs

    @staticmethod
    def _mean_square(squares: float, freedom: int) -> float:
        return max(squares / freedom, _SMALLEST_NOISE**2)


@dataclass(frozen=True, eq=False)
class Region:
    """All laws whose sum of squares is at most a limit: of each floor and exponent (both (m,) float64) the range of scales.

    The scales are at u = 1. The smallest and largest value of a parameter or prediction in it are the ends of its
    profile-likelihood interval, the form of interval that keeps its coverage for few points and at the bounds of a parameter.
    """

    floors: np.ndarray
    low_scales: np.ndarray
    high_scales: np.ndarray
    exponents: np.ndarray

    def errors(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest error at each u: (k,) -> two of (k,)."""
        powers = u[:, None] ** -self.exponents
        return (self.floors + self.low_scales * powers).min(1), (self.floors + self.high_scales * powers).max(1)


def minimise(errors: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, ...]:
    """Least squares of floor + scale * u ** -exponent, floor and scale at least 0, to D sets of errors at once.

    errors: (D, n); u: (n,). Returns floor, scale, exponent and the sum of squares, each (D,). Given an exponent, the other two
    have a closed form; the exponent is searched on a grid that narrows around the best, so the result is deterministic.
    """
    rows = np.arange(len(errors))
    grid = np.broadcast_to(np.geomspace(*EXPONENTS, _COARSE), (len(errors), _COARSE))
    for _ in range(_ROUNDS):
        *_, squares = _linear(errors, u, grid[:1] if grid.strides[0] == 0 else grid)
        best = squares.argmin(1)
        low, high = grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, grid.shape[1] - 1)]
        grid = np.geomspace(low, high, _ZOOM, axis=1)
    floor, scale, squares = _linear(errors, u, grid)
    best = squares.argmin(1)
    return floor[rows, best], scale[rows, best], grid[rows, best], squares[rows, best]


def _linear(errors: np.ndarray, u: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best floor and scale, both at least 0, and their sum of squares of each exponent. exponents: (D or 1, K); returns (D, K)."""
    powers = u ** -exponents[:, :, None]
    y = errors[:, None, :]
    without_floor = np.maximum((y * powers).sum(-1) / (powers**2).sum(-1), 0)
    mean_power, mean = powers.mean(-1), y.mean(-1)
    centred = powers - mean_power[..., None]
    scale = np.maximum(((y - mean[..., None]) * centred).sum(-1) / (centred**2).sum(-1), 0)
    floor = mean - scale * mean_power
    scale, floor = np.where(floor < 0, without_floor, scale), np.where(floor < 0, 0.0, floor)
    return floor, scale, ((y - floor[..., None] - scale[..., None] * powers) ** 2).sum(-1)


def region(errors: np.ndarray, u: np.ndarray, best: tuple[float, float, float], limit: float) -> Region:
    """Laws whose sum of squares is at most `limit`, which must be above the smallest. errors, u: (n,). best: floor, scale, exponent."""
    best_floor, best_scale, best_exponent = best

    def edge(outside: float) -> float:
        """The exponent between the best and `outside` up to which the limit holds, by intervals a 16th as long each time."""
        inside = best_exponent
        for _ in range(5):
            tried = np.geomspace(inside, outside, 17)
            beyond = np.flatnonzero(_linear(errors[None], u, tried[None])[2][0] > limit)
            if not len(beyond):
                return outside
            first = max(int(beyond[0]), 1)
            inside, outside = float(tried[first - 1]), float(tried[first])
        return inside

    exponents = np.geomspace(edge(EXPONENTS[0]), edge(EXPONENTS[1]), _REGION_EXPONENTS)
    powers = u ** -exponents[:, None]
    power_squares = (powers**2).sum(1)
    mean_power = powers.mean(1)
    centred = powers - mean_power[:, None]
    spread = (centred**2).sum(1)
    free_scale = centred @ (errors - errors.mean()) / spread
    free_floor = errors.mean() - free_scale * mean_power
    squares = ((errors - free_floor[:, None] - free_scale[:, None] * powers) ** 2).sum(1)
    half = np.sqrt(np.maximum(limit - squares, 0) * power_squares / (len(u) * spread))
    low, high = np.maximum(free_floor - half, 0), np.maximum(free_floor + half, 0)
    floors = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, _REGION_FLOORS)
    above = errors - floors[..., None]
    middle = (above * powers[:, None]).sum(-1) / power_squares[:, None]
    squares = ((above - middle[..., None] * powers[:, None]) ** 2).sum(-1)
    half = np.sqrt(np.maximum(limit - squares, 0) / power_squares[:, None])
    kept = middle + half >= 0
    found = (floors, np.maximum(middle - half, 0), middle + half, np.broadcast_to(exponents[:, None], floors.shape))
    # The best law is in its region, also where the grid misses it.
    point = (best_floor, best_scale, best_scale, best_exponent)
    return Region(*(np.append(values[kept], value) for values, value in zip(found, point, strict=True)))
