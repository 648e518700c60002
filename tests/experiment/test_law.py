"""The power law: coverage of its bootstrap intervals on synthetic families, the paper's own points, degenerate
input.
"""

from dataclasses import astuple

import numpy as np
import pytest
from measure_fit import LAWS, Design, coverage

from pipeline.experiment.law import (
    Estimate,
    Holdout,
    PowerLaw,
    fit_power_laws,
    leave_largest_out,
)

# ViT paper, Table 6: exaFLOPs of pre-training and ImageNet accuracy in percent.
VIT = {55: 80.73, 224: 84.15, 196: 84.37, 783: 86.30, 1567: 87.12, 4262: 88.08}
BIT = {50: 77.54, 199: 82.12, 96: 80.67, 141: 81.88, 563: 84.97, 1126: 85.56, 3306: 87.22}
SIZES = 3.0 ** np.arange(5)


def exact(x: np.ndarray, floor: float = 0.1, scale: float = 0.6, exponent: float = 0.4) -> np.ndarray:
    return floor + scale * x**-exponent


def noisy(seed: int, x: np.ndarray, noise: float = 0.003, **law: float) -> np.ndarray:
    return exact(x, **law) + np.random.default_rng(seed).normal(0, noise, len(x))


def fitted(x: np.ndarray, errors: np.ndarray, seed: int = 0) -> PowerLaw:
    return fit_power_laws({"": (x, errors)}, seed)[""]


def left_out(x: np.ndarray, errors: np.ndarray) -> Holdout | str:
    return leave_largest_out(fitted(x, errors), list(x), list(errors))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "design", "least", "widest"),
    [
        ("usual", Design(4, 1), 0.9, 0.6),
        ("usual", Design(4, 2), 0.9, 0.2),
        ("flat floor", Design(5, 1), 0.9, 0.2),
        # Cells that deviate, seeds that agree: independent resamples of runs would contain the truth in half of the
        # draws.
        ("usual", Design(8, 3, 0.0005, 0.005, step=2), 0.88, 0.2),
    ],
)
def test_parameters_and_predictions_are_inside_their_interval(
    law: str, design: Design, least: float, widest: float
) -> None:
    *inside, width, says = coverage(design, LAWS[law], 100)
    # 0.88 is more than three standard deviations of 100 draws below 0.95.
    assert min(inside) >= least - 0.02, inside
    assert np.mean(inside) < 1, "an interval that contains everything says nothing"
    assert width <= widest
    assert says >= 0.95


def test_noise_alone_seldom_says_something() -> None:
    *_, says = coverage(Design(5, 2), (0.5, 0.0, 0.5), 100)
    assert says <= 0.07


def test_the_fit_is_the_least_squares_of_scipy_and_exact_for_exact_points() -> None:
    from scipy.optimize import curve_fit

    x = np.repeat(SIZES, 2)
    errors = noisy(3, x, noise=0.005)
    theirs, _ = curve_fit(exact, x, errors, p0=(0.1, 0.5, 0.5), ftol=1e-12)
    ours = fitted(x, errors)
    at_one = ours.scale.value * 81**ours.exponent.value
    assert (ours.floor.value, at_one, ours.exponent.value) == pytest.approx(tuple(theirs), abs=2e-4)
    fit = fitted(SIZES, exact(SIZES))
    assert fit.curve(np.array([500.0]))[0][0] == pytest.approx(exact(np.array([500.0]))[0], abs=1e-5)
    assert fit.exponent.high - fit.exponent.low < 1e-3


def test_a_seed_gives_the_same_intervals_and_another_seed_others() -> None:
    errors = noisy(4, SIZES)
    assert fitted(SIZES, errors).expected(200) == fitted(SIZES, errors).expected(200)
    assert fitted(SIZES, errors).expected(200) != fitted(SIZES, errors, seed=1).expected(200)
    # Neither the order of the laws matters nor the unit of x.
    runs = {name: (SIZES, noisy(seed, SIZES)) for seed, name in enumerate("ab")}
    first, second = fit_power_laws(runs, 0), fit_power_laws(dict(reversed(runs.items())), 0)
    assert first["a"].expected(200) == second["a"].expected(200)
    assert astuple(fitted(SIZES * 1e6, errors).expected(2e8)) == pytest.approx(
        astuple(fitted(SIZES, errors).expected(200))
    )


def test_laws_share_their_noise() -> None:
    x = SIZES[:4]
    alone = [fitted(x, noisy(seed, x)) for seed in range(4)]
    together = fit_power_laws({str(seed): (x, noisy(seed, x)) for seed in range(4)}, 0).values()
    widths = [[fit.exponent.high - fit.exponent.low for fit in fits] for fits in (alone, together)]
    assert np.median(widths[1]) < np.median(widths[0]) / 2
    assert {len(fit.noise) for fit in together} == {16}


@pytest.mark.parametrize("errors", [[0.2, 0.3, 0.4, 0.5, 0.6], [0.5] * 5, [0.0] * 5, [0.52, 0.47, 0.51, 0.48, 0.49]])
def test_errors_that_do_not_fall_by_more_than_noise_predict_nothing(errors: list[float]) -> None:
    fit = fitted(SIZES, np.array(errors))
    assert isinstance(fit.predict(81), str)


def test_nothing_is_predicted_by_a_wide_interval() -> None:
    assert isinstance(fitted(SIZES, exact(SIZES)).predict(270), Estimate)
    wide = fitted(SIZES[:4], noisy(9, SIZES[:4], noise=0.008))
    assert not wide.why_not
    assert isinstance(wide.predict(270), str)


def test_the_largest_runs_are_predicted_from_the_others() -> None:
    for table in (VIT, BIT):
        check = left_out(np.array(list(table), float), 1 - np.array(list(table.values())) / 100)
        assert check.is_inside
        assert check.prediction.value == pytest.approx(check.error, abs=0.008)
    x = np.repeat(SIZES[:4], 2)
    broken = noisy(0, x) + np.where(x == 27, 0.1, 0)
    checks = [left_out(x, errors) for errors in (noisy(0, x), broken)]
    assert [isinstance(check, Holdout) and check.is_inside for check in checks] == [True, False]
    assert isinstance(left_out(SIZES[:4], exact(SIZES[:4])), str), "three runs tell no noise"
