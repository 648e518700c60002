"""How a study compares: points, the means over seeds; the differences between them; laws fitted to lines of them; and
the figures and tables of these.

A *line* is the points of one model over data sizes or compute, to which a law is fitted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle
from operator import attrgetter

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from pipeline.base.page import (
    COLOURS,
    Block,
    Heading,
    Paragraph,
    PngImage,
    Table,
    add_legend,
    png,
    style_axes,
)
from pipeline.base.words import shorten
from pipeline.evaluate.differences import ScoreDifference, holm, in_words, of_proportions, of_same_seeds, of_seeds
from pipeline.evaluate.intervals import Interval, of_samples
from pipeline.evaluate.intervals import of_seeds as interval_of_seeds
from pipeline.experiment.law import (
    NUM_PARAMETERS,
    Estimate,
    Holdout,
    PowerLaw,
    fit_power_laws,
    leave_largest_out,
)
from pipeline.experiment.table import Row, StudyResults

# With fewer pairs, what pairing loses in degrees of freedom is more than it gains, unless seeds of both correlate by
# over 0.4.
PAIRED_FROM = 4
# Equal budgets differ by the rounding to whole steps.
_SAME_BUDGET = 1.05
# The next larger run is one step further, as far as steps between the runs are on average, and at most so many times:
# the check without the largest runs says nothing of longer ways.
_MAX_STEP = 4.0
_x = attrgetter("x")
_METHOD = (
    "Laws, of at least 4 amounts: 1 - score = floor + scale x amount ^ -exponent, by least squares, with 95 % intervals"
    " by bootstrap of the residuals of all lines; that of a prediction includes"
    " the scatter of a new run. The next larger run is one average step further, at most 4 times; the check leaves the"
    " runs of the largest amount out. A law whose fall may be noise predicts nothing, nor does one whose interval is"
    " wider than the range of all measured errors."
)
_MARKERS = "os^DvPX<>p"
_MAX_NAME = 34


@dataclass(frozen=True)
class Point:
    """The runs of one model at one data size and length, which differ in their seed only. scores: in the order of
    seeds, shares.

    x: what the study compares by: the number of training images, or compute in `StudyResults.unit`. num_test: test
    images of each score; 0 if unknown, or if it is not a proportion of images. effective: of images in groups, their
    `effective_number`; else num_test.
    """

    model: str
    data_size: int
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

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval, extended to the mean despite rounding; without an interval, the mean twice."""
        found = self.interval
        return (min(found.low, self.mean), max(found.high, self.mean)) if found else (self.mean, self.mean)

    @property
    def text(self) -> str:
        return percent(self.mean, *(self.ends if self.interval else ()))


@dataclass(frozen=True)
class Line:
    """Points with their law. prediction: (x, error) of the next larger run; it and holdout may be why there is none."""

    name: str
    points: list[Point]
    law: PowerLaw
    next_x: float
    prediction: Estimate | str
    holdout: Holdout | str


def points_of(results: StudyResults) -> list[Point]:
    """In the order of the cells. Those that are not done or have no usable score are left out."""
    name = results.score
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for cell in results.scored(name):
        groups.setdefault((cell.group, cell.data_size, cell.steps), []).append(cell)
    found = []
    for (model, data_size, _), cells in groups.items():
        first = cells[0]
        nums = [cell.num_test.get(name, 0) for cell in cells]
        effective = min(cell.effective_images.get(name, num) for cell, num in zip(cells, nums, strict=True))
        x = float(data_size) if results.counts_images else first.exaflops / results.unit[0]
        seeds, scores = zip(*((cell.seed, cell.scores[name]) for cell in cells), strict=True)
        found.append(Point(model, data_size, x, seeds, scores, min(nums), effective))
    return found


@dataclass(frozen=True)
class Tested:
    """First minus second. difference: None where no noise is known. corrected: its p by `holm` over all that are tested
    together.
    """

    first: Point
    second: Point
    difference: ScoreDifference | None
    corrected: float

    @property
    def texts(self) -> tuple[str, str, str]:
        """The difference in points, its corrected p, and the verdict."""
        if found := self.difference:
            shown = f"{100 * found.value:+.2f} [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"
            return shown, f"{self.corrected:.3g}", in_words(found, self.corrected)
        return f"{100 * (self.first.mean - self.second.mean):+.2f}", "–", "not known: a single run of each"


def difference(first: Point, second: Point) -> ScoreDifference | None:
    """First minus second: over seeds, paired from PAIRED_FROM common ones; of single runs over test images; None if
    neither is known.
    """
    num_test = min(first.num_test, second.num_test)
    if first.seeds == second.seeds and len(first.seeds) >= PAIRED_FROM:
        return of_same_seeds(first.scores, second.scores, num_test)
    if len(first.scores) + len(second.scores) > 2:
        return of_seeds(first.scores, second.scores, num_test)
    if first.effective and second.effective:
        return of_proportions(first.mean, first.effective, second.mean, second.effective)
    return None


def corrected(
    pairs: Sequence[tuple[Point, Point]], compare: Callable[[Point, Point], ScoreDifference | None] = difference
) -> list[Tested]:
    """The difference of each pair, with Holm's correction for all of them."""
    found = [compare(*pair) for pair in pairs]
    ps = iter(holm([one.p for one in found if one]))
    return [Tested(*pair, one, next(ps) if one else 1.0) for pair, one in zip(pairs, found, strict=True)]


def differences(results: StudyResults) -> list[Tested]:
    """Each model minus the first of the study, by data size, the best first; [] if that one has no score. Models have
    one length each.
    """
    points, first = points_of(results), results.models[:1]
    firsts = {point.data_size: point for point in points if point.model in first}
    others = [point for point in points if point.model not in first and point.data_size in firsts]
    others.sort(key=lambda point: (point.data_size, -point.mean))
    return corrected([(point, firsts[point.data_size]) for point in others])


def table(found: Sequence[Tested], results: StudyResults, first: str, second: str) -> Table:
    """first, second: what the models of each difference are."""
    rows = [
        (results.number(a.x), a.model, f"{len(a.scores)}", a.text, b.model, b.text, *one.texts)
        for one in found
        for a, b in [(one.first, one.second)]
    ]
    scores = (f"{results.score}, %", second, "its, %")
    return Table((results.unit[1], first, "seeds", *scores, "difference, points", "p, corrected", "difference"), rows)


def percent(score: float, *ends: float) -> str:
    return f"{100 * score:.2f}" + (f" [{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]" if ends else "")


# -------------------------------------------------------------------- the answer by data size or compute
def answer(results: StudyResults) -> Iterator[Block]:
    """The blocks of the report."""
    points = points_of(results)
    models = lines(points, results)
    if found := leads(points, 1.0 if results.counts_images else _SAME_BUDGET):
        yield table(found, results, "best", "second")
    if picture := draw_scores(points, models, results):
        yield PngImage("score.png", "Scores with 95 % intervals, fitted laws, and predictions", picture)
    if models:
        yield Heading("Laws, predictions and their check")
        yield _laws_table(models, results)
    yield Paragraph(_METHOD)


# -------------------------------------------------------------------- laws
def lines(points: Sequence[Point], results: StudyResults) -> list[Line]:
    """Lines of models, without those of too few points for a law."""
    above_0 = {name: sorted((p for p in points if p.model == name and p.x > 0), key=_x) for name in results.models}
    runs = {
        name: ([p.x for p in own for _ in p.scores], [1 - score for p in own for score in p.scores])
        for name, own in above_0.items()
        if len({p.x for p in own}) > NUM_PARAMETERS
    }
    found = []
    for name, law in (fit_power_laws(runs, results.seed) if runs else {}).items():
        own, xs = above_0[name], runs[name][0]
        next_x = next_larger(xs)
        found.append(Line(name, own, law, next_x, law.predict(next_x), leave_largest_out(law, *runs[name])))
    return sorted(found, key=lambda line: results.models.index(line.name))


def next_larger(xs: Iterable[float]) -> float:
    """One step beyond the largest, as far as the steps are on average; rounded to three digits."""
    sizes = sorted(set(xs))
    step = (sizes[-1] / sizes[0]) ** (1 / (len(sizes) - 1))
    return float(f"{sizes[-1] * min(step, _MAX_STEP):.3g}")


# -------------------------------------------------------------------- who wins
def leads(points: Sequence[Point], tolerance: float) -> list[Tested]:
    """The best and the second at each x; p is corrected for all pairs at all x. tolerance: of x, as a factor."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=_x):
        if not groups or point.x > groups[-1][0].x * tolerance:
            groups.append([])
        groups[-1].append(point)
    pairs, starts = list[tuple[Point, Point]](), list[int]()
    for group in groups:
        best: dict[str, Point] = {}  # Two lengths of one model may be that near, too.
        for point in sorted(group, key=lambda point: -point.mean):
            best.setdefault(point.model, point)
        if len(best) > 1:
            starts.append(len(pairs))  # The first pair is that of the best and the second.
        pairs += combinations(best.values(), 2)
    found = corrected(pairs)
    return [found[start] for start in starts]


# -------------------------------------------------------------------- tables
def _laws_table(found: Sequence[Line], results: StudyResults) -> Table:
    rows = []
    for line in found:
        next_run, check, exponent = line.prediction, line.holdout, line.law.exponent
        if isinstance(next_run, Estimate):
            next_run = f"{_score(next_run)} at {results.number(line.next_x)}"
        if isinstance(check, Holdout):
            place = "inside" if check.is_inside else "outside"
            check = f"{_score(check.prediction)}, is {percent(1 - check.error)}: {place}"
        spread = f"{exponent.value:.3g} [{exponent.low:.3g}, {exponent.high:.3g}]"
        rows.append((line.name, _score(line.law.floor), spread, next_run, check))
    header = ("line", "limit of the score, %", "exponent", "next larger run, %")
    return Table((*header, "largest runs, predicted from the others, %"), rows)


def _score(error: Estimate) -> str:
    return percent(1 - error.value, 1 - error.high, 1 - error.low)


# -------------------------------------------------------------------- figures
def draw_scores(points: Sequence[Point], lines: Sequence[Line], results: StudyResults) -> bytes | None:
    """PNG of the score against data size or compute: means with 95 % intervals, as the paper's Figures 3 to 5.

    A law that says something is drawn with its band and the prediction for the next larger run, an open circle. None if
    nothing can be drawn on a logarithmic axis.
    """
    points = sorted((point for point in points if point.x > 0), key=_x)
    if not points:
        return None
    figure = Figure(figsize=(11, 5.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    laws = {line.name: line for line in lines if not line.law.why_not}
    colours = dict(zip(results.models, cycle(COLOURS), strict=False))
    for model, marker in zip(results.models, cycle(_MARKERS), strict=False):
        own = [point for point in points if point.model == model]
        means, ends = (np.array([get(p) for p in own]) for get in (attrgetter("mean"), attrgetter("ends")))
        bars = 100 * np.abs(ends.reshape(-1, 2).T - means)
        amounts, colour, name = [p.x for p in own], colours[model], shorten(model, _MAX_NAME)
        style = marker if model in laws else f"{marker}:"
        axes.errorbar(amounts, 100 * means, bars, fmt=style, color=colour, capsize=3, label=name)
    for name, line in laws.items():
        found, colour = line.prediction, colours[name]
        end = line.next_x if isinstance(found, Estimate) else line.points[-1].x
        x = np.geomspace(line.points[0].x, end, 200)
        law, high, low = (100 * (1 - error) for error in line.law.curve(x))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, law, color=colour, label=f"law of {shorten(name, _MAX_NAME)}, 95 % band")
        if isinstance(found, Estimate):
            bars = 100 * np.array([[found.high - found.value], [found.value - found.low]])
            value = 100 * (1 - found.value)
            axes.errorbar([end], [value], bars, color=colour, marker="o", markerfacecolor="white", capsize=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: results.number(x))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(results.unit[1] if results.counts_images else f"compute of pre-training, {results.unit[1]}")
    axes.set_ylabel(f"{results.score}, %", parse_math=False)
    style_axes(axes)
    add_legend(figure, loc="outside right upper", fontsize=8)
    return png(figure)
