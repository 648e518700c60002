"""The table of an experiment: a row for each run, made from run folders, in results.parquet; the answers to its
question read only this.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

TABLE = "results.parquet"
TEMPLATES = Path(__file__).parent / "templates"
# Units of compute, the largest first: (in exaFLOPs, name).
_UNITS = ((1.0, "exaFLOPs"), (1e-3, "petaFLOPs"), (1e-6, "teraFLOPs"), (1e-9, "gigaFLOPs"))
# damaged: its run has ended, and what its files say cannot be used.
State = Literal["done", "diverged", "failed", "damaged", "not run"]
# Begins the name of a probe's score before the first step, of the weights that a run began with.
START = "start:"
# States of runs that a start does (again). A diverged run would diverge again.
TO_RUN: tuple[State, ...] = ("not run", "failed", "damaged")


@dataclass(frozen=True)
class Row:
    """A run of an experiment. All are listed, whatever became of them.

    group: of runs that are compared as one, whose seeds differ: a model of a study, a task of VTAB, trials or final
    runs of a grid. reason: why the run is not done; beside "done", these scores are of an earlier table, and its files
    cannot be used any more.
    scores: by name, in [0, 1]: top1, top5, 5shot, 20nn; of a further data set of the probe old_20nn; with weights
    start:20nn, too. Empty unless done. num_test: number of test images by the same
    names;
    effective_images: of images in groups, `effective_number`. hours: by the clock, of all its processes; None unless
    done.
    parent: the run of the experiment whose weights it began with. weights: SHA-256 of these. run_id: MLflow's, or "".
    settings: by which the runs of the experiment differ.
    parameters: of the model.
    data_size: number of training images. images_seen: an image counts each time. exaflops: of training, 1e18
    floating-point operations, also of the part that it shares with a longer run.
    """

    name: str
    group: str
    seed: int
    state: State = "not run"
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    num_test: dict[str, int] = field(default_factory=dict)
    effective_images: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    hours: float | None = None
    folder: str = ""
    run_id: str = ""
    parent: str = ""
    weights: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    data_size: int = 0
    steps: int = 0
    images_seen: int = 0
    exaflops: float = 0.0


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The columns of all rows, such as `scores.top1`; None for what a row does not have."""
    found = []
    for row in rows:
        flat: dict[str, Any] = {}
        for name, value in asdict(row).items():
            flat |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        found.append(flat)
    names = dict.fromkeys(name for one in found for name in one)
    return [{name: one.get(name) for name in names} for one in found]


def parquet(rows: Sequence[Row], earlier: Sequence[Row]) -> bytes:
    """The content of results.parquet. Rows of an earlier one that are not among these, as settings leave them out, are
    kept below them.
    """
    names = {row.name for row in rows}
    return as_parquet(flat_rows([*rows, *(row for row in earlier if row.name not in names)]))


def as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A Parquet file of rows with the same keys."""
    columns = {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else {})}
    pq.write_table(pa.table(columns), file := io.BytesIO())
    return file.getvalue()


def _column(values: list[Any]) -> pa.Array:
    with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError):  # A setting of several types.
        column = pa.array(values)
        if "struct" not in str(column.type):  # Parquet has no empty one.
            return column
    return pa.array([None if value is None else str(value) for value in values])


def read_table(folder: Path) -> list[Row]:
    """Empty if there is no table; a damaged one is said."""
    try:
        flat = pq.read_table(folder / TABLE).to_pylist()
    except FileNotFoundError:
        return []
    except (pa.ArrowException, OSError) as error:
        print(f"{folder / TABLE} cannot be read ({error}). It is written anew.", flush=True)
        return []
    plain = {one.name for one in fields(Row)}
    rows = []
    for one in flat:
        row = Row(**{name: one[name] for name in plain & one.keys()})
        for name, value in one.items():
            section, dot, key = name.partition(".")
            if dot and value is not None:
                getattr(row, section)[key] = value
        rows.append(row)
    return rows


def keep_earlier(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Row]:
    """The rows, where one that had scores in an earlier table and has fewer now keeps the earlier ones, with the
    reason.

    What a run is never changes in an experiment (experiment.json), so its scores hold as long as it has no newer ones.
    """
    before = {row.name: row for row in earlier if row.state == "done"}

    def best(row: Row) -> Row:
        old = before.get(row.name)
        if old is None or row.state == "diverged" or set(old.scores) <= set(row.scores):
            return row
        lost = "some of its scores are not there" if row.state == "done" else f"its run is not there ({row.folder})"
        reason = old.reason or f"scores of an earlier report, because now: {row.reason or lost}"
        return replace(old, reason=reason, folder=row.folder, run_id=row.run_id)

    return [best(row) for row in rows]


@dataclass(frozen=True)
class StudyResults:
    """The results that answer a study's question. score: name of the score in its figures. data: path of the data set;
    fingerprint: its own.

    evaluated_on: the data and split of the score. cells: pre-trainings, with the scores of their fine-tunings. notes:
    sentences for the reader. counts_images: whether they are compared by their number of training images; else by
    compute.
    """

    name: str
    score: str
    data: str
    fingerprint: str
    evaluated_on: str
    cells: list[Row]
    notes: list[str] = field(default_factory=list)
    counts_images: bool = False

    @property
    def seed(self) -> int:
        """Seed of the report's random draws."""
        return min((cell.seed for cell in self.cells), default=0)

    @cached_property
    def compute_unit(self) -> tuple[float, str]:
        """The unit in which the compute of all cells is shown, that of the longest: (in exaFLOPs, name)."""
        longest = max((cell.exaflops for cell in self.cells), default=1.0)
        return next((unit for unit in _UNITS if longest >= unit[0]), _UNITS[-1])

    @property
    def unit(self) -> tuple[float, str]:
        """The unit of what cells are compared by: (size, name)."""
        return (1.0, "training images") if self.counts_images else self.compute_unit

    def number(self, x: float) -> str:
        """An amount in this unit."""
        return f"{x:,.0f}" if self.counts_images or x >= 1000 else f"{x:.3g}"

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(cell.group for cell in self.cells))

    def scored(self, score: str) -> list[Row]:
        """Cells that are done and have a score from 0 to 1, which NaN is not."""
        return [cell for cell in self.cells if cell.state == "done" and 0 <= cell.scores.get(score, -1) <= 1]
