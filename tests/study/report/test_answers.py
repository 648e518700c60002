"""What follows from the results of made-up studies, whose law and differences are known."""

import math
from dataclasses import replace

import pytest
import synthetic_study as made_up

from pipeline.evaluate.intervals import of_samples
from pipeline.review.statistics import PAIRED, PROPORTIONS, STUDENT, of_proportions
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig
from pipeline.study.laws.fit_optimal import Optimal
from pipeline.study.report.answers import (
    Point,
    answer,
    difference,
    frontier,
    next_larger,
    points_of,
    score_title,
    title_of,
)
from pipeline.study.report.published import DATA_SETS, data_set_of, positions_of


def point(model: str, x: float, *scores: float, seeds: tuple[int, ...] | None = None, num_test: int = 10_000) -> Point:
    return Point(model, "F", 1000, x, x, seeds or tuple(range(len(scores))), scores, num_test, num_test)


# -------------------------------------------------------------------- points
def test_a_point_is_the_seeds_of_one_model_at_one_size_and_length() -> None:
    points = points_of(made_up.data_size(seeds=3))
    assert len(points) == 8
    assert all(found.seeds == (0, 1, 2) and found.interval and found.interval.over == "over seeds" for found in points)


def test_a_single_run_has_an_interval_over_its_test_images_and_a_mean_over_tasks_none() -> None:
    results = made_up.data_size(seeds=1)
    assert all(found.interval and found.interval.over == "over test samples" for found in points_of(results))
    # Of images in groups it is that of fewer; over seeds, nothing of that is known.
    cells = [replace(cell, effective_images=dict.fromkeys(cell.num_test, 50.0)) for cell in results.cells]
    grouped = points_of(replace(results, cells=cells))
    assert [found.interval for found in grouped] == [of_samples(found.scores[0], 50.0) for found in grouped]
    assert difference(*grouped[:2]) == of_proportions(grouped[0].mean, 50.0, grouped[1].mean, 50.0)
    assert all(found.num_test > 50 for found in grouped)
    vtab = made_up.study("scaling", [made_up.cell("A", "A", 1.0, 0, 0.7, "scaling", name="vtab")], "vtab")
    assert points_of(vtab)[0].interval is None


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.1, 1.1])
def test_a_score_that_is_no_share_is_missing(score: float) -> None:
    results = made_up.study("data_size", [made_up.cell("A", "A", 100, 0, score, "data_size")])
    assert points_of(results) == []


# -------------------------------------------------------------------- frontier
def test_the_frontier_has_the_best_model_of_each_equal_budget() -> None:
    found = frontier(
        # Budgets differ by the rounding to whole steps.
        [point("S", 1.0, 0.5), point("S", 2.0, 0.55), point("L", 0.99, 0.4), point("L", 2.01, 0.6)]
    )
    assert [(p.model, p.exaflops) for p in found] == [("S", 1.0), ("L", 2.01)]


def test_the_frontier_compares_budgets_that_differ_by_interpolation() -> None:
    s = [point("S", 1.0, 0.5), point("S", 4.0, 0.6)]
    below, above = point("L", 2.0, 0.54), point("L", 2.0, 0.56)  # S is at 0.55 there.
    assert below not in frontier([*s, below])
    assert above in frontier([*s, above])


def test_a_models_own_cheaper_run_removes_nothing_and_of_equal_models_one_stays() -> None:
    falling = [point("S", 1.0, 0.6), point("S", 2.0, 0.59)]
    assert frontier(falling) == falling
    equal = [point("S", 1.0, 0.5), point("L", 1.001, 0.5)]
    assert frontier(equal) == equal[:1]


def test_the_papers_vits_have_the_frontier_that_its_figure_5_shows() -> None:
    from pipeline.study.report.published import RUNS

    runs = [point(run.model, run.exaflops, run.scores[0] / 100) for run in RUNS if run.family == "ViT"]
    found = frontier(runs)
    assert [(p.model, p.exaflops) for p in found] == [
        ("ViT-B/32", 55), ("ViT-L/32", 196), ("ViT-L/16", 783), ("ViT-L/16", 1567), ("ViT-H/14", 4262),
    ]  # fmt: skip


# -------------------------------------------------------------------- laws
def test_laws_of_models_predict_the_next_larger_run_and_the_left_out_one() -> None:
    answers = answer(made_up.data_size())
    assert [line.name for line in answers.lines] == ["ViT-Ti/4", "R26"]
    for line, scale, exponent in zip(answers.lines, (40.0, 4.0), (0.48, 0.24), strict=True):
        assert line.prediction
        assert line.holdout
        assert line.prediction.x == 100_000
        assert line.prediction.low < 1 - made_up.law(100_000, scale, exponent) < line.prediction.high
        assert line.holdout.is_inside
        # The noise of both lines together: 24 runs less 8 means, and 2 of cells.
        assert line.fit
        assert line.fit.noise.num_runs == 24


def test_scaling_has_lines_of_families_and_of_their_models() -> None:
    answers = answer(made_up.scaling())
    assert [line.name for line in answers.lines] == ["ViT", "BiT"]
    assert len(answers.models) == 4
    assert all(len({p.exaflops for p in line.points}) == len(line.points) == 4 for line in answers.lines)


def test_families_of_one_model_have_no_second_line() -> None:
    cells = [cell for cell in made_up.scaling().cells if cell.model.endswith("-1")]
    answers = answer(made_up.study("scaling", cells))
    assert answers.families == []
    assert [line.name for line in answers.lines] == ["ViT-1", "BiT-1"]


def test_the_best_model_of_a_budget_is_that_of_the_true_law() -> None:
    results = made_up.scaling(noise=0.001, models=3)
    answers = answer(replace(results, cells=[cell for cell in results.cells if cell.family == "ViT"]))
    best = {budget: found.family for budget, found in answers.optimal if isinstance(found, Optimal)}
    assert list(best) == [1, 2, 4, 8, 16]
    # By the law they were made from: 0.1 * size ** -0.5 + 0.14 * (x / size) ** -0.5.
    true = {
        x: min(range(3), key=lambda n: 0.1 * (0.25 * 3**n) ** -0.5 + 0.14 * (x / (0.25 * 3**n)) ** -0.5)
        for x in (1, 2, 8)
    }
    assert {x: best[x] for x in true} == {x: f"ViT-{n}" for x, n in true.items()}


def test_too_few_sizes_are_a_sentence_and_no_law() -> None:
    answers = answer(made_up.data_size(sizes=(25_000, 50_000)))
    for line in answers.lines:
        assert line.fit is None
        assert line.prediction is None
        assert line.holdout is None
        assert (
            line.why_not
            == f"No law is fitted to {line.name}: it needs scores at 4 different numbers of training images, there are 2."
        )


def test_a_law_that_may_be_noise_gives_no_prediction() -> None:
    cells = [made_up.cell("A", "A", x, seed, 0.5, "data_size") for x in (100, 200, 400, 800) for seed in range(2)]
    (line,) = answer(made_up.study("data_size", cells)).lines
    assert line.prediction is None
    assert "The fit says nothing" in line.no_prediction


@pytest.mark.parametrize(("xs", "expected"), [((1, 2, 4, 8), 16), ((10, 100, 1000), 4000), ((8, 4, 8), 16)])
def test_the_next_larger_run_is_one_step_further(xs: tuple[float, ...], expected: float) -> None:
    assert next_larger(xs) == expected


# -------------------------------------------------------------------- differences
def test_who_wins_where_with_the_correction_for_all_sizes() -> None:
    leads = answer(made_up.data_size()).leads
    assert [(lead.x, lead.best.model) for lead in leads] == [
        (6250, "R26"), (12500, "R26"), (25000, "ViT-Ti/4"), (50000, "ViT-Ti/4"),
    ]  # fmt: skip
    assert all(lead.difference and lead.difference.p <= lead.corrected for lead in leads)
    largest = max(leads, key=lambda lead: lead.difference.p if lead.difference else 0)
    smallest = min(leads, key=lambda lead: lead.difference.p if lead.difference else 0)
    assert largest.difference
    assert largest.corrected == largest.difference.p
    assert smallest.difference
    assert smallest.corrected == pytest.approx(4 * smallest.difference.p)


def test_two_lengths_of_one_model_do_not_lead_over_each_other() -> None:
    """Budgets that differ by less than 5 % are compared as one: a model led over its own shorter run."""
    means = {("A", 1.0): 0.70, ("A", 1.04): 0.71, ("B", 1.0): 0.60}
    cells = [
        made_up.cell(model, model, x, seed, mean + 0.001 * seed, "scaling")
        for (model, x), mean in means.items()
        for seed in range(3)
    ]
    (lead,) = answer(made_up.study("scaling", cells)).leads
    assert (lead.best.model, lead.best.x, lead.second.model) == ("A", 1.04, "B")
    alone = [cell for cell in cells if cell.model == "A"]
    assert answer(made_up.study("scaling", alone)).leads == []


def test_pairs_of_few_or_other_seeds_are_not_paired() -> None:
    scores = (0.5, 0.6, 0.55, 0.65)
    better = tuple(score + 0.01 for score in scores)
    paired = difference(point("A", 1, *better), point("B", 1, *scores))
    others = difference(point("A", 1, *better), point("B", 1, *scores, seeds=(4, 5, 6, 7)))
    few = difference(point("A", 1, *better[:3]), point("B", 1, *scores[:3]))
    assert paired
    assert others
    assert few
    assert (paired.method, others.method, few.method) == (PAIRED, STUDENT, STUDENT)
    assert paired.high - paired.low < 1e-3 < 0.1 < others.high - others.low


def test_single_runs_differ_over_test_images_or_not_at_all() -> None:
    found = difference(point("A", 1, 0.6), point("B", 1, 0.5))
    assert found
    assert found.method == PROPORTIONS
    assert difference(point("A", 1, 0.6, num_test=0), point("B", 1, 0.5)) is None


def test_an_ablation_compares_all_with_the_first_model() -> None:
    answers = answer(made_up.ablation())
    assert answers.baseline == "learned-1d"
    assert answers.leads == []
    assert answers.lines == []
    variants = {variant.point.model: variant for variant in answers.variants}
    assert [v.value for v in answers.variants] == sorted((v.value for v in answers.variants), reverse=True)
    assert variants["learned-1d"].difference is None
    none = variants["none"].difference
    assert none
    assert none.low < none.value < none.high < -0.03
    assert variants["none"].corrected < 0.05
    assert variants["learned-2d"].corrected > 0.05


def test_an_ablation_without_its_first_model_has_no_differences() -> None:
    results = made_up.ablation()
    cells = [
        replace(cell, state="diverged", scores={}) if cell.model == "learned-1d" else cell for cell in results.cells
    ]
    answers = answer(replace(results, cells=cells))
    assert answers.variants == []
    assert answers.baseline == ""


# -------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("score", "column"),
    [
        ("finetune:imagenet", "ImageNet"), ("finetune:imagenet1k_384px", "ImageNet"), ("finetune:cifar10", "CIFAR-10"),
        ("finetune:cifar100-384", "CIFAR-100"), ("finetune:pets_384px", "Oxford-IIIT Pets"), ("top1", None),
        ("finetune:cars", None), ("5shot", None), ("finetune:imagenet_real", "ImageNet ReaL"),
    ],
)  # fmt: skip
def test_which_scores_are_comparable_with_table_6(score: str, column: str | None) -> None:
    found = data_set_of(score)
    assert (None if found is None else DATA_SETS[found]) == column


def test_which_variants_are_those_of_table_8() -> None:
    names = ["2-D learned", "rel"]
    for file in ("ablation", "ablation_cpu"):
        names += [model.name for model in schema.load(StudyConfig, f"configs/study/{file}.yaml").models]
    assert {name: row.title for name in names if (row := positions_of(name))} == {
        "2-D learned": "2-D learned",
        "learned-1d": "1-D learned",
        "none": "none",
        "learned-2d": "2-D learned",
        "relative": "relative",
        "learned-1d-every-block": "1-D learned, in every layer",
        "learned-1d-shared": "1-D learned, in every layer, shared",
    }
    assert positions_of("learned-1d-every-block-shared") == positions_of("learned-1d-shared")


def test_names_of_scores() -> None:
    assert [title_of(name) for name in ("top1", "best_top1", "5shot", "20nn", "finetune:pets", "vtab", "5shot_l2_1024")] == [
        "top-1 accuracy", "best top-1 accuracy of all evaluations", "5-shot linear accuracy", "20-NN accuracy", "top-1 accuracy after fine-tuning (pets)",
        "VTAB-1k mean accuracy", "5-shot linear accuracy l2 1024",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "title"),
    [
        ((0, 0), "VTAB-1k mean accuracy"),  # Of an earlier version, which did not count them.
        ((19, 19), "VTAB-1k mean accuracy"),
        ((3, 3), "mean accuracy of 3 VTAB-1k tasks"),
        ((19, 3), "mean accuracy of 3 to 19 VTAB-1k tasks"),
    ],
)
def test_a_mean_of_some_tasks_is_not_called_the_mean_of_vtab(numbers: tuple[int, int], title: str) -> None:
    cells = [
        replace(made_up.cell("A", "A", 1.0, seed, 0.7, "scaling", name="vtab"), vtab_tasks=number)
        for seed, number in enumerate(numbers)
    ]
    assert score_title(made_up.study("scaling", cells, "vtab")) == title
    assert score_title(made_up.study("scaling", cells, "top1")) == "top-1 accuracy"
