"""What a study knows of its runs: the content of its results.json, which the report is made of."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeline.base import json_record
from pipeline.base.files import write_text
from pipeline.settings.commands.study import Question

RESULTS_FILE = "results.json"
# Units of compute, the largest first: (in exaFLOPs, name).
_UNITS = ((1.0, "exaFLOPs"), (1e-3, "petaFLOPs"), (1e-6, "teraFLOPs"), (1e-9, "gigaFLOPs"))
# damaged: its run has ended, and what its files say cannot be used.
State = Literal["done", "diverged", "failed", "damaged", "not run"]
# Of the cells that a start runs. One that failed, or is damaged, is tried again; one that diverged would diverge again.
TO_RUN: tuple[State, ...] = ("not run", "failed", "damaged")


def unit_of(exaflops: float) -> tuple[float, str]:
    """The largest unit of which this amount is at least one: (in exaFLOPs, name)."""
    return next((unit for unit in _UNITS if exaflops >= unit[0]), _UNITS[-1])


@dataclass(frozen=True)
class CellResult:
    """A run of a study. All cells are listed, whatever became of them.

    model: its name in the study; family: the line of a figure that it belongs to. parameters: of the model. data_size: number of
    training images. steps, images_seen: of pre-training; an image counts each time it is seen. exaflops: of pre-training, 1e18
    floating-point operations, also of the part that a branch shares with a longer run. reason: why the cell is not done. scores: by name, in [0, 1]:
    top1, top5, 5shot, 20nn, finetune:NAME; empty unless done. num_test: number of test images by the same names.
    effective_images: of images in groups, `effective_number` by the same names.
    A reason beside done: these scores are of an earlier report, and the files of the cell cannot be used any more.
    hours: by the clock, of all its processes; None unless done. folder: of its pre-training run. run_id: MLflow's, or "".
    """

    name: str
    model: str
    family: str
    parameters: int
    data_size: int
    steps: int
    images_seen: int
    exaflops: float
    seed: int
    state: State = "not run"
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    num_test: dict[str, int] = field(default_factory=dict)
    hours: float | None = None
    folder: str = ""
    run_id: str = ""
    effective_images: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyResults:
    """A study's results. score: the name of the score that its figures show. data: path; fingerprint: of the data set.

    evaluated_on: the data and split of the score. notes: sentences for the reader.
    others: cells of an earlier report that these settings leave out, as fewer seeds do.
    """

    name: str
    question: Question
    score: str
    data: str
    fingerprint: str
    evaluated_on: str
    cells: list[CellResult]
    notes: list[str] = field(default_factory=list)
    others: list[CellResult] = field(default_factory=list)

    @property
    def score_names(self) -> list[str]:
        """Names of the scores that any cell has; the study's own score comes first."""
        return list(dict.fromkeys([self.score, *(name for cell in self.cells for name in cell.scores)]))

    @property
    def seed(self) -> int:
        """Of what the report draws."""
        return min((cell.seed for cell in self.cells), default=0)

    @property
    def counts_images(self) -> bool:
        """Whether its cells are compared by their number of training images; else by compute."""
        return self.question in ("data_size", "labels")

    @cached_property
    def compute_unit(self) -> tuple[float, str]:
        """The unit in which the compute of all cells is shown, that of the longest: (in exaFLOPs, name)."""
        return unit_of(max((cell.exaflops for cell in self.cells), default=1.0))

    @property
    def unit(self) -> tuple[float, str]:
        """The unit of what cells are compared by: (size, name)."""
        return (1.0, "training images") if self.counts_images else self.compute_unit

    def number(self, x: float) -> str:
        """An amount in this unit."""
        return f"{x:,.0f}" if self.counts_images or x >= 1000 else f"{x:.3g}"

    @property
    def done(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.state == "done"]

    @property
    def families(self) -> list[str]:
        """In the order of the settings."""
        return list(dict.fromkeys(cell.family for cell in self.cells))

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(cell.model for cell in self.cells))

    def scored(self, score: str) -> list[CellResult]:
        """Cells that are done and have a score from 0 to 1, which NaN is not."""
        return [cell for cell in self.done if 0 <= cell.scores.get(score, -1) <= 1]


def keep_earlier(now: StudyResults, earlier: StudyResults | None) -> StudyResults:
    """The results, where a cell that had scores in an earlier report and has fewer now keeps the earlier ones, with the reason.

    What a cell is never changes in a study (study.json), so its scores hold as long as it has no newer ones, and while settings leave it out.
    """
    known = [*earlier.cells, *earlier.others] if earlier else []
    before = {cell.name: cell for cell in known if cell.state == "done"}

    def best(cell: CellResult) -> CellResult:
        old = before.get(cell.name)
        if old is None or cell.state == "diverged" or set(old.scores) <= set(cell.scores):
            return cell
        lost = "some of its scores are not there" if cell.state == "done" else f"its run is not there ({cell.folder})"
        reason = old.reason or f"scores of an earlier report, because now: {cell.reason or lost}"
        # What a cell is never changes, so all facts of the earlier report hold but its family and the place of its run.
        return replace(old, reason=reason, family=cell.family, folder=cell.folder, run_id=cell.run_id)

    asked = {cell.name for cell in now.cells}
    others = [cell for cell in before.values() if cell.name not in asked]
    return replace(now, cells=[best(cell) for cell in now.cells], others=others)


def write_results(results: StudyResults, folder: Path) -> None:
    write_text(folder / RESULTS_FILE, json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n")


def read_results(folder: Path) -> StudyResults:
    """Raises UserError when the file is damaged, FileNotFoundError when there is none."""
    file = folder / RESULTS_FILE
    content = json_record.readable(json_record.read(file, dict[str, Any]))
    return json_record.convert(content, StudyResults, str(file))
