"""The MLflow page of an experiment: a parent run, below which its runs, which send themselves, are shown."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.atomic import write_files
from pipeline.monitor.export import warn
from pipeline.monitor.page_folder import FIGURES
from pipeline.monitor.run_page import DatasetFacts, RunFacts, hide_passwords, split_facts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.process.waits import waiting
from pipeline.settings.run import DataConfig, TrackConfig

# How long the first run waits for its parent, in seconds: a fresh store takes several.
_WAIT = 60.0
ARTIFACTS = ("report.md", "report.html", "results.csv", "results.parquet", "results.json", "experiment.json")


def uri_of_runs(mlflow: str, track: TrackConfig, out: str) -> str:
    """Where a parent and its runs are sent to; "" for nowhere. mlflow: the parent's setting. track: of the runs, as
    their settings say.
    """
    if mlflow:
        return "" if mlflow == "none" else mlflow
    return (track.uri or default_uri(Path(out))) if track.enabled else ""


def facts_of_splits(dataset: Dataset, data: DataConfig) -> tuple[DatasetFacts, ...]:
    """The splits of a data set that the runs below train on and are evaluated on."""
    splits = ((data.train_split, "training"), (data.eval_split, "evaluation"))
    return tuple(
        split_facts(dataset.path.name, dataset, split, context) for split, context in splits if split in dataset.splits
    )


def tags_of_folder(folder: Path, dataset: Dataset) -> dict[str, str]:
    """Tags that say where an experiment lies, and of which data it is."""
    return {"data": dataset.fingerprint, "dataset": dataset.path.name, "run_folder_path": str(folder.resolve())}


class ExperimentPage:
    """Sends a parent run, which ends when this context is left. out: folder of all runs. experiment: in MLflow, that of
    its runs.
    """

    def __init__(self, facts: RunFacts, folder: Path, out: Path, uri: str, experiment: str) -> None:
        self.folder, self.uri = folder, uri
        facts = replace(facts, artifacts=ARTIFACTS)
        self._tracker = Tracker(TrackConfig(uri=uri, experiment=experiment), out, folder, facts)
        self._wait, self._summary = _WAIT, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._tracker.finish("FINISHED", outcome="finished", result=self._summary)
        elif isinstance(error, Exception):
            outcome = f"failed: {str(error) or type(error).__name__}"
            self._tracker.finish("FAILED", outcome=outcome, result=self._summary)
        else:  # Asked to stop, or Ctrl-C: the next start sends what is missing.
            self._tracker.finish("KILLED", in_a_hurry=True, outcome="stopped: the same command continues")

    def show(self, metrics: Mapping[str, float], summary: str, pictures: Mapping[str, Any]) -> None:
        """Send what is known by now. summary: Markdown for the description."""
        self._tracker.log(0, dict(metrics))
        write_files(self.folder / FIGURES, pictures)
        self._summary = summary

    def tracking(self, track: TrackConfig) -> TrackConfig:
        """The settings with which a run sends itself below this one, if the store answers in time."""
        if not track.enabled:
            return track
        shown = hide_passwords(self.uri)
        if not self._tracker.run_id:
            with waiting(f"MLflow at {shown} to have the run of {self.folder}", self._wait) as wait:
                while not self._tracker.run_id and wait.left > 0:
                    time.sleep(0.2)
            self._wait = 1.0  # A store that is away is not waited for again.
        if not self._tracker.run_id:
            warn(f"MLflow at {shown} has not answered: runs of {self.folder} are not shown below it.")
        return replace(track, uri=self.uri, parent_run=self._tracker.run_id or "")
