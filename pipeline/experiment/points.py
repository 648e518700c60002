"""The scores of a study as points, the means over seeds; lines of them; and the differences between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.base.page import Table
from pipeline.evaluate.differences import ScoreDifference, holm, in_words, of_proportions, of_same_seeds, of_seeds
from pipeline.evaluate.intervals import Interval, of_samples
from pipeline.evaluate.intervals import of_seeds as interval_of_seeds
from pipeline.experiment.law import Estimate, Holdout, PowerLaw
from pipeline.experiment.table import Row, StudyResults

# With fewer pairs, what pairing loses in degrees of freedom is more than it gains, unless seeds of both correlate by
# over 0.4.
PAIRED_FROM = 4


@dataclass(frozen=True)
class Point:
    """The runs of one model at one data size and length, which differ in their seed only. scores: in the order of
    seeds, shares.

    x: what the study compares by: the number of training images, or compute in `StudyResults.unit`. num_test: test
    images of each score; 0 if unknown, or if it is not a proportion of images. effective: of images in groups, their
    `effective_number`; else num_test.
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


def points_of(results: StudyResults, score: str = "") -> list[Point]:
    """In the order of the cells. score: default, the study's. Cells that are not done or have no usable score are left
    out.
    """
    name = score or results.score
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for cell in results.scored(name):
        groups.setdefault((cell.group, cell.data_size, cell.steps), []).append(cell)
    found = []
    for group in groups.values():
        cells = sorted(group, key=lambda cell: cell.seed)
        first = cells[0]
        nums = [cell.num_test.get(name, 0) for cell in cells]
        effective = [cell.effective_images.get(name, num) for cell, num in zip(cells, nums, strict=True)]
        x = float(first.data_size) if results.counts_images else first.exaflops / results.unit[0]
        seeds, scores = tuple(cell.seed for cell in cells), tuple(cell.scores[name] for cell in cells)
        found.append(
            Point(
                first.group, first.family, first.data_size, first.exaflops, x, seeds, scores, min(nums), min(effective)
            )
        )
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


def tested(pairs: Sequence[tuple[Point, Point]]) -> list[Tested]:
    """The difference of each pair, with Holm's correction for all of them."""
    found = [difference(*pair) for pair in pairs]
    corrected = iter(holm([one.p for one in found if one]))
    return [Tested(*pair, one, next(corrected) if one else 1.0) for pair, one in zip(pairs, found, strict=True)]


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


def differences(results: StudyResults) -> list[Tested]:
    """Each model minus the first of the study, by data size, the best first; [] if that one has no score. Models have
    one length each.
    """
    points, first = points_of(results), results.models[:1]
    firsts = {point.data_size: point for point in points if point.model in first}
    others = [point for point in points if point.model not in first and point.data_size in firsts]
    others.sort(key=lambda point: (point.data_size, -point.mean))
    return tested([(point, firsts[point.data_size]) for point in others])


def table(found: Sequence[Tested], results: StudyResults, first: str, second: str) -> Table:
    """first, second: what the models of each difference are."""
    header = (
        results.unit[1],
        first,
        "seeds",
        f"{results.score}, %",
        second,
        "its, %",
        "difference, points",
        "p, corrected",
    )
    rows = []
    for t in found:
        one, other = t.first, t.second
        texts = (one.model, f"{len(one.scores)}", one.text, other.model, other.text, *t.texts)
        rows.append((results.number(one.x), *texts))
    return Table((*header, "difference"), rows)


def percent(score: float, *ends: float) -> str:
    return f"{100 * score:.2f}" + (f" [{100 * ends[0]:.2f}, {100 * ends[1]:.2f}]" if ends else "")
