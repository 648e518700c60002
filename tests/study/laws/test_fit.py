"""Tests of the power law: coverage of its intervals on synthetic families, the paper's own points, refusals, degenerate input."""

import functools
import time

import numpy as np
import pytest
from measure_fit import LAWS, Design, coverage

from pipeline.base.errors import UserError
from pipeline.study.laws.fit import MAX_EXTRAPOLATION, PowerLaw, common_noise, fit_power_law, leave_largest_out
from pipeline.study.laws.fit_optimal import compute_optimal

# ViT paper, Table 6: exaFLOPs of pre-training and ImageNet accuracy in percent.
VIT = {55: 80.73, 224: 84.15, 196: 84.37, 783: 86.30, 1567: 87.12, 4262: 88.08}
BIT = {50: 77.54, 199: 82.12, 96: 80.67, 141: 81.88, 563: 84.97, 1126: 85.56, 3306: 87.22}
SIZES = 3.0 ** np.arange(5)


def exact(x: np.ndarray, floor: float = 0.1, scale: float = 0.6, exponent: float = 0.4) -> np.ndarray:
    return floor + scale * x**-exponent


def noisy(seed: int, x: np.ndarray, noise: float = 0.003, **law: float) -> np.ndarray:
    return exact(x, **law) + np.random.default_rng(seed).normal(0, noise, len(x))


def names(x: np.ndarray) -> list[str]:
    return [f"cell {size:g}" for size in x]


def fitted(x: np.ndarray, errors: np.ndarray) -> PowerLaw:
    return fit_power_law(x, errors, names(x))


def squares(fit: PowerLaw) -> float:
    return float(((fit.errors - fit.law(fit.x)) ** 2).sum())


def of_table(table: dict[int, float]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    x = np.array(list(table), dtype=float)
    return x, 1 - np.array(list(table.values())) / 100, names(x)


# ---------------------------------------------------------------------- coverage
@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "design", "widest"),
    [
        ("usual", Design(4, 1), 0.5),
        ("usual", Design(4, 3), 0.12),
        ("flat floor", Design(5, 1), 0.16),
        ("no floor", Design(5, 2), 0.14),
        ("usual", Design(8, 1, step=2), 0.10),
    ],
)
def test_parameters_and_predictions_are_inside_their_interval_in_95_of_100(
    law: str, design: Design, widest: float
) -> None:
    floor, scale, exponent, next_law, next_run, _, width, says = coverage(design, LAWS[law], 200)
    # 0.90 is more than three standard deviations of 200 draws below 0.95.
    assert min(floor, scale, exponent, next_law, next_run) >= 0.90, (floor, scale, exponent, next_law, next_run)
    # Some draws must be outside: an interval that contains everything says nothing.
    assert np.mean([floor, scale, exponent, next_law, next_run]) <= 0.99
    # As a share of the fall of the error: a new run at the next size.
    assert width <= widest
    assert says >= 0.95


def test_noise_alone_seldom_says_something() -> None:
    *_, says = coverage(Design(5, 2), (0.5, 0.0, 0.5), 200)
    assert says <= 0.05


def test_what_cells_deviate_from_the_law_widens_the_intervals_as_seeds_do_not() -> None:
    # Three seeds that agree closely, in cells that do not follow the law closely: the law is known as if from 8 runs.
    values = coverage(Design(8, 3, seed_noise=0.0005, cell_noise=0.005, step=2), LAWS["usual"], 100)
    assert values[:5].min() >= 0.88, values
    x = np.repeat(2.0 ** np.arange(8), 3)
    fit = fitted(x, np.repeat(noisy(1, x[::3], noise=0.005), 3) + np.tile([-0.0005, 0, 0.0005], 8))
    assert fit.noise.is_of_cells
    assert fit.noise.freedom == 5
    assert 0.002 < fit.deviation < 0.01


# ---------------------------------------------------------------------- values
def test_exact_points_give_the_law() -> None:
    fit = fitted(SIZES, exact(SIZES))
    for estimate, true in ((fit.floor, 0.1), (fit.scale, 0.6), (fit.exponent, 0.4)):
        assert estimate.value == pytest.approx(true, abs=1e-4)
        # The smallest noise that is assumed is 1e-6.
        assert estimate.high - estimate.low < 1e-3
    assert not fit.why_not
    assert fit.predict(500).error == pytest.approx(exact(np.array([500.0]))[0], abs=1e-5)


def test_the_fit_is_the_least_squares_of_scipy() -> None:
    from scipy.optimize import curve_fit

    x = np.repeat(SIZES, 2)
    errors = noisy(3, x, noise=0.005)
    theirs, _ = curve_fit(lambda x, *law: exact(x, *law), x, errors, p0=(0.1, 0.5, 0.5), ftol=1e-12)
    ours = fitted(x, errors)
    assert (ours.floor.value, ours.scale.value, ours.exponent.value) == pytest.approx(tuple(theirs), abs=2e-4)
    assert squares(ours) == pytest.approx(((errors - exact(x, *theirs)) ** 2).sum(), rel=1e-3)


def test_an_interval_ends_where_the_best_fit_with_that_value_reaches_the_limit() -> None:
    from scipy.optimize import curve_fit
    from scipy.stats import t

    x = np.repeat(SIZES, 2)
    errors = noisy(1, x)
    fit = fitted(x, errors)

    def above(floor: float, x: np.ndarray, scale: float, exponent: float) -> np.ndarray:
        return exact(x, floor, scale, exponent)

    limit = squares(fit) + t.ppf(0.975, fit.noise.freedom) ** 2 * fit.noise.variance
    assert 0 < fit.floor.low < fit.floor.high
    for floor in (fit.floor.low, fit.floor.high):
        best, _ = curve_fit(functools.partial(above, floor), x, errors, p0=(0.5, 0.5))
        assert ((errors - exact(x, floor, *best)) ** 2).sum() == pytest.approx(limit, rel=0.01)
    for exponent in (fit.exponent.low, fit.exponent.high):
        line = np.polyfit(x**-exponent, errors, 1)
        assert ((errors - np.polyval(line, x**-exponent)) ** 2).sum() == pytest.approx(limit, rel=1e-3)


def test_the_paper_s_largest_models_are_predicted_from_its_smaller_ones() -> None:
    for table in (VIT, BIT):
        check = leave_largest_out(*of_table(table))
        assert check.is_inside
        assert check.prediction.x == max(table)
        assert check.prediction.error == pytest.approx(check.error, abs=0.008)
        assert check.prediction.high - check.prediction.low < 0.06


def test_x_has_any_unit() -> None:
    errors = noisy(2, SIZES)
    first, second = fitted(SIZES, errors), fitted(SIZES * 1e6, errors)
    for name in ("floor", "exponent"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert (ours.value, ours.low, ours.high) == pytest.approx((theirs.value, theirs.low, theirs.high), rel=1e-6)
    assert second.scale.value == pytest.approx(first.scale.value * 1e6**first.exponent.value, rel=1e-6)
    assert second.predict(2e8).low == pytest.approx(first.predict(200).low, rel=1e-6)


def test_families_can_share_their_noise() -> None:
    x = SIZES[:4]
    alone = [fitted(x, noisy(seed, x)) for seed in range(4)]
    noise = common_noise(alone)
    assert noise.freedom == 4
    shared = [fit_power_law(x, noisy(seed, x), names(x), noise=noise) for seed in range(4)]
    widths = [[fit.exponent.high - fit.exponent.low for fit in fits] for fits in (alone, shared)]
    assert np.median(widths[1]) < np.median(widths[0]) / 2


def test_the_mean_of_several_runs_scatters_less_than_one() -> None:
    x = np.repeat(SIZES, 3)
    fit = fitted(x, noisy(0, x))
    one, three = fit.predict(243), fit.predict(243, num_runs=3)
    _, low, high = fit.curve(np.array([243.0]))
    assert one.low < three.low < low[0] < three.error < high[0] < three.high < one.high


def test_the_curve_and_a_prediction_agree() -> None:
    fit = fitted(SIZES, noisy(5, SIZES))
    law, low, high = fit.curve(np.array([10.0, 200.0]))
    assert law[1] == fit.predict(200).error
    assert (low < law).all()
    assert (law < high).all()


def test_the_same_runs_give_the_same_fit() -> None:
    x = np.repeat(SIZES, 2)
    first, second = fitted(x, noisy(4, x)), fitted(x, noisy(4, x))
    assert (first.floor, first.scale, first.exponent) == (second.floor, second.scale, second.exponent)


# ---------------------------------------------------------------------- what it refuses
@pytest.mark.parametrize("errors", [[0.2, 0.3, 0.4, 0.5, 0.6], [0.5] * 5, [0.0] * 5], ids=["rising", "equal", "zero"])
def test_errors_that_do_not_fall_say_nothing(errors: list[float]) -> None:
    fit = fitted(SIZES, np.array(errors))
    assert fit.why_not
    assert "the error does not fall from 1 to 81 exaFLOPs" in fit.why_not
    with pytest.raises(UserError, match="The fit says nothing"):
        fit.predict(81)
    assert np.isfinite(fit.curve(SIZES)).all()


def test_a_fall_within_the_noise_says_nothing() -> None:
    fit = fitted(SIZES, np.array([0.52, 0.47, 0.51, 0.48, 0.49]))
    assert fit.scale.value > 0
    assert "may be noise" in fit.why_not


def test_it_extrapolates_only_so_far() -> None:
    fit = fitted(SIZES, exact(SIZES))
    fit.predict(81 * MAX_EXTRAPOLATION * 0.999)
    for x in (81 * MAX_EXTRAPOLATION * 1.001, 0.999 / MAX_EXTRAPOLATION):
        with pytest.raises(UserError, match=r"the fit is used from 0\.1 to 810"):
            fit.predict(x)


def test_an_interval_wider_than_all_measured_errors_is_no_prediction() -> None:
    fit = fitted(SIZES[:4], noisy(9, SIZES[:4], noise=0.008))
    assert not fit.why_not
    with pytest.raises(UserError, match="is wider than the range of all measured errors"):
        fit.predict(270)
    assert fit.expected(270).high > fit.expected(270).low


def test_leaving_one_out_needs_seeds_or_sizes() -> None:
    x = SIZES[:4]
    with pytest.raises(UserError, match="leaves 3 runs at 3; a fit of 3 parameters needs 4 sizes, or 3 with several"):
        leave_largest_out(x, exact(x), names(x))
    twice = np.repeat(x, 2)
    check = leave_largest_out(twice, noisy(0, twice), names(twice))
    assert check.fit.num_runs == 6
    assert check.num_runs == 2
    assert check.error == pytest.approx(noisy(0, twice)[-2:].mean())
    assert check.is_inside
    broken = noisy(0, twice) + np.where(twice == 27, 0.1, 0)
    assert not leave_largest_out(twice, broken, names(twice)).is_inside


# ---------------------------------------------------------------------- the best family
def test_the_best_family_and_where_it_stays_best() -> None:
    # Errors above 1 are refused, so the large model is measured from 3 on.
    x = np.repeat(3.0 ** np.arange(1, 6), 2)
    fits = {
        "small": fitted(x, noisy(1, x, floor=0.1, scale=0.5, exponent=0.25)),
        "large": fitted(x, noisy(2, x, floor=0.1, scale=1.0, exponent=0.5)),
    }
    small, large = compute_optimal(fits, 4, seed=0, draws=200), compute_optimal(fits, 200, seed=0, draws=200)
    assert (small.family, large.family) == ("small", "large")
    assert small.probability > 0.99
    assert large.probability > 0.99
    # The laws cross where 0.5 x**-0.25 = x**-0.5, at 16.
    assert small.high == pytest.approx(16, rel=0.1)
    assert (small.below, small.above) == ("", "large")
    assert (large.below, large.above) == ("small", "")
    assert (small.low, large.high) == (0.3, 2430)
    near = compute_optimal(fits, 16, seed=0, draws=200)
    assert min(near.probabilities.values()) > 0.02
    assert sum(near.probabilities.values()) == pytest.approx(1)


def test_families_that_say_nothing_are_left_out_with_their_reason() -> None:
    x = np.repeat(SIZES, 2)
    fits = {"good": fitted(x, noisy(1, x)), "flat": fitted(x, np.full(10, 0.2))}
    found = compute_optimal(fits, 100, seed=0)
    assert found.family == "good"
    assert found.probabilities == {"good": 1}
    assert "does not fall" in found.not_compared["flat"]
    with pytest.raises(UserError, match=r"No family can be recommended for 100.*flat: The fit says nothing"):
        compute_optimal({"flat": fits["flat"]}, 100, seed=0)
    with pytest.raises(UserError, match="No prediction at 1e"):
        compute_optimal(fits, 1e5, seed=0)


def test_equal_runs_of_two_families_are_a_coin_s_throw_and_reproducible() -> None:
    x = np.repeat(SIZES, 2)
    fits = {"a": fitted(x, noisy(1, x)), "b": fitted(x, noisy(1, x))}
    found = compute_optimal(fits, 100, seed=0, draws=400)
    assert 0.4 < found.probability < 0.6
    again = {name: fitted(x, noisy(1, x)) for name in ("b", "a")}  # Laws of their own: drawn anew, in another order.
    assert compute_optimal(again, 100, seed=0, draws=400).probabilities == found.probabilities
    assert compute_optimal(fits, 100, seed=1, draws=400).probabilities != found.probabilities


def test_a_thousand_refits_take_well_below_a_second() -> None:
    x = np.repeat(SIZES, 2)
    fits = {"a": fitted(x, noisy(1, x))}
    begin = time.process_time()
    compute_optimal(fits, 100, seed=0, draws=1000)
    assert time.process_time() - begin < 1.0
