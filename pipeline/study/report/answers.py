"""What follows from a study's results: laws, their predictions and checks, the best model of a budget, differences beyond noise.

A *point* is the mean over seeds of one model at one data size and length. A *line* is the points that one law is fitted to:

    data size    each model: error against number of training images
    scaling      each model: error against compute, over its lengths; and each family: its frontier, that is its points that no other
                 model of the family beats at the same compute or less. The paper's Figure 5 has one line a family; a law through all
                 points of a family would describe badly chosen models, too.
    ablation     none

Nothing here raises on poor data: what cannot be said has a sentence in place of a number.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter

import numpy as np

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.evaluate.intervals import Interval, of_samples
from pipeline.evaluate.intervals import of_seeds as interval_of_seeds
from pipeline.review.statistics import ScoreDifference, holm, of_proportions, of_same_seeds, of_seeds
from pipeline.study.laws.fit import Holdout, PowerLaw, Prediction, common_noise, fit_power_law, leave_largest_out
from pipeline.study.laws.fit_numbers import Noise
from pipeline.study.laws.fit_optimal import Optimal, compute_optimal
from pipeline.study.results import CellResult, StudyResults
from pipeline.transfer.vtab_tasks import TASKS

# Equal budgets differ by the rounding to whole steps.
_SAME_BUDGET = 1.05
# With fewer pairs, what pairing loses in degrees of freedom is more than it gains, unless seeds of both correlate by over 0.4.
PAIRED_FROM = 4
# The next larger run is one step further, as far as steps between the runs are on average, and at most so many times: the check
# without the largest runs says nothing of longer ways.
_MAX_STEP = 4.0
_MIN_SIZES = 4
_SEED = 0
_x = attrgetter("x")


@dataclass(frozen=True)
class Point:
    """The runs of one model at one data size and length, which differ in their seed only. scores: in the order of seeds, shares.

    x: what the study compares by: the number of training images, or compute in `StudyResults.unit`. num_test: test images of each
    score; 0 where it is no proportion of images, or unknown. effective: of images in groups, their `effective_number`; else num_test.
    """

    model: str
    family: str
    data_size: int
    exaflops: float
    x: float
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    num_test: int
    effective: float

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def interval(self) -> Interval | None:
        """95 %: over seeds, of a single one over its test images; None where neither is known."""
        if len(self.scores) > 1:
            return interval_of_seeds(self.scores, self.num_test)
        return of_samples(self.scores[0], self.effective) if self.effective else None


@dataclass(frozen=True)
class Line:
    """Points with their law. why_not: why there is none, or why it says nothing. prediction: for the next larger run.

    holdout: the check without the largest runs. no_prediction, no_check: sentences in place of these.
    """

    name: str
    family: str
    points: list[Point]
    fit: PowerLaw | None = None
    why_not: str = ""
    prediction: Prediction | None = None
    no_prediction: str = ""
    holdout: Holdout | None = None
    no_check: str = ""


@dataclass(frozen=True)
class Lead:
    """Who wins at one x. difference: best minus second; None if it has no interval. corrected: its p by `holm` over all pairs and x."""

    x: float
    best: Point
    second: Point
    difference: ScoreDifference | None
    corrected: float


@dataclass(frozen=True)
class AblationVariant:
    """A model of an ablation, or weights with a number of labels. difference: to the first model of the study, with as many labels.

    It is None for that one, and where it cannot be tested.
    """

    point: Point
    value: float
    difference: ScoreDifference | None
    corrected: float


@dataclass(frozen=True)
class Answers:
    """unit: of x. models, families: lines; families are empty unless the question is scaling and a family has several models.

    optimal: the best model by the laws of the models at each budget, or the sentence why there is none; the last is the next larger
    budget. baseline: the first model, for questions that compare others with it, "" where it has no score.
    """

    results: StudyResults
    unit: str
    points: list[Point]
    models: list[Line]
    families: list[Line]
    leads: list[Lead]
    optimal: list[tuple[float, Optimal | str]]
    variants: list[AblationVariant]
    baseline: str

    @property
    def lines(self) -> list[Line]:
        """Those that a figure shows: families, else models."""
        return self.families or self.models


def answer(results: StudyResults) -> Answers:
    points = points_of(results)
    is_scaling, has_variants = results.question == "scaling", results.question in ("ablation", "labels")
    unit = "training images" if results.counts_images else results.unit[1]
    models = {name: [p for p in points if p.model == name] for name in results.models}
    of_family = {name: [p for p in points if p.family == name] for name in results.families}
    model_lines, family_lines = [], []
    if not has_variants:
        model_lines = _lines(models, unit)
    if is_scaling and any(len({p.model for p in of_one}) > 1 for of_one in of_family.values()):
        family_lines = _lines({name: frontier(of_one) for name, of_one in of_family.items()}, unit)
    variants, baseline = _variants(points, results) if has_variants else ([], "")
    return Answers(
        results,
        unit,
        points,
        model_lines,
        family_lines,
        [] if has_variants else _leads(points, _SAME_BUDGET if is_scaling else 1.0),
        _optimal(model_lines, points) if is_scaling else [],
        variants,
        baseline,
    )


def points_of(results: StudyResults, score: str = "") -> list[Point]:
    """In the order of the cells. score: default, the study's. Cells that are not done or have no usable score are left out."""
    name = score or results.score
    groups: dict[tuple[str, int, int], list[CellResult]] = {}
    for cell in results.scored(name):
        groups.setdefault((cell.model, cell.data_size, cell.steps), []).append(cell)
    found = []
    for cells in groups.values():
        cells.sort(key=lambda cell: cell.seed)
        first = cells[0]
        # A mean over tasks is no proportion of images.
        num_test = 0 if name == "vtab" else min(cell.num_test.get(name, 0) for cell in cells)
        effective = (
            0 if name == "vtab" else min(cell.effective_images.get(name, cell.num_test.get(name, 0)) for cell in cells)
        )
        seeds, scores = tuple(cell.seed for cell in cells), tuple(cell.scores[name] for cell in cells)
        x = float(first.data_size) if results.counts_images else first.exaflops / results.unit[0]
        found.append(
            Point(first.model, first.family, first.data_size, first.exaflops, x, seeds, scores, num_test, effective)
        )
    return found


# -------------------------------------------------------------------- laws
def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other model beats at the same compute or less, by x.

    Another model's score is interpolated in the logarithm of compute between its points, and beyond its largest it is that of the largest. A
    model's own cheaper run removes nothing: where the score falls by chance, that run would otherwise be left out, and the
    frontier be too high.
    """
    points = [point for point in points if point.x > 0]  # Of which there is a logarithm.
    models = list(dict.fromkeys(point.model for point in points))
    curves = {}
    for model in models:
        own = sorted((p for p in points if p.model == model), key=_x)
        curves[model] = np.log([p.x for p in own]), np.array([p.mean for p in own])

    def is_beaten(point: Point) -> bool:
        for place, model in enumerate(models):
            logs, means = curves[model]
            at = math.log(point.x)
            if model == point.model or at < logs[0] - math.log(_SAME_BUDGET):
                continue
            nearest = int(np.abs(logs - at).argmin())
            is_same = abs(logs[nearest] - at) <= math.log(_SAME_BUDGET)
            other = means[nearest] if is_same else np.interp(at, logs, means)
            # Of equal scores, the first model's stays.
            if other > point.mean or (other == point.mean and place < models.index(point.model)):
                return True
        return False

    return sorted((point for point in points if not is_beaten(point)), key=_x)


def _lines(points: dict[str, list[Point]], unit: str) -> list[Line]:
    """Fit each; from two laws on, with the noise of all together, because a few sizes of one line tell little of it."""
    above_0 = {name: sorted((p for p in of_one if p.x > 0), key=_x) for name, of_one in points.items()}
    lines = [_fitted(Line(name, p[0].family, above_0[name]), unit, None) for name, p in points.items() if p]
    fits = [line.fit for line in lines if line.fit]
    if len(fits) > 1:
        noise = common_noise(fits)
        lines = [_fitted(line, unit, noise) if line.fit else line for line in lines]
    return lines


def _runs(points: Sequence[Point]) -> tuple[list[float], list[float], list[str]]:
    runs = [(point.x, 1 - score, f"{point.model} at {point.x:g}") for point in points for score in point.scores]
    return [run[0] for run in runs], [run[1] for run in runs], [run[2] for run in runs]


def _fitted(line: Line, unit: str, noise: Noise | None) -> Line:
    sizes = len({point.x for point in line.points})
    if sizes < _MIN_SIZES:
        text = f"No law is fitted to {line.name}: it needs scores at {_MIN_SIZES} different numbers of {unit}, there {'is' if sizes == 1 else 'are'} {sizes}."
        return replace(line, why_not=text, no_prediction=text, no_check=text)
    runs = _runs(line.points)
    fit = fit_power_law(*runs, noise=noise, unit=unit)
    prediction, no_prediction = None, ""
    try:
        prediction = fit.predict(next_larger([point.x for point in line.points]))
    except UserError as error:
        no_prediction = f"{line.name}: {error}"
    holdout, no_check = _holdout(runs, unit, noise)
    return Line(
        line.name, line.family, line.points, fit, f"{line.name}: {fit.why_not}" if fit.why_not else "",
        prediction, no_prediction, holdout, f"{line.name}: {no_check}" if no_check else "",
    )  # fmt: skip


def _holdout(
    runs: tuple[list[float], list[float], list[str]], unit: str, noise: Noise | None
) -> tuple[Holdout | None, str]:
    """The check without the largest runs, or why there is none. With its own noise if that is known, because the common noise knows the left-out runs."""
    reason = ""
    for one in [None, noise] if noise else [None]:
        try:
            return leave_largest_out(*runs, noise=one, unit=unit), ""
        except UserError as error:
            reason = str(error)
    return None, reason


def next_larger(xs: Iterable[float]) -> float:
    """One step beyond the largest, as far as the steps are on average; rounded to three digits."""
    sizes = sorted(set(xs))
    step = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    return float(f"{sizes[-1] * min(step, _MAX_STEP):.3g}")


def _optimal(lines: Sequence[Line], points: Sequence[Point]) -> list[tuple[float, Optimal | str]]:
    """The best model of each budget of the study and of the next larger, by the models' laws."""
    fits = {line.name: line.fit for line in lines if line.fit and not line.why_not}
    if len(fits) < 2:
        return []
    budgets = [group[0].x for group in _same(points, _SAME_BUDGET)]
    found: list[tuple[float, Optimal | str]] = []
    for budget in [*budgets, next_larger(budgets)]:
        try:
            found.append((budget, compute_optimal(fits, budget, seed=_SEED)))
        except UserError as error:
            found.append((budget, str(error)))
    return found


# -------------------------------------------------------------------- differences
def difference(first: Point, second: Point) -> ScoreDifference | None:
    """First minus second: over seeds, paired from PAIRED_FROM common ones; of single runs over test images; None if neither is known."""
    num_test = min(first.num_test, second.num_test)
    if first.seeds == second.seeds and len(first.seeds) >= PAIRED_FROM:
        return of_same_seeds(first.scores, second.scores, num_test)
    if len(first.scores) + len(second.scores) > 2:
        return of_seeds(first.scores, second.scores, num_test)
    if first.effective and second.effective:
        return of_proportions(first.mean, first.effective, second.mean, second.effective)
    return None


def _same(points: Sequence[Point], tolerance: float) -> list[list[Point]]:
    """Points in groups of the same x, by x."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=_x):
        if groups and point.x <= groups[-1][0].x * tolerance:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _corrected(differences: Sequence[ScoreDifference | None]) -> list[float]:
    """The p of each by `holm` over all that could be tested; 1 for the others."""
    corrected = iter(holm([one.p for one in differences if one]))
    return [next(corrected) if one else 1.0 for one in differences]


def _leads(points: Sequence[Point], tolerance: float) -> list[Lead]:
    pairs = []
    for group in _same(points, tolerance):
        best: dict[str, Point] = {}  # Two lengths of one model may be that near, too.
        for point in sorted(group, key=lambda point: -point.mean):
            best.setdefault(point.model, point)
        pairs += [(group[0].x, *pair) for pair in combinations(best.values(), 2)]
    differences = [difference(one, other) for _, one, other in pairs]
    leads: dict[float, Lead] = {}
    for (x, one, other), tested, p in zip(pairs, differences, _corrected(differences), strict=True):
        leads.setdefault(x, Lead(x, one, other, tested, p))  # The first pair is that of the best and the second.
    return list(leads.values())


def _variants(points: Sequence[Point], results: StudyResults) -> tuple[list[AblationVariant], str]:
    """Each model beside the first of the study, by data size, the best first; and the name of that one, "" if it has no score."""
    # The longest run of each: these questions have one length.
    longest = {(p.data_size, p.model): p for p in sorted(points, key=lambda point: (point.data_size, point.exaflops))}
    firsts = {size: point for (size, name), point in longest.items() if name == results.models[0]}
    if not firsts:
        return [], ""
    compared = [(point, firsts[size]) for (size, _), point in longest.items() if size in firsts]
    differences = [None if point is first else difference(point, first) for point, first in compared]
    found = [
        AblationVariant(point, point.mean - first.mean, one, p)
        for (point, first), one, p in zip(compared, differences, _corrected(differences), strict=True)
    ]
    return sorted(found, key=lambda variant: (variant.point.data_size, -variant.value)), results.models[0]


def score_title(results: StudyResults) -> str:
    """The name of a study's score in words, with its mark. A mean of some of VTAB-1k's tasks is no VTAB-1k score."""
    title, numbers = title_of(results.score), results.vtab_tasks
    if results.score == "vtab" and numbers and numbers != [len(TASKS)]:
        fewest = f"{numbers[0]} to " * (len(numbers) > 1)
        title = f"mean accuracy of {fewest}{counted(numbers[-1], 'VTAB-1k task')}"
    return f"{title}{results.mark(results.score)}"


def title_of(score: str) -> str:
    """A score's name in words."""
    kind, _, name = score.partition(":")
    if kind == "finetune":
        return f"top-1 accuracy after fine-tuning ({name})"
    if found := re.fullmatch(r"top(\d+)|(\d+)shot(.*)|(\d+)nn", score):
        top, shots, rest, neighbours = found.groups()
        if top:
            return f"top-{top} accuracy"
        return f"{shots}-shot linear accuracy{rest.replace('_', ' ')}" if shots else f"{neighbours}-NN accuracy"
    return {"vtab": "VTAB-1k mean accuracy", "best_top1": "best top-1 accuracy of all evaluations"}.get(score, score)
