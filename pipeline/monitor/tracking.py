"""Metrics of a run: metrics.jsonl, which is always written, and trackers, which may be unreachable.

`Tracker.log` only appends a line to the file; a thread for each tracker (export.py) sends the lines. So a training step
never waits for a server, no metric is lost while the server is away, and a restart continues the same MLflow run.

When steps run again (after a kill, or after a rollback because of a loss spike), their old records are removed from the
file, so that each step has one record. After a kill they repeat the numbers that were sent, and are not sent again.
"""

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

from pipeline.base.errors import naming
from pipeline.monitor.export import Exporter, ExportTiming, FolderExport
from pipeline.monitor.metrics_file import METRICS_FILE, Record, accepted_name, open_to_append, repair
from pipeline.monitor.mlflow.connection import sqlite_file, sqlite_uri
from pipeline.monitor.mlflow.exporter import FindModels, MlflowExporter
from pipeline.monitor.page_folder import End, PageFolder, Start, describe
from pipeline.monitor.run_page import NOTE, RunFacts, hide_passwords, source_tags
from pipeline.monitor.tensorboard import TensorBoardExporter
from pipeline.settings.run import TrackConfig

_TIMING = ExportTiming()


class Tracker:
    """Writes metrics to `<folder>/metrics.jsonl` and exports the folder. For rank 0 only.

    start: step that the run continues from. Records of later steps are removed, because these steps run again. None
    keeps all.
    find_models: the checkpoints that are shown as logged models. began: more on this start. notes: lines for the log
    that say what was removed.
    """

    def __init__(
        self,
        config: TrackConfig,
        out: Path,
        folder: Path,
        facts: RunFacts,
        start: int | None = None,
        timing: ExportTiming = _TIMING,
        find_models: FindModels = lambda ended: [],
        began: Start | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.start = folder / METRICS_FILE, start
        declared = {accepted_name(name): metric for name, metric in facts.metrics.items()}
        parameters = {
            name: hide_passwords(value) if isinstance(value, str) else value for name, value in facts.parameters.items()
        }
        facts = replace(
            facts,
            parameters=parameters,
            tags={**facts.tags, **source_tags()},
            metrics=declared,
            score=accepted_name(facts.score),
        )
        self._page = PageFolder(folder)
        # With other settings, the steps that run again have other values. A resumed run knows of these itself.
        began = began or Start(time.time(), start or 0)
        saved, told = self._page.saved(), json.dumps(facts.parameters, default=str)
        repeats = not began.changed and (start != 0 or saved is None or json.dumps(saved.facts.parameters) == told)
        self._page.begin(config.experiment, facts, began)
        self._exports = exports_of(config, out, folder, facts, timing, find_models)
        self.facts = facts
        # Metrics that the step `start` already has.
        self._logged: dict[str, float] = {}
        self._axes_step = start  # The step whose axes are recorded.
        self.notes = [] if start is None else self._remove_after(start, repeats)
        self._file = open_to_append(self.path)
        for export in self._exports:
            export.thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step, under names that MLflow accepts. Never waits for a tracker."""
        metrics = {accepted_name(name): value for name, value in metrics.items()}
        if step == self.start:
            # After a kill between an evaluation's record and its scores.json, the evaluation runs again.
            metrics = {name: value for name, value in metrics.items() if name not in self._logged}
        if metrics and step != self._axes_step:
            metrics, self._axes_step = {**metrics, **self.facts.axes(step)}, step
        if metrics:
            with naming(self.path):
                self._file.write(Record(step, round(time.time() * 1000), metrics).to_line())
                self._file.flush()

    @property
    def run_id(self) -> str:
        """ID of the MLflow run; "" until MLflow answered."""
        return next((export.run_id for export in self._exports), "")

    def value_at_start(self, name: str) -> float | None:
        """The recorded value of a metric at the step that the run continues from."""
        return self._logged.get(accepted_name(name))

    def go_back(self, step: int) -> list[str]:
        """Remove the records of steps after `step`, which run again. Returns lines that say what was removed."""
        self._file.close()
        self.start = self._axes_step = step
        notes = self._remove_after(step, repeats=False)
        self._file = open_to_append(self.path)
        return notes

    def finish(
        self, status: str, in_a_hurry: bool = False, outcome: str = "", result: str = "", collapse: str = ""
    ) -> None:
        """Send the rest, and end the run as FINISHED, FAILED or KILLED. Waits at most 30 s, in a hurry 5 s.

        outcome: how the run ended, in words, for its tag; by default the status. result: Markdown for its description.
        collapse: what was said of one, for a tag.
        """
        tags = {"outcome": (outcome or status.lower())[:500], "collapse": collapse[:500]}
        if result:
            # First, because the page shows the beginning of a description, and more on request.
            tags[NOTE] = f"{result}\n\n{describe(self.facts.description, self._page.starts())}"
        end = End(status, {name: hide_passwords(text) for name, text in tags.items() if text})
        try:
            self._page.end(end)
        finally:
            for export in self._exports:
                export.end(end, in_a_hurry)
            with contextlib.suppress(OSError):  # `log` has already raised it for the record.
                self._file.close()

    def _remove_after(self, step: int, repeats: bool) -> list[str]:
        """Remove the records of later steps. repeats: whether these steps run again with the same values."""
        with contextlib.ExitStack() as exports:
            for export in self._exports:
                exports.enter_context(export.rewriting(None if repeats else step))
            self._logged, notes = repair(self.path, step)
        return notes


def send_report(
    uri: str,
    folder: Path,
    facts: RunFacts,
    metrics: dict[str, float],
    files: list[Path],
    experiment: str = "vit",
    result: str = "",
) -> None:
    """Send a report's numbers and files as an MLflow run. The same report sent again continues the same run.

    files: in `folder`, or below it. result: Markdown for the description.
    """
    facts = replace(facts, artifacts=tuple(path.relative_to(folder).as_posix() for path in files))
    tracker = Tracker(TrackConfig(uri=uri, experiment=experiment), folder, folder, facts)
    tracker.log(0, metrics)
    tracker.finish("FINISHED", result=result)


def exports_of(
    config: TrackConfig,
    out: Path,
    folder: Path,
    facts: RunFacts,
    timing: ExportTiming = _TIMING,
    find_models: FindModels = lambda ended: [],
) -> list[FolderExport]:
    """The exports of a run folder, which have not begun. out: folder of runs, of the default database. Others: see
    Tracker.
    """
    exporters: list[Exporter] = []
    if config.enabled:
        uri = config.uri or default_uri(out)
        # Artifacts of a database go beside its file, or beside the runs: MLflow would take the folder in which the
        # command was started.
        beside = database.parent if (database := sqlite_file(uri)) else out
        is_database = uri.startswith(("sqlite", "postgresql", "mysql", "mssql"))
        artifacts = (beside.resolve() / "mlartifacts").as_uri() if is_database else None
        exporters.append(MlflowExporter(artifacts, replace(config, uri=uri), facts, folder, find_models))
    if config.tensorboard:
        exporters.append(TensorBoardExporter(folder, facts))
    return [FolderExport(folder, exporter, facts, timing) for exporter in exporters]


def default_uri(out: Path) -> str:
    """Tracking URI of all runs below `out` unless another is set: an SQLite database."""
    return sqlite_uri(out / "mlflow.db")
