"""The answer to the questions `data_size` and `scaling`: who wins at which amount, fitted laws, predictions and their
check.

A *line* is the points that one law is fitted to: those of each model over data sizes or compute; and, of families with
several models, their frontier, that is the points that no other model of the family beats at the same compute or less.
The paper's Figure 5 has one line a family; a law through all points of a family would describe badly chosen models,
too.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from operator import attrgetter

import numpy as np

from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table
from pipeline.experiment.law import NUM_PARAMETERS, Estimate, fit_power_laws, leave_largest_out
from pipeline.experiment.points import Line, Point, Tested, percent, points_of, table, tested
from pipeline.experiment.study_figures import draw_scores
from pipeline.experiment.table import StudyResults

# Equal budgets differ by the rounding to whole steps.
_SAME_BUDGET = 1.05
# The next larger run is one step further, as far as steps between the runs are on average, and at most so many times:
# the check without the largest runs says nothing of longer ways.
_MAX_STEP = 4.0
_x = attrgetter("x")
_METHOD = (
    "Laws, of at least 4 amounts: 1 - score = floor + scale x amount ^ -exponent, by least squares, with 95 % intervals"
    " by bootstrap of the residuals of all lines (those of models and of families apart); that of a prediction includes"
    " the scatter of a new run. The next larger run is one average step further, at most 4 times; the check leaves the"
    " runs of the largest amount out. A law whose fall may be noise predicts nothing, nor does one whose interval is"
    " wider than the range of all measured errors. A family's law goes through its best models only, so it is a little"
    " too high."
)


def answer(results: StudyResults) -> Iterator[Block]:
    """The blocks of the report."""
    points = points_of(results)
    models, families = lines(points, results)
    if found := leads(points, 1.0 if results.counts_images else _SAME_BUDGET):
        yield table(found, results, "best", "second")
    if picture := draw_scores(points, families or models, results):
        yield PngImage("score.png", "Scores with 95 % intervals, fitted laws, and predictions", picture)
    if models or families:
        yield Heading("Laws, predictions and their check")
        yield _laws_table([*families, *models], results)
    yield Paragraph(_METHOD)


# -------------------------------------------------------------------- laws
def lines(points: Sequence[Point], results: StudyResults) -> tuple[list[Line], list[Line]]:
    """Returns (lines of models, lines of families; none unless the question is scaling and a family has several
    models), without those of too few points for a law.
    """
    families = {name: [p for p in points if p.family == name] for name in results.families}
    several = not results.counts_images and any(len({p.model for p in own}) > 1 for own in families.values())
    models = _fitted({name: [p for p in points if p.model == name] for name in results.models}, results.seed)
    fronts = {name: frontier(own) for name, own in families.items()} if several else {}
    return models, _fitted(fronts, results.seed)


def _fitted(points: dict[str, list[Point]], seed: int) -> list[Line]:
    above_0 = {name: sorted((p for p in own if p.x > 0), key=_x) for name, own in points.items()}
    runs = {
        name: ([p.x for p in own for _ in p.scores], [1 - score for p in own for score in p.scores])
        for name, own in above_0.items()
        if len({p.x for p in own}) > NUM_PARAMETERS
    }
    found = []
    for name, law in (fit_power_laws(runs, seed) if runs else {}).items():
        own, xs = above_0[name], runs[name][0]
        next_x = next_larger(xs)
        found.append(Line(name, own, law, next_x, law.predict(next_x), leave_largest_out(law, *runs[name])))
    return sorted(found, key=lambda line: list(points).index(line.name))


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other model beats at the same compute or less, by x.

    Another model's score is interpolated in the logarithm of compute between its points, and beyond its largest it is
    that of the largest. A model's own cheaper run removes nothing: where the score falls by chance, that run would
    otherwise be left out, and the frontier be too high.
    """
    ranks = {model: -rank for rank, model in enumerate(dict.fromkeys(point.model for point in points))}
    points = sorted((point for point in points if point.x > 0), key=_x)  # Positive, for the logarithm.

    def is_beaten(point: Point) -> bool:
        for model in {p.model for p in points}:
            own = [p for p in points if p.model == model]
            ways = np.log([p.x / point.x for p in own])
            if model == point.model or ways[0] > math.log(_SAME_BUDGET):
                continue
            means, nearest = [p.mean for p in own], int(np.abs(ways).argmin())
            is_same = abs(ways[nearest]) <= math.log(_SAME_BUDGET)
            other = means[nearest] if is_same else np.interp(0.0, ways, means)
            if (other, ranks[model]) > (point.mean, ranks[point.model]):  # Of equal ones the first model's stays.
                return True
        return False

    return [point for point in points if not is_beaten(point)]


def next_larger(xs: Iterable[float]) -> float:
    """One step beyond the largest, as far as the steps are on average; rounded to three digits."""
    sizes = sorted(set(xs))
    step = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    return float(f"{sizes[-1] * min(step, _MAX_STEP):.3g}")


# -------------------------------------------------------------------- who wins
def leads(points: Sequence[Point], tolerance: float) -> list[Tested]:
    """The best and the second at each x; p is corrected for all pairs at all x. tolerance: of x, as a factor."""
    pairs = []
    for group in _same(points, tolerance):
        best: dict[str, Point] = {}  # Two lengths of one model may be that near, too.
        for point in sorted(group, key=lambda point: -point.mean):
            best.setdefault(point.model, point)
        pairs.append(list(combinations(best.values(), 2)))
    found = tested([pair for of_one in pairs for pair in of_one])
    # The first pair is that of the best and the second.
    starts = np.cumsum([0, *map(len, pairs)])[:-1]
    return [found[start] for start, of_one in zip(starts, pairs, strict=True) if of_one]


def _same(points: Sequence[Point], tolerance: float) -> list[list[Point]]:
    """Points in groups of the same x, by x."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=_x):
        if groups and point.x <= groups[-1][0].x * tolerance:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


# -------------------------------------------------------------------- tables
def _laws_table(found: Sequence[Line], results: StudyResults) -> Table:
    rows = []
    for line in found:
        prediction, check = line.prediction, line.holdout
        exponent, floor = line.law.exponent, line.law.floor
        models = list(dict.fromkeys(point.model for point in line.points))
        rows.append(
            (
                line.name if models == [line.name] else f"family {line.name}: {', '.join(models)}",
                _score(floor),
                f"{exponent.value:.3g} [{exponent.low:.3g}, {exponent.high:.3g}]",
                prediction if isinstance(prediction, str) else f"{_score(prediction)} at {results.number(line.next_x)}",
                (
                    check
                    if isinstance(check, str)
                    else (
                        f"{_score(check.prediction)}, is {percent(1 - check.error)}:"
                        f" {'inside' if check.is_inside else 'outside'}"
                    )
                ),
            )
        )
    header = ("line", "limit of the score, %", "exponent", "next larger run, %")
    return Table((*header, "largest runs, predicted from the others, %"), rows)


def _score(error: Estimate) -> str:
    return percent(1 - error.value, 1 - error.high, 1 - error.low)
