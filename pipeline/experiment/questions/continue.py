# ruff: noqa: N999 - the file has the question's name.
"""What do weights gain on a new domain when they go on learning there, and what do they forget of the old one?

Each model is a way to continue, or a new model without weights. All are compared with the untouched weights, whose
scores are those of the probe before the first step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.base.metric import kind_of
from pipeline.base.page import Block, Table
from pipeline.evaluate.differences import ScoreDifference, of_same_seeds
from pipeline.experiment.points import Point, Tested, corrected, difference, percent, points_of
from pipeline.experiment.study import Cells, cells, refuse
from pipeline.experiment.table import START, StudyResults
from pipeline.settings.commands.study import StudyConfig

UNTOUCHED = "untouched weights"


class ScoreChange(NamedTuple):
    """What continuing changed in a score. score: its name."""

    score: str
    found: list[Tested]

    @property
    def untouched(self) -> list[Point]:
        """Of several weights, those of each."""
        return list({one.second.scores[0]: one.second for one in self.found}.values())


def specs(config: StudyConfig) -> Cells:
    refuse(config, "lengths", "data_sizes")
    if not config.has_weights:
        raise UserError("question = continue needs a model with weights=..., which it goes on training.")
    if not kind_of(config.score):
        raise UserError(
            f"score = {config.score}: question = continue compares probes, because only they are measured before the"
            " first step. Set score=20nn, probe.every=100% and probe.neighbours=20, say."
        )
    return cells(replace(config, equal_compute=False))


def changes(results: StudyResults) -> list[list[ScoreChange]]:
    """For each kind of probe, that of the study's score first: the changes on the new domain, and on each other data
    set.
    """
    names = dict.fromkeys(name for cell in results.cells for name in cell.scores if f"{START}{name}" in cell.scores)
    own = [name for name in names if not any(name.endswith(f"_{other}") for other in names)]
    kinds = dict.fromkeys([results.score, *own])
    found = []
    for kind in kinds:
        of_kind = [_change(results, name) for name in names if name == kind or name.endswith(f"_{kind}")]
        found.append([change for change in of_kind if change.found])
    return [one for one in found if one]


def _change(results: StudyResults, name: str) -> ScoreChange:
    ends = points_of(replace(results, score=name))
    before = points_of(replace(results, score=f"{START}{name}"))
    starts = {point.model: replace(point, model=UNTOUCHED) for point in before}
    usual = next(iter(starts.values()), None)
    pairs = [(end, start) for end in ends if (start := starts.get(end.model, usual))]
    return ScoreChange(name, corrected(pairs, _by_seed))


def _by_seed(end: Point, start: Point) -> ScoreDifference | None:
    """The untouched weights have no seed: their scores scatter with nothing that the runs' do not have."""
    if len(end.scores) < 2:
        return difference(end, start)
    return of_same_seeds(end.scores, start.scores[:1] * len(end.scores), min(end.num_test, start.num_test))


def answer(results: StudyResults) -> Iterator[Block]:
    yield from map(_table, changes(results))


def _table(kind: Sequence[ScoreChange]) -> Table:
    rows: list[tuple[str, ...]] = []
    for points in zip(*(change.untouched for change in kind), strict=False):
        rows.append((UNTOUCHED, "", *(text for point in points for text in (percent(point.mean), "", ""))))
    by_model = [{one.first.model: one for one in change.found} for change in kind]
    for model, first in by_model[0].items():
        row = [model, f"{len(first.first.scores)}"]
        for of in by_model:
            row += [of[model].first.text, *of[model].texts[:2]] if model in of else ["–"] * 3
        rows.append(tuple(row))
    header = [column for change in kind for column in (f"{change.score}, %", "change, points", "p, corrected")]
    return Table(("way", "seeds", *header), rows)
