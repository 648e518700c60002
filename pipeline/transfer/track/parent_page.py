"""The MLflow page of a grid, a study or a sweep: a parent run, below which its runs are shown. Those of a grid and a study send themselves."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.data.dataset.manifest import Dataset
from pipeline.monitor.export import warn
from pipeline.monitor.mlflow.connection import active_run, connect
from pipeline.monitor.mlflow.refusals import one_line
from pipeline.monitor.mlflow.state import sent_to
from pipeline.monitor.run_page import DatasetFacts, RunFacts, hide_passwords, split_facts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.process.waits import waiting
from pipeline.settings.run import DataConfig, TrackConfig

# Tag by which MLflow shows a run below another.
PARENT_TAG = "mlflow.parentRunId"
# How long the first run waits for its parent, in seconds: a fresh store takes several.
_WAIT = 60.0


def uri_of_runs(mlflow: str, track: TrackConfig, out: str) -> str:
    """Where a parent and its runs are sent to; "" for nowhere. mlflow: the parent's setting. track: of the runs, as their settings say."""
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
    """Tags that say where a grid or study lies, and of which data it is."""
    return {"data": dataset.fingerprint, "dataset": dataset.path.name, "run_folder_path": str(folder.resolve())}


class ParentPage:
    """Sends a parent run. A context manager: on leaving, its runs are complete and the parent run ends.

    folder: of the grid, study or sweep. out: folder of all runs. experiment: that of its runs.
    """

    result = ""  # Markdown for the description.
    failure = ""  # Why it failed, if it did without an error.

    def __init__(self, facts: RunFacts, folder: Path, out: Path, uri: str, experiment: str) -> None:
        self.folder, self.uri = folder, uri
        self._folders: dict[Path, None] = {}
        self._tracker = Tracker(TrackConfig(uri=uri, experiment=experiment), out, folder, facts)
        self._parent, self._wait = "", _WAIT

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.complete()
            failure = self.failure if error is None else str(error) or type(error).__name__
            outcome = f"failed: {failure}" if failure else "finished"
            self._tracker.finish("FAILED" if failure else "FINISHED", outcome=outcome, result=self.result)
        else:  # Asked to stop, or Ctrl-C: the next start sends what is missing.
            self._tracker.finish("KILLED", in_a_hurry=True, outcome="stopped: the same command continues")

    def tracking(self, track: TrackConfig) -> TrackConfig:
        """The settings with which a run sends itself below this one."""
        if not track.enabled:
            return track
        return replace(track, uri=self.uri, parent_run=self.parent_run())

    def parent_run(self) -> str:
        """ID of the parent; "" if the store has not answered in time. Then the runs are linked at the end."""
        if self._parent:
            return self._parent
        shown = hide_passwords(self.uri)
        with waiting(f"MLflow at {shown} to have the run of {self.folder}", self._wait) as wait:
            self._wait = 1.0  # A store that is away is not waited for again.
            while wait.left > 0:
                if run_id := self._tracker.run_id:
                    self._parent = run_id
                    return self._parent
                time.sleep(0.2)
        warn(f"MLflow at {shown} has not answered: the runs of {self.folder} are linked to it later.")
        return ""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Send metrics of the parent."""
        self._tracker.log(0, dict(metrics))

    def has_run(self, folder: Path) -> None:
        """A run in this folder belongs to the parent, and is linked at the end if it is not yet."""
        self._folders[folder] = None

    def complete(self) -> None:
        """Link runs that were sent before the parent was known."""
        try:
            sent = [run_id for folder in self._folders if (run_id := sent_to(folder, self.uri).run_id)]
            if sent and (parent := self.parent_run()):
                client = connect(self.uri)
                for run_id in sent:
                    if active_run(client, run_id):
                        client.set_tag(run_id, PARENT_TAG, parent)
        except Exception as error:  # Whatever the server or its client raises.
            warn(f"MLflow at {hide_passwords(self.uri)} did not link the runs of {self.folder} ({one_line(error)}).")
