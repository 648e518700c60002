"""Tests of differences against scipy and values computed by hand."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from review_runs import write_run
from scipy import stats
from scipy.special import expit

from pipeline.evaluate import differences, intervals
from pipeline.monitor.run_page import WeightsOrigin
from pipeline.review import statistics, table
from pipeline.review.record import Series, from_folder


def test_two_proportions_by_hand() -> None:
    found = differences.of_proportions(56 / 70, 70, 48 / 80, 80)
    # Newcombe 1998, table II, row (a), method 10: 0.0524 to 0.3339.
    assert (found.low, found.high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))
    # The z-test of two proportions is the chi-squared test of their table.
    table = [[56, 14], [48, 32]]
    assert found.p == pytest.approx(stats.chi2_contingency(table, correction=False).pvalue)
    assert differences.in_words(found, found.p) == "more than noise of the test images"


def test_two_equal_scores_are_noise() -> None:
    for score in (0.0, 0.5, 1.0):
        found = differences.of_proportions(score, 100, score, 100)
        assert found.p == 1
        assert found.low < 0 < found.high


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (5, 1), (10, 30), (700, 600)])
def test_mcnemar_is_the_binomial_test_of_the_images_that_differ(only_first: int, only_second: int) -> None:
    first = np.array([True] * only_first + [False] * only_second + [True] * 1000)
    second = np.array([False] * only_first + [True] * only_second + [True] * 1000)
    found = differences.of_same_images(first, second)
    assert found.value == pytest.approx(first.mean() - second.mean())
    if only_first + only_second == 0:
        assert found.p == 1
    else:
        exact = stats.binomtest(only_first, only_first + only_second).pvalue
        assert found.p == pytest.approx(exact, rel=0.01 if only_first == 700 else 1e-9)
    a, b, n = (only_first + 1) / (len(first) + 2), (only_second + 1) / (len(first) + 2), len(first) + 2
    half = 1.959964 * math.sqrt((a + b - (a - b) ** 2) / n)
    assert (found.low, found.high) == (pytest.approx(a - b - half), pytest.approx(a - b + half))


def test_students_t_is_that_of_scipy() -> None:
    first, second = [0.71, 0.73, 0.72], [0.69, 0.70, 0.68, 0.70]
    found, expected = differences.of_seeds(first, second), stats.ttest_ind(first, second)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_seeds_with_equal_scores_on_a_few_images_prove_nothing() -> None:
    """Scores of 20 images are multiples of 0.05, which equal ones may be off by: a deviation of 0.05 / sqrt(12) is
    assumed.
    """
    pairs = [0.9, 0.9], [0.95, 0.95]
    found = differences.of_seeds(*pairs, 20)
    error = 0.05 / math.sqrt(12)
    assert found.p == pytest.approx(2 * stats.t.sf(0.05 / error, 2))
    assert found.high == pytest.approx(-0.05 + stats.t.ppf(0.975, 2) * error)
    assert intervals.of_seeds([0.9, 0.9], 200).high == pytest.approx(0.9 + 12.7062 * error / 10 / math.sqrt(2))
    paired = differences.of_same_seeds([0.8, 0.85, 0.9, 0.95], [0.75, 0.8, 0.85, 0.9], 20)
    assert paired.p == pytest.approx(2 * stats.t.sf(0.05 / (error * math.sqrt(2 / 4)), 3))
    # Scores that differ are as before, and nothing follows where the number of images is unknown.
    assert differences.of_seeds([0.9, 0.95], pairs[1], 20) == differences.of_seeds([0.9, 0.95], pairs[1])
    assert differences.of_seeds(*pairs).p == 1
    assert differences.of_same_seeds([0.3, 0.4], [0.2, 0.3]).p == 1


def test_holm_by_hand() -> None:
    assert differences.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert differences.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert differences.holm([]) == []


def test_groups_of_equal_size_are_tested_by_their_means() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 60)) < [[0.8], [0.6]]
    groups = np.repeat(np.arange(12), 5)
    found = differences.of_same_groups(first, second, groups)
    expected = stats.ttest_1samp((first.astype(float) - second).reshape(12, 5).mean(1), 0)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    # Where each group has the same difference, it may be off by the rounding to whole images.
    right = np.tile([True, True, True, True, False], 12)
    same = differences.of_same_groups(right, np.tile([True, True, True, False, False], 12), groups)
    assert same.p == pytest.approx(2 * stats.t.sf(0.2 / (math.sqrt(2 / 12 / 12) / 5), 11))
    assert same.low < 0.2 < same.high
    # Of one group nothing follows.
    alone = differences.of_same_groups(first, second, np.zeros(60, int))
    assert (alone.low, alone.high, alone.p) == (-1, 1, 1)


def test_an_effective_number_is_that_of_independent_images() -> None:
    def number(right: np.ndarray, groups: np.ndarray) -> float:
        return intervals.effective_number(np.bincount(groups, weights=right), np.bincount(groups))

    rng = np.random.default_rng(0)
    right = rng.random(500) < 0.7
    assert number(right, np.arange(500)) == pytest.approx(500, abs=1)  # Each alone.
    assert number(right, 3 * np.arange(500)) == number(right, np.arange(500))  # Groups that are excluded do not count.
    of_tens = np.repeat(np.arange(50), 10)
    factor = (stats.t.ppf(0.975, 499) / stats.t.ppf(0.975, 49)) ** 2
    assert number(np.repeat(rng.random(50) < 0.7, 10), of_tens) == pytest.approx(50 * factor, rel=0.03)
    # A single error is no proof that errors are independent: there are about as many as without any.
    all_right, one_wrong = np.ones(500), np.arange(500) > 0
    assert number(all_right, of_tens) == pytest.approx(2 * 50 * factor, rel=0.05)
    assert number(one_wrong, of_tens) == pytest.approx(number(all_right, of_tens), rel=0.2)
    assert number(right, np.zeros(500, int)) == 1
    assert number(np.ones(1), np.zeros(1, int)) == 1


@pytest.mark.parametrize("largest", [0, 300])
def test_equal_models_on_groups_differ_rarely_and_intervals_hold(largest: int) -> None:
    """Where groups have an effect of their own, also if one has half of the images; what ignores them is wrong in every
    third draw.
    """
    rng = np.random.default_rng(0)
    inside, called = [], []
    for _ in range(300):
        sizes = rng.integers(3, 30, 20)
        sizes[0] = largest or sizes[0]
        groups = np.repeat(np.arange(20), sizes)
        shared, own = rng.normal(size=(2, 20))
        first, second = (rng.random(len(groups)) < expit(1.5 * shared + sign * own)[groups] for sign in (1, -1))
        effective = intervals.effective_number(np.bincount(groups, weights=first), np.bincount(groups))
        found = (intervals.of_samples(float(first.mean()), number) for number in (effective, len(groups)))
        inside.append([interval.low <= 0.5 <= interval.high for interval in found])
        tests = differences.of_same_groups(first, second, groups), differences.of_same_images(first, second)
        called.append([test.p < 0.05 for test in tests])
    (over_groups, over_images), (by_group, by_image) = np.mean(inside, axis=0), np.mean(called, axis=0)
    assert over_groups > 0.91 > 0.65 > over_images
    assert by_group < 0.08 < 0.3 < by_image


def predictions(folder: Path, right: np.ndarray, **more: np.ndarray) -> None:
    buffer = io.BytesIO()
    true = np.arange(len(right)) % 10
    more |= {"true": true, "predicted": np.where(right, true, (true + 1) % 10), "probability": np.ones(len(right))}
    more["of_label"] = right.astype(np.float32)
    np.savez(buffer, rows=np.arange(len(right)), **more)
    (folder / "page" / "predictions.npz").write_bytes(buffer.getvalue())


def test_the_test_that_fits_is_chosen(tmp_path: Path) -> None:
    """Seeds of one setting are one contender; the same images are paired; predictions of another evaluation are not
    used.
    """
    rng = np.random.default_rng(0)
    right = {"a": rng.random(400) < 0.9, "b": rng.random(400) < 0.8, "c": rng.random(400) < 0.7}
    folders = [
        write_run(tmp_path / name, f"optimizer.lr=0.00{i}", evaluations={20: float(of.mean())})
        for i, (name, of) in enumerate(right.items(), 1)
    ]
    for folder in folders[:2]:
        predictions(folder, right[folder.name])
    predictions(folders[2], right["a"])
    folders += [
        write_run(tmp_path / f"seed{seed}", "optimizer.lr=0.009", f"seed={seed}", evaluations={20: top1})
        for seed, top1 in enumerate((0.5, 0.52, 0.54))
    ]
    records = {folder.name: from_folder(folder) for folder in folders}
    found = statistics.contenders(records)
    assert [contender.title for contender in found] == ["a", "b", "c", "seed0 (3 seeds)"]
    pairs = {(p.first.names[0], p.second.names[0]): p.difference for p in statistics.pairs_of(found)}
    assert {names: d.method for names, d in pairs.items()} == {
        ("a", "b"): differences.MCNEMAR,
        ("a", "c"): differences.PROPORTIONS,
        ("b", "c"): differences.PROPORTIONS,
        ("a", "seed0"): differences.STUDENT,
        ("b", "seed0"): differences.STUDENT,
        ("c", "seed0"): differences.STUDENT,
    }
    only = [int((right[x] & ~right[y]).sum()) for x, y in ("ab", "ba")]
    assert pairs["a", "b"].p == pytest.approx(stats.binomtest(only[0], sum(only)).pvalue)


def test_images_in_groups_are_tested_by_group(tmp_path: Path) -> None:
    """By the predictions of the same images, or else by the number of images that would be as uncertain."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 10)
    right = {name: rng.random(400) < share for name, share in (("a", 0.9), ("b", 0.8))}
    records = {}
    for i, (name, of) in enumerate(right.items(), 1):
        folder = write_run(tmp_path / name, f"optimizer.lr=0.00{i}", evaluations={20: float(of.mean())})
        predictions(folder, of, groups=groups)
        effective = Series.of({20: 55.5})
        record = from_folder(folder)
        records[name] = replace(record, series=record.series | {"test_top1_effective_images": effective})
    (pair,) = statistics.pairs_of(statistics.contenders(records))
    assert pair.difference == differences.of_same_groups(right["a"], right["b"], groups)
    score = records["a"].last_score
    assert (score.num_samples, score.interval) == (400, intervals.of_samples(score.value, 55.5))
    for name in records:
        (tmp_path / name / "page" / "predictions.npz").unlink()
    without = {name: replace(from_folder(tmp_path / name), series=record.series) for name, record in records.items()}
    (pair,) = statistics.pairs_of(statistics.contenders(without))
    assert pair.difference == differences.of_proportions(right["a"].mean(), 55.5, right["b"].mean(), 55.5)


def test_a_run_that_ended_halfway_is_no_seed_of_those_that_did_not(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"seed{seed}", f"seed={seed}", evaluations=evaluations)
        for seed, evaluations in enumerate(({10: 0.3, 20: 0.52}, {10: 0.3, 20: 0.5}, {10: 0.3}))
    ]
    found = statistics.contenders({folder.name: from_folder(folder) for folder in folders})
    assert [(contender.title, contender.values) for contender in found] == [
        ("seed0 (2 seeds)", (0.52, 0.5)),
        ("seed2", (0.3,)),
    ]


def test_runs_from_weights_that_changed_are_no_seeds_of_each_other(tmp_path: Path) -> None:
    """The folder that both name trained on between them, or more images were excluded. Their mean was called one over
    two seeds.
    """
    weights = [WeightsOrigin("runs/vit", digest, step=step) for step, digest in ((100, "a" * 64), (200, "b" * 64))]
    origins = dict(zip("abc", (*weights, weights[1]), strict=True))
    records = {
        name: from_folder(
            write_run(tmp_path / name, "init.weights=runs/vit", f"seed={seed}", evaluations={20: 0.5}, origin=origin)
        )
        for seed, (name, origin) in enumerate(origins.items())
    }
    assert statistics.seed_groups(records) == [("a",), ("b", "c")]
    assert [table.row(name, record)["Data"]["parent_sha256"] for name, record in records.items()] == [
        w * 64 for w in "abb"
    ]
    others = {"excluded": "2 of copies.txt"}
    records["c"] = replace(records["c"], parameters={**records["c"].parameters, **others})
    records["b"] = replace(records["b"], tags={**records["b"].tags, "teacher": "runs/large, step 5"})
    records["a"] = replace(records["a"], origin=origins["b"])
    assert statistics.seed_groups(records) == [("a",), ("b",), ("c",)]


def test_the_same_seeds_are_compared_pair_by_pair() -> None:
    first, second = [0.71, 0.74, 0.69, 0.75], [0.70, 0.72, 0.69, 0.72]
    found, truth = differences.of_same_seeds(first, second), stats.ttest_rel(first, second)
    low, high = truth.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx((truth.pvalue, low, high))
    assert found.value == pytest.approx(0.015)
    assert found.high - found.low < differences.of_seeds(first, second).high - differences.of_seeds(first, second).low
