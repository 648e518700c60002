"""The MLflow page of a VTAB sweep: scores and figures, and a table of its cells."""

import os
import time
from pathlib import Path
from typing import Any

from pipeline.base.files import table_csv
from pipeline.base.words import counted
from pipeline.data.storage.atomic import write_files
from pipeline.monitor.mlflow.state import last_uri, sent_to, tracked_folder_of
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import FIGURES, PAGE
from pipeline.monitor.run_page import RunFacts, split_facts
from pipeline.monitor.tracking import default_uri
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.transfer import charts
from pipeline.transfer.report import for_mlflow, tags_of
from pipeline.transfer.score_table import Column, column_of, unpublished_warning
from pipeline.transfer.sweep import SWEEP_FILE, Outcome, Sweep, cell_name, score_row, settings_of
from pipeline.transfer.track.figures import draw_rates_of_groups
from pipeline.transfer.track.parent_page import ParentPage
from pipeline.transfer.vtab_cell import ALL, TEST, VtabCell
from pipeline.transfer.vtab_tasks import TASKS

EXPERIMENT = "vtab"
_CELLS = "cells.csv"
_SHOW_EVERY = 60.0  # Seconds between two points of the number of cells, and between two drawings.


def tracking_uri(config: VtabConfig) -> str:
    """Where a sweep is sent to; "" for mlflow=none. config.weights: a path."""
    if config.mlflow:
        return "" if config.mlflow == "none" else config.mlflow
    if uri := os.environ.get("MLFLOW_TRACKING_URI", ""):
        return uri
    if run := tracked_folder_of(config.weights):
        uri = last_uri(run)
        if "***" not in uri:  # A password that was not kept.
            return uri
    return default_uri(Path(config.out).parent if config.out else Path("runs"))


class SweepPage(ParentPage):
    """Sends a sweep that is running.

    header: what results.json says of the sweep, beside scores. outcomes, failed: filled by the driver; read here.
    """

    def __init__(
        self,
        sweep: Sweep,
        header: dict[str, Any],
        uri: str,
        num_cells: int,
        outcomes: dict[VtabCell, Outcome],
        failed: dict[VtabCell, str],
    ) -> None:
        self.sweep, self.num_cells, self.outcomes, self.failed = sweep, num_cells, outcomes, failed
        self._column: Column | None = None
        self._next = 0.0
        super().__init__(_facts(sweep, header, num_cells, uri), sweep.folder, sweep.folder.parent, uri, EXPERIMENT)

    def complete(self) -> None:
        self._show()
        if self.failed:
            cells = counted(self.num_cells, "cell")
            self.failure = f"{len(self.failed):,} of {cells}, such as {next(iter(self.failed.values()))}"

    def ended(self) -> None:
        """A cell is done, or failed and is not tried again."""
        if time.monotonic() >= self._next:
            self._show()
            self._next = time.monotonic() + _SHOW_EVERY

    def scored(self, results: dict[str, Any]) -> None:
        """results.json is complete."""
        self._column = column_of("this sweep", results)
        metrics, _ = for_mlflow(self._column)
        self.log(metrics)
        self.result = result_of(self._column)

    # ---------------------------------------------------------------- what is shown
    def _show(self) -> None:
        """Log how many cells are done, and write their table and the figures."""
        num_diverged = sum("diverged" in outcome for outcome in self.outcomes.values())
        self.log({"cells_done": len(self.outcomes), "cells_failed": len(self.failed), "cells_diverged": num_diverged})
        rows = [row_of(cell, outcome) for cell, outcome in self.outcomes.items()]
        rows += [row_of(cell, {"failed": reason}) for cell, reason in self.failed.items()]
        write_files(self.folder / PAGE, {_CELLS: table_csv(rows)})
        write_files(self.folder / FIGURES, self._draw())

    def _draw(self) -> dict[str, bytes]:
        pictures = dict[str, bytes]()
        tried = _tried(self.outcomes)
        if len({rate for of_task in tried.values() for rate in of_task}) > 1:
            pictures["accuracy_by_learning_rate.png"] = draw_rates_of_groups(tried)
        column = self._column or _column_so_far(self.outcomes, self.sweep.unpublished)
        if column.tasks:
            pictures["accuracy_by_task.png"] = charts.draw_tasks([column])
        return pictures


def row_of(cell: VtabCell, outcome: Outcome) -> dict[str, Any]:
    """A cell's row of cells.csv."""
    setting = cell.setting
    row = {
        "cell": cell_name(cell),
        "task": cell.task.name,
        "group": cell.task.group,
        "stage": cell.stage,
        "seed": cell.seed,
        "lr": setting.lr if setting else "",
        "weight_decay": setting.weight_decay if setting else "",
        "length": str(setting.length) if setting else "",
    }
    found = ("accuracy", "val_accuracy", "loss", "steps", "l2", "neighbours", "seconds", "device", "diverged", "failed")
    return row | {name: outcome.get(name, "") for name in found}


def result_of(column: Column) -> str:
    """Markdown: the scores of tasks and means."""
    if not column.tasks:
        return ""
    means = [f"{name} {100 * score.accuracy:.2f}{column.mark(name)} %" for name, score in column.means.items()]
    lines = [
        "**Result**",
        "",
        *(["; ".join(means), ""] if means else []),
        "| task | top-1, % | chosen |",
        "|---|---:|---|",
    ]
    for task in TASKS:
        if score := column.tasks.get(task.name):
            chosen = column.facts["details"].get(task.name, "")
            lines.append(f"| {task.title} | {100 * score.accuracy:.2f}{column.mark(task.name)} | {chosen} |")
    return "\n".join(lines)


def _facts(sweep: Sweep, header: dict[str, Any], num_cells: int, uri: str) -> RunFacts:
    config, protocol = sweep.config, header["protocol"]
    run = tracked_folder_of(sweep.named)
    parent = header["checkpoint"]["run_id"]
    tags = {**tags_of(header), "dataset": "VTAB-1k", "run_folder_path": str(sweep.folder.resolve())}
    if run and (beside := sent_to(run, uri).run_id):  # The same store: MLflow shows a link to the run of the weights.
        tags["mlflow.parentRunId"] = beside
    datasets = []
    for task, dataset in sweep.datasets.items():
        copies = (header["contamination"] or {}).get(task)
        for split, context in ((ALL, "training"), (TEST, "evaluation")):
            facts = split_facts(task, dataset, split, context)
            if split == TEST:
                facts.notes["copies_in_pretraining_data"] = "not searched" if copies is None else str(copies)
            datasets.append(facts)
    settings = {f"protocol.{name}": value for name, value in schema.flatten(protocol).items()}
    settings |= {name: getattr(config, name) for name in ("method", "precision", "micro_batch", "seeds")}
    searched = [f"{facts.name}: {facts.notes['copies_in_pretraining_data']}" for facts in datasets if facts.notes]
    found = any(count is not None for count in (header["contamination"] or {}).values())
    num_settings = f", {counted(len(settings_of(config.protocol)), 'setting')}" * (config.method == "finetune")
    description = [
        f"**VTAB-1k of `{Path(config.weights).name}`** (`{sweep.sha256[:16]}`) by protocol {protocol['name']}, {config.method}: "
        f"{counted(num_cells, 'cell')} on {len(sweep.datasets)} of {counted(len(TASKS), 'task')}{num_settings}.",
        f"`page/{_CELLS}` among the artifacts has a row for each cell: its setting, and its accuracy on val200 (search) or on the test split.",
        "Copies of test images in the pre-training data: " + (", ".join(searched) if found else "not searched") + ".",
    ]
    description += unpublished_warning(header["unpublished"])
    if sweep.missing:
        description.append(f"Not prepared, so without a score: {', '.join(sweep.missing)}.")
    return RunFacts(
        f"{run.name if run else Path(config.weights).stem} {sweep.config.protocol.name}-{config.method}",
        "vtab",
        settings,
        tags,
        tuple(datasets),
        "\n\n".join(description),
        {"parent": str(parent)} if parent else {},
        artifacts=("results.json", SWEEP_FILE),
        score="vtab_mean",
        scored_on="VTAB-1k",
        origin=find_origin(Path(config.weights), sweep.named),
    )


def _tried(outcomes: dict[VtabCell, Outcome]) -> dict[str, dict[float, tuple[float, int, int]]]:
    """Task -> learning rate -> (best accuracy, cells, diverged cells) of the search."""
    tried: dict[str, dict[float, tuple[float, int, int]]] = {}
    for cell, outcome in outcomes.items():
        if cell.stage == "search" and cell.setting:
            of_task = tried.setdefault(cell.task.name, {})
            best, num, num_diverged = of_task.get(cell.setting.lr, (0.0, 0, 0))
            of_task[cell.setting.lr] = max(best, outcome["accuracy"]), num + 1, num_diverged + ("diverged" in outcome)
    return tried


def _column_so_far(outcomes: dict[VtabCell, Outcome], unpublished: list[str]) -> Column:
    scores = [score_row(cell, outcome) for cell, outcome in outcomes.items() if cell.stage != "search"]
    return column_of("this sweep, so far", {"scores": scores, "failed": [], "missing": [], "unpublished": unpublished})
