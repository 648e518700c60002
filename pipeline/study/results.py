"""What a study knows of its runs: the content of its results.json, which the report is made of."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.base import json_record
from pipeline.base.files import write_text
from pipeline.base.json_record import Count, Limits, Share
from pipeline.settings.commands.study import Question

RESULTS_FILE = "results.json"
# Units of compute, the largest first: (in exaFLOPs, name).
_UNITS = ((1.0, "exaFLOPs"), (1e-3, "petaFLOPs"), (1e-6, "teraFLOPs"), (1e-9, "gigaFLOPs"))
# damaged: its run has ended, and what its files say cannot be used.
State = Literal["done", "diverged", "failed", "damaged", "not run"]
# Of the cells that a start runs. One that failed, or is damaged, is tried again; one that diverged would diverge again.
TO_RUN: tuple[State, ...] = ("not run", "failed", "damaged")


def compute_unit(exaflops: float) -> tuple[float, str]:
    """The largest unit of which this amount is at least one: (in exaFLOPs, name)."""
    return next((unit for unit in _UNITS if exaflops >= unit[0]), _UNITS[-1])


@dataclass(frozen=True)
class CellResult:
    """A run of a study. All cells are listed, whatever became of them.

    model: its name in the study; family: the line of a figure that it belongs to. parameters: of the model. data_size: number of
    training images. steps, images_seen: of pre-training; an image counts each time it is seen. exaflops: of pre-training, 1e18
    floating-point operations, also of the part that a branch shares with a longer run. reason: why the cell is not done. scores: by name, in [0, 1]:
    top1, top5, 5shot, 20nn, finetune:NAME, vtab; empty unless done. num_test: number of test images by the same names.
    effective_images: of images in groups, `effective_number` by the same names.
    vtab_tasks: number of tasks that vtab is the mean of; 0 if not known.
    A reason beside done: these scores are of an earlier report, and the files of the cell cannot be used any more.
    hours: by the clock, of all its processes; None unless done. folder: of its pre-training run. run_id: MLflow's, or "".
    """

    name: str
    model: str
    family: str
    parameters: Count
    data_size: Count
    steps: Count
    images_seen: Count
    exaflops: Annotated[float, Limits(0, 1e30)]
    seed: int
    state: State = "not run"
    reason: str = ""
    scores: dict[str, Share] = field(default_factory=dict)
    num_test: dict[str, Count] = field(default_factory=dict)
    hours: Annotated[float, Limits(0, 1e9)] | None = None
    folder: str = ""
    run_id: str = ""
    effective_images: dict[str, Annotated[float, Limits(1, 1e15)]] = field(default_factory=dict)
    vtab_tasks: Count = 0


@dataclass(frozen=True)
class StudyResults:
    """A study's results. score: the name of the score that its figures show. data: path; fingerprint: of the data set.

    evaluated_on: the data and split of the score, "" for VTAB-1k. image_size: side of the pre-training images in pixels. notes: sentences for the reader.
    unpublished: names of VTAB tasks whose images are not those of the published files. others: cells of an earlier report that these
    settings leave out, as fewer seeds do.
    """

    name: str
    question: Question
    score: str
    data: str
    fingerprint: str
    evaluated_on: str
    image_size: int
    cells: list[CellResult]
    notes: list[str] = field(default_factory=list)
    unpublished: list[str] = field(default_factory=list)
    others: list[CellResult] = field(default_factory=list)

    def mark(self, score: str) -> str:
        """Stands beside the name of a score: † if it is not VTAB's."""
        return "†" if score == "vtab" and self.unpublished else ""

    @property
    def vtab_tasks(self) -> list[int]:
        """The numbers of tasks that the cells' vtab scores are means of, ascending: one, unless sweeps had different data sets."""
        return sorted({cell.vtab_tasks for cell in self.cells} - {0})

    @property
    def counts_images(self) -> bool:
        """Whether its cells are compared by their number of training images; else by compute."""
        return self.question in ("data_size", "labels")

    @cached_property
    def unit(self) -> tuple[float, str]:
        """The unit in which the compute of all cells is shown, that of the longest: (in exaFLOPs, name)."""
        return compute_unit(max((cell.exaflops for cell in self.cells), default=1.0))

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
        reason = (
            cell.reason or f"its run is not there ({cell.folder})"
            if cell.state != "done"
            else "some of its scores are not there"
        )
        kept = f"scores of an earlier report, because now: {reason}" if not old.reason else old.reason
        return replace(
            cell,
            state="done",
            reason=kept,
            scores=old.scores,
            num_test=old.num_test,
            effective_images=old.effective_images,
            vtab_tasks=old.vtab_tasks,
            hours=old.hours,
        )

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
