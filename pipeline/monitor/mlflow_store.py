"""Requests to an MLflow server or database. The only file that imports mlflow, and only when it is used: that takes seconds."""

import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.json_record import quoted
from pipeline.monitor.metrics_file import Record
from pipeline.monitor.run_page import (
    EXPERIMENT_TAGS,
    DatasetFacts,
    StoredRun,
    metric_name,
    restored_value,
    stored_dataset,
)

# MLflow's limits: characters of a parameter's value, parameters per request.
_MAX_VALUE = 6000
_MAX_PARAMETERS = 100
# Rows of the table of metrics that are held in memory at once while a run is read.
_ROWS_AT_ONCE = 50_000
# A run's description, and the digest of what this project wrote there: with another digest, someone has edited it.
# MLflow does not show tags that begin with "mlflow."
_NOTE, _NOTE_DIGEST = "mlflow.note.content", "mlflow.note.digest"


class MlflowStore:
    """An MLflow server, or a database that this process opens itself. Methods raise what MLflow raises."""

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient(tracking_uri=uri)

    # ---------------------------------------------------------------- runs
    def experiment_id(self, name: str, artifact_location: str | None) -> str:
        """ID of an experiment, which is created if it is missing. Its page is marked as model training and described."""
        if (experiment := self.client.get_experiment_by_name(name)) is None:
            self._unless_another_run_did(
                lambda: self.client.create_experiment(name, artifact_location, EXPERIMENT_TAGS),
                lambda: self.client.get_experiment_by_name(name) is not None,
            )
            experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id
        for tag in EXPERIMENT_TAGS.keys() - experiment.tags.keys():  # A description that someone wrote stays.
            self._unless_another_run_did(
                partial(self.client.set_experiment_tag, number, tag, EXPERIMENT_TAGS[tag]),
                partial(self._has_tag, number, tag),
            )
        return number

    def page_of(self, experiment: str) -> str:
        """Path of an experiment's page on a server of this store, with MLflow's view for model training."""
        found = self.client.get_experiment_by_name(experiment)
        return f"/#/experiments/{found.experiment_id}/runs?workflowType=machine_learning" if found else "/"

    def _has_tag(self, experiment_id: str, tag: str) -> bool:
        return tag in self.client.get_experiment(experiment_id).tags

    def _unless_another_run_did(self, request: Callable[[], object], is_done: Callable[[], bool]) -> None:
        """Make a request that fails when a run that begins at the same time has made it first."""
        from mlflow.exceptions import MlflowException

        try:
            request()
        except MlflowException:
            if not is_done():
                raise

    def find_run(self, experiment_id: str, tag: str, value: str) -> tuple[str, bool] | None:
        """Returns (ID, whether it has parameters) of the newest run with a tag; None if there is none."""
        order = ["attributes.start_time DESC"]
        found = self.client.search_runs([experiment_id], f"tags.{tag} = '{value}'", order_by=order, max_results=1)
        return (found[0].info.run_id, bool(found[0].data.params)) if found else None

    def create_run(self, experiment_id: str, name: str, tags: dict[str, str], started: int | None = None) -> str:
        """Returns the ID of a new run. started: in milliseconds, if that was before now."""
        tags = {tag: text for tag, text in tags.items() if tag != _NOTE}  # `start_run` sets it.
        return self.client.create_run(experiment_id, start_time=started, run_name=name, tags=tags).info.run_id

    def create_copy(self, run_id: str) -> str:
        """Create an empty run with the experiment, name and tags of another."""
        run = self.client.get_run(run_id)
        tags = {name: text for name, text in run.data.tags.items() if name != "mlflow.runName"}
        return self.create_run(run.info.experiment_id, run.info.run_name, tags, run.info.start_time)

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted. A deleted run refuses metrics."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return False
            raise

    def delete_run(self, run_id: str) -> None:
        """Delete a run if it exists. MLflow can restore it until `mlflow gc`."""
        if self.is_active(run_id):
            self.client.delete_run(run_id)

    def start_run(self, run_id: str, tags: dict[str, str]) -> None:
        """Mark a run as running, set its tags, and count its starts."""
        starts = int(self.client.get_run(run_id).data.tags.get("starts", "0")) + 1
        self.client.update_run(run_id, status="RUNNING")
        self.set_tags(run_id, {**tags, "starts": str(starts)})

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        """Set tags of a run. A description that someone has edited stays."""
        from mlflow.entities import RunTag

        if _NOTE in tags:
            present = self.client.get_run(run_id).data.tags
            if _digest(present.get(_NOTE, "")) == present.get(_NOTE_DIGEST, _digest("")):
                tags = {**tags, _NOTE_DIGEST: _digest(tags[_NOTE])}
            else:
                tags = {name: text for name, text in tags.items() if name != _NOTE}
        self.client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])

    def end_run(self, run_id: str, status: str) -> None:
        """Close a run as FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    # ---------------------------------------------------------------- what a run holds
    def log_parameters(self, run_id: str, parameters: dict[str, Any]) -> None:
        """Log parameters; longer values are cut to MLflow's limit."""
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_MAX_VALUE]) for name, value in parameters.items()]
        for first in range(0, len(params), _MAX_PARAMETERS):
            self.client.log_batch(run_id, params=params[first : first + _MAX_PARAMETERS])

    def log_metrics(self, run_id: str, records: Iterable[Record], tags: dict[str, str]) -> None:
        """Log metrics under the names that group them, and set tags, in one request."""
        from mlflow.entities import Metric, RunTag

        points = [
            Metric(metric_name(name), value, record.time, record.step)
            for record in records
            for name, value in record.metrics.items()
        ]
        self.client.log_batch(run_id, metrics=points, tags=[RunTag(name, text) for name, text in tags.items()])

    def log_datasets(self, run_id: str, datasets: Iterable[DatasetFacts]) -> None:
        """Show which data a run used. MLflow keeps a data set that was logged before once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for facts in datasets:
            kind = facts.source.partition("://")[0] if "://" in facts.source else "local"
            schema = {"image": "bytes", "labels": f"int64, {facts.num_classes} classes"}
            profile = {"num_samples": facts.num_samples, "num_classes": facts.num_classes, "split": facts.split}
            dataset = Dataset(
                f"{facts.name}:{facts.split}", facts.digest[:36], kind, json.dumps({"uri": facts.source}),
                schema=json.dumps(schema), profile=json.dumps(profile),
            )  # fmt: skip
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", facts.context)]))
        if inputs:
            self.client.log_inputs(run_id, inputs)

    def log_artifact(self, run_id: str, path: Path) -> None:
        self.client.log_artifact(run_id, str(path))

    def has_points_after(self, run_id: str, step: int) -> bool:
        """Whether a run has points of steps after `step`."""
        names = self.client.get_run(run_id).data.metrics
        return any(point.step > step for name in names for point in self.client.get_metric_history(run_id, name))

    def delete_points_after(self, run_id: str, step: int) -> bool:
        """Delete a run's points of steps after `step`. Returns False for a server, which offers no such request.

        MLflow's API cannot delete points, so this uses the database tables of the release that pyproject.toml pins. Without
        it, a run in a database would be replaced as one on a server is, and its ID would change with every kill.
        """
        from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        store = self.client._tracking_client.store
        if not isinstance(store, SqlAlchemyStore):
            return False
        with store.ManagedSessionMaker(read_only=False) as session:
            later = session.query(SqlLatestMetric).filter(
                SqlLatestMetric.run_uuid == run_id, SqlLatestMetric.step > step
            )
            names = [row.key for row in later]
            later.delete(synchronize_session=False)
            points = session.query(SqlMetric).filter(SqlMetric.run_uuid == run_id)
            points.filter(SqlMetric.step > step).delete(synchronize_session=False)
            for name in names:  # The table of latest values needs the newest of the remaining points.
                newest = (SqlMetric.step.desc(), SqlMetric.timestamp.desc(), SqlMetric.value.desc())
                if last := points.filter(SqlMetric.key == name).order_by(*newest).first():
                    fields = ("run_uuid", "key", "value", "timestamp", "step", "is_nan")
                    session.add(SqlLatestMetric(**{field: getattr(last, field) for field in fields}))
        return True

    # ---------------------------------------------------------------- reading
    def read_run(self, run_id: str) -> StoredRun:
        """All of a run but its metrics and files. Raises UserError if the store has no such run."""
        from mlflow.exceptions import MlflowException

        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            raise UserError(f"MLflow run {quoted(run_id)}: {' '.join(str(error).split())[:200]}") from None
        datasets = []
        for used in run.inputs.dataset_inputs:
            context = next((tag.value for tag in used.tags if tag.key == "mlflow.data.context"), "")
            facts = (used.dataset.name, used.dataset.digest, used.dataset.source, used.dataset.profile)
            datasets.append(stored_dataset(*facts, context))
        info = run.info
        metrics = {name: restored_value(value) for name, value in run.data.metrics.items()}
        return StoredRun(
            info.run_id, info.run_name, info.experiment_id, info.status, (info.start_time or 0) / 1000,
            (info.end_time or 0) / 1000, dict(run.data.tags), dict(run.data.params), metrics, tuple(datasets),
        )  # fmt: skip

    def read_points(
        self, run: StoredRun, names: Iterable[str]
    ) -> Iterator[tuple[str, Iterable[tuple[int, float, int]]]]:
        """Yields (metric, points) of each of these metrics; a point is (step, value, milliseconds since 1970).

        A database is read by one query over all metrics, a server by pages of 25,000 points of one metric.
        """
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        store = self.client._tracking_client.store
        if not isinstance(store, SqlAlchemyStore):
            for name in names:
                history = self.client.get_metric_history(run.run_id, name)
                yield name, [(point.step, restored_value(point.value), point.timestamp) for point in history]
            return
        from mlflow.store.tracking.dbmodels.models import SqlMetric

        with store.ManagedSessionMaker() as session:
            columns = (SqlMetric.key, SqlMetric.step, SqlMetric.value, SqlMetric.timestamp, SqlMetric.is_nan)
            found = session.query(*columns).filter(SqlMetric.run_uuid == run.run_id, SqlMetric.key.in_(names))
            ordered = found.order_by(SqlMetric.key, SqlMetric.step)
            for key, rows in itertools.groupby(ordered.yield_per(_ROWS_AT_ONCE), key=lambda row: row[0]):
                yield key, ((row[1], math.nan if row[4] else restored_value(row[2]), row[3]) for row in rows)

    def list_files(self, run_id: str, folder: str = "") -> list[str]:
        """Names of a run's artifacts in a folder, with the folder; without those in folders inside it."""
        return [file.path for file in self.client.list_artifacts(run_id, folder or None) if not file.is_dir]

    def read_file(self, run_id: str, name: str) -> bytes:
        """Content of an artifact."""
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with tempfile.TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, name, folder)).read_bytes()

    def runs_with_tag(self, tag: str, value: str) -> list[str]:
        """IDs of the runs of all experiments that have a tag of this value, oldest first; at most 1,000."""
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        order = ["attributes.start_time ASC"]
        found = self.client.search_runs(experiments, f"tags.`{tag}` = '{value}'", order_by=order, max_results=1000)
        return [run.info.run_id for run in found]

    def models_of(self, run: StoredRun) -> list[dict[str, str]]:
        """The tags and parameters of the logged models of a run, with "model_id"; oldest first."""
        mine = f"source_run_id = '{run.run_id}'"
        found = self.client.search_logged_models([run.experiment_id], mine)
        found.sort(key=lambda model: model.creation_timestamp)
        return [{**model.params, **model.tags, "model_id": model.model_id} for model in found]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
