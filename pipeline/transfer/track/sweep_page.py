"""The MLflow page of a VTAB sweep: a parent run, and a child run for each cell, sent by the driver while cells run elsewhere."""

import os
import time
from pathlib import Path
from typing import Any, Self

from pipeline.base.words import counted
from pipeline.monitor.mlflow.state import STATE_FILE, read_states, sent_to, tracked_folder_of
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import RunFacts, source_tags, split_facts
from pipeline.monitor.tracking import default_uri
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.transfer import charts
from pipeline.transfer.report import for_mlflow, tags_of
from pipeline.transfer.score_table import Column, column_of, unpublished_warning
from pipeline.transfer.sweep import SWEEP_FILE, Outcome, Sweep, cell_name, score_row, settings_of
from pipeline.transfer.track.children import ChildSender, NestedRun, Pace
from pipeline.transfer.track.figures import draw_rates_of_groups
from pipeline.transfer.track.parent_page import ParentPage
from pipeline.transfer.vtab_cell import ALL, TEST, TRAIN, VAL, VtabCell
from pipeline.transfer.vtab_tasks import TASKS

EXPERIMENT = "vtab"
_LOG_EVERY = 60.0  # Seconds between two points of the number of cells.
_CHILD_SOURCE = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")


def tracking_uri(config: VtabConfig) -> str:
    """Where a sweep is sent to; "" for mlflow=none. config.weights: a path."""
    if config.mlflow:
        return "" if config.mlflow == "none" else config.mlflow
    if uri := os.environ.get("MLFLOW_TRACKING_URI", ""):
        return uri
    if run := tracked_folder_of(config.weights):
        uri = next(reversed(read_states(run / STATE_FILE)[0]))
        if "***" not in uri:  # A password that was not kept.
            return uri
    return default_uri(Path(config.out).parent if config.out else Path("runs"))


class SweepPage(ParentPage):
    """Sends a sweep that is running, and its cells.

    header: what results.json says of the sweep, beside scores. outcomes, failed: filled by the driver; read here to draw.
    """

    def __init__(
        self, sweep: Sweep, header: dict[str, Any], uri: str, num_cells: int, outcomes: dict[VtabCell, Outcome],
        failed: dict[VtabCell, str], pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self.sweep, self.num_cells, self.outcomes, self.failed = sweep, num_cells, outcomes, failed
        self._column: Column | None = None
        self._next_log = 0.0
        super().__init__(_facts(sweep, header, num_cells, uri), sweep.folder, sweep.folder.parent, uri, EXPERIMENT)
        source = source_tags()
        tags = {"kind": "cell", **{name: source[name] for name in _CHILD_SOURCE if name in source}}
        self._children = ChildSender(sweep.folder, uri, tags, self._draw, pace)

    def __enter__(self) -> Self:
        self._children.add([child_of(self.sweep, cell, outcome) for cell, outcome in self.outcomes.items()])
        self._children.begin()
        return self

    def complete(self) -> None:
        """Send what is left of the cells."""
        self._log_counts()
        self._children.end()
        if self.failed:
            cells = counted(self.num_cells, "cell")
            self.failure = f"{len(self.failed):,} of {cells}, such as {next(iter(self.failed.values()))}"

    def ended(self, cell: VtabCell, outcome: Outcome) -> None:
        """A cell is done, and its file is written."""
        self._children.add([child_of(self.sweep, cell, outcome)])
        self._log_now_and_then()

    def gave_up(self, cell: VtabCell, reason: str) -> None:
        """A cell failed and is not retried."""
        self._children.add(
            [_child(self.sweep, cell, "FAILED", f"failed: {reason}"[:500], time.time(), 0.0, {}, {}, {})]
        )
        self._log_now_and_then()

    def scored(self, results: dict[str, Any]) -> None:
        """results.json is complete."""
        self._column = column_of("this sweep", results)
        metrics, _ = for_mlflow(self._column)
        self.log(metrics)
        self.result = result_of(self._column)

    # ---------------------------------------------------------------- what is shown
    def _log_now_and_then(self) -> None:
        if time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + _LOG_EVERY
            self._log_counts()

    def _log_counts(self) -> None:
        num_diverged = sum("diverged" in outcome for outcome in list(self.outcomes.values()))
        self.log({"cells_done": len(self.outcomes), "cells_failed": len(self.failed), "cells_diverged": num_diverged})

    def _draw(self) -> dict[str, bytes]:
        """The figures of what is done so far; called by the sender's thread."""
        outcomes, pictures = dict(self.outcomes), dict[str, bytes]()
        tried = _tried(outcomes)
        if len({rate for of_task in tried.values() for rate in of_task}) > 1:
            pictures["accuracy_by_learning_rate.png"] = draw_rates_of_groups(tried)
        column = self._column or _column_so_far(outcomes, self.sweep.unpublished)
        if column.tasks:
            pictures["accuracy_by_task.png"] = charts.draw_tasks([column])
        return pictures


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


def child_of(sweep: Sweep, cell: VtabCell, outcome: Outcome) -> NestedRun:
    """The child run of a cell that is done. Its times are those of its file."""
    try:
        ended = sweep.file_of(cell).stat().st_mtime
    except FileNotFoundError:  # Removed meanwhile.
        ended = time.time()
    diverged = outcome.get("diverged")
    metrics = {name: float(outcome[name]) for name in ("loss", "seconds") if outcome.get(name) is not None}
    if not diverged:  # Its accuracy of 0 only keeps the setting from being chosen.
        metrics["val_top1" if cell.stage == "search" else "test_top1"] = outcome["accuracy"]
    if outcome.get("val_accuracy") is not None:
        metrics["val_top1"] = outcome["val_accuracy"]
    chosen: dict[str, Any] = {name: outcome[name] for name in ("l2", "neighbours") if name in outcome}
    return _child(
        sweep, cell, "FAILED" if diverged else "FINISHED", f"diverged by step {diverged:,}" if diverged else "finished",
        ended, outcome.get("seconds", 0.0), {"steps": outcome["steps"], **chosen}, metrics,
        {"device": str(outcome["device"])} if outcome.get("device") else {},
    )  # fmt: skip


def _child(
    sweep: Sweep, cell: VtabCell, status: str, outcome: str, ended: float, seconds: float, more: dict[str, Any],
    metrics: dict[str, float], tags: dict[str, str],
) -> NestedRun:  # fmt: skip
    parameters: dict[str, Any] = {
        "task": cell.task.name,
        "group": cell.task.group,
        "stage": cell.stage,
        "seed": cell.seed,
    }
    if cell.setting:
        parameters |= {
            "lr": cell.setting.lr,
            "weight_decay": cell.setting.weight_decay,
            "length": str(cell.setting.length),
        }
    dataset = sweep.datasets[cell.task.name]
    splits = [
        (TRAIN if cell.stage == "search" else ALL, "training"),
        (VAL if cell.stage == "search" else TEST, "evaluation"),
    ]
    parameters |= {name: value for name, value in more.items() if value is not None}
    return NestedRun(
        cell_name(cell), _short_name(cell), status, round(1000 * (ended - seconds)), round(1000 * ended), parameters, metrics,
        {"outcome": outcome, "dataset": cell.task.name, "stage": cell.stage, **tags},
        tuple(split_facts(cell.task.name, dataset, split, context) for split, context in splits),
        "val_top1" if cell.stage == "search" else "test_top1",
    )  # fmt: skip


def _short_name(cell: VtabCell) -> str:
    """MLflow's pages show some forty characters."""
    if cell.setting is None:
        return f"{cell.task.title} {cell.stage}"
    setting = cell.setting
    return f"{cell.task.title} {cell.stage} lr {setting.lr:g} wd {setting.weight_decay:g} seed {cell.seed}, {setting.length}"


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
        "Each cell is a run below this one: parameters `task`, `lr`, ..., metrics `eval/val_top1` (search) and `eval/test_top1`.",
        "Copies of test images in the pre-training data: " + (", ".join(searched) if found else "not searched") + ".",
    ]
    description += unpublished_warning(header["unpublished"])
    if sweep.missing:
        description.append(f"Not prepared, so without a score: {', '.join(sweep.missing)}.")
    return RunFacts(
        f"{run.name if run else Path(config.weights).stem} {sweep.config.protocol.name}-{config.method}", "vtab", settings, tags,
        tuple(datasets), "\n\n".join(description), {"parent": str(parent)} if parent else {},
        artifacts=("results.json", SWEEP_FILE), score="vtab_mean", scored_on="VTAB-1k", origin=find_origin(Path(config.weights), sweep.named),
    )  # fmt: skip


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
