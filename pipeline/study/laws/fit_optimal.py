"""Which family is best for a budget of compute, how sure that is, and in which range of budgets it holds (ViT paper, Figure 5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.random_numbers import Purpose
from pipeline.study.laws.fit import PowerLaw, Prediction
from pipeline.study.laws.fit_numbers import minimise

_BUDGETS = 2000


@dataclass(frozen=True)
class Optimal:
    """The best family at a budget. probability: that its law is the lowest there; probabilities: of all compared families.

    low, high: the budgets around it in which it stays best; below, above: the family that is best beyond each, or "" where the range
    ends because a fit is not supported beyond. not_compared: families that were not compared, with the reason.
    """

    family: str
    prediction: Prediction
    probability: float
    probabilities: dict[str, float]
    low: float
    high: float
    below: str
    above: str
    not_compared: dict[str, str]


def compute_optimal(fits: Mapping[str, PowerLaw], budget: float, *, seed: int, draws: int = 1000) -> Optimal:
    """The family with the lowest error at a budget, in the unit of the fits' x.

    The probability is the share of `draws` parametric bootstraps of all families in which its law is the lowest. A family whose fit
    refuses a prediction at the budget is left out. Raises UserError if all are.
    """
    predictions, not_compared = dict[str, Prediction](), dict[str, str]()
    for family, fit in fits.items():
        try:
            predictions[family] = fit.predict(budget)
        except UserError as error:
            not_compared[family] = str(error)
    if not predictions:
        reasons = " ".join(f"{family}: {reason}" for family, reason in not_compared.items())
        raise UserError(f"No family can be recommended for {budget:.4g}. {reasons}")
    names = list(predictions)
    best = min(range(len(names)), key=lambda i: predictions[names[i]].error)
    # Streams by name, so that the order of the families does not matter.
    streams = {family: stream for stream, family in enumerate(sorted(fits))}
    drawn = []
    for name in names:
        floor, scale, exponent = _drawn_laws(fits[name], draws, seed, streams[name])
        drawn.append(floor + scale * (budget / fits[name].x.max()) ** -exponent)
    shares = np.bincount(np.stack(drawn).argmin(0), minlength=len(names)) / draws

    ends = [fits[name].supported for name in names]
    low, high = max(low for low, _ in ends), min(high for _, high in ends)
    budgets = np.unique(np.append(np.geomspace(low, high, _BUDGETS), budget))
    order = np.stack([fits[name].law(budgets) for name in names]).argmin(0)
    at = int(np.searchsorted(budgets, budget))
    others = np.flatnonzero(order != best)
    first = int(max(others[others < at], default=-1)) + 1
    last = int(min(others[others > at], default=len(budgets))) - 1
    return Optimal(
        family=names[best],
        prediction=predictions[names[best]],
        probability=float(shares[best]),
        probabilities=dict(zip(names, shares.tolist(), strict=True)),
        low=float(budgets[first]),
        high=float(budgets[last]),
        below=names[order[first - 1]] if first else "",
        above=names[order[last + 1]] if last + 1 < len(budgets) else "",
        not_compared=not_compared,
    )


@lru_cache(maxsize=64)  # A report asks for each of its budgets.
def _drawn_laws(fit: PowerLaw, draws: int, seed: int, stream: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Floor, scale at the largest x, and exponent of refits to redrawn runs, each (draws,).

    A draw adds to the fitted law a deviation for each cell and, within it, for each seed. Their size is drawn, too: as the variance is
    known from few degrees of freedom, the refits of a linear law then have exactly Student's t. Cells themselves are not
    resampled, because 4 of 4 with repetition leave 3 sizes or fewer in nine draws of ten.
    """
    from scipy.special import chdtri, ndtri

    def uniform(kind: int, count: int) -> np.ndarray:
        rows, columns = np.arange(draws)[:, None], np.arange(count)
        # The middle of each of 2**53 intervals: the normal quantile of 0 is infinite.
        return random_numbers.uniform(seed, Purpose.STUDY_BOOTSTRAP, stream, kind, rows, columns) + 2.0**-54

    freedom = fit.noise.freedom
    size = np.sqrt(freedom / chdtri(freedom, uniform(0, 1)))
    of_cells = np.sqrt(fit.noise.cell_variance) * ndtri(uniform(1, fit.num_cells))
    of_seeds = np.sqrt(fit.noise.seed_variance) * ndtri(uniform(2, fit.num_runs))
    errors = fit.law(fit.x) + size * (of_cells[:, fit.cells] + of_seeds)
    floor, scale, exponent, _ = minimise(errors, fit.x / fit.x.max())
    return floor, scale, exponent
