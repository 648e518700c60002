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
    NOTE,
    DatasetFacts,
    StoredRun,
    dataset_name,
    hide_passwords,
    metric_name,
    restored_value,
    stored_dataset,
)
from pipeline.monitor.shared_view import VIEW_KEY, VIEW_TAG

# MLflow's limits: characters of a parameter's value, parameters per request.
_MAX_VALUE = 6000
_MAX_PARAMETERS = 100
# Rows of the table of metrics that are held in memory at once while a run is read.
_ROWS_AT_ONCE = 50_000
_REGISTERED = (
    "Vision Transformers of this pipeline. Alias `last`: of the run that ended last; `best`: the highest score so far."
)
_VERSIONS = "mlflow.modelVersions"
_WHERE = "MLFLOW_TRACKING_URI names the server; without it, runs/mlflow.db of this folder is read."
# Digest of the description that this project wrote: with another digest, someone has edited it.
# MLflow does not show tags that begin with "mlflow."
_NOTE_DIGEST = "mlflow.note.digest"
# Prefix of the tags of a run that name the runs made from it, and the heading above them in its description.
_CHILD, _CHILDREN = "made_from_this.", "\n\n**Made from this run**\n\n"


class MlflowStore:
    """An MLflow server, or a database that this process opens itself. Methods raise what MLflow raises."""

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # One line for each retry, for hours.
        from mlflow.tracking import MlflowClient

        _open_databases_in_one_try()
        self.uri = uri
        self.client: Any = MlflowClient(tracking_uri=uri)

    # ---------------------------------------------------------------- runs
    def experiment_id(self, name: str, artifact_location: str | None) -> str:
        """ID of an experiment, which is created if it is missing. Its page is marked as model training and described.

        Raises UserError if it was deleted: MLflow keeps its name until `mlflow gc`.
        """
        if (experiment := self.client.get_experiment_by_name(name)) is None:
            self._unless_another_run_did(
                lambda: self.client.create_experiment(name, artifact_location, EXPERIMENT_TAGS),
                lambda: self.client.get_experiment_by_name(name) is not None,
            )
            experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id
        if experiment.lifecycle_stage != "active":
            raise UserError(
                f"has deleted experiment {name!r} (`mlflow experiments restore --experiment-id {number}` restores it; or set "
                "track.experiment=...)"
            )
        for tag in EXPERIMENT_TAGS.keys() - experiment.tags.keys():  # A description that someone wrote stays.
            self._unless_another_run_did(
                partial(self.client.set_experiment_tag, number, tag, EXPERIMENT_TAGS[tag]),
                partial(self._has_tag, number, tag),
            )
        return number

    def page_of(self, experiment: str) -> str:
        """Path of an experiment's page on a server of this store: MLflow's page for model training, with this project's view."""
        if (found := self.client.get_experiment_by_name(experiment)) is None:
            return "/"
        view = f"&viewStateShareKey={VIEW_KEY}" if VIEW_TAG in found.tags else ""
        return f"/#/experiments/{found.experiment_id}/runs?workflowType=machine_learning{view}"

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
        tags = {tag: text for tag, text in tags.items() if tag != NOTE}  # `start_run` sets it.
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
        """Mark a run as running, and set its tags."""
        self.client.update_run(run_id, status="RUNNING")
        self.set_tags(run_id, tags)

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        """Set tags of a run. A description that someone has edited stays; under another one the runs made from it are listed."""
        from mlflow.entities import RunTag

        if NOTE in tags:
            present = self.client.get_run(run_id).data.tags
            if _digest(present.get(NOTE, "")) == present.get(_NOTE_DIGEST, _digest("")):
                note = _with_children(tags[NOTE], {**present, **tags})
                tags = {**tags, NOTE: note, _NOTE_DIGEST: _digest(note)}
            else:
                tags = {name: text for name, text in tags.items() if name != NOTE}
        self.client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])

    def link_to_parent(self, run_id: str, name: str, kind: str, parent: str) -> str | None:
        """Show on the parent's page that this run was made from it. Returns a link to that page; None if it is in another store."""
        if not self.is_active(parent):
            return None
        page = _link(name, self.client.get_run(run_id).info)
        found = self.client.get_run(parent)
        note = found.data.tags.get(NOTE, "").partition(_CHILDREN)[0]
        self.set_tags(parent, {_CHILD + run_id: f"{kind} {page}", NOTE: note})
        return _link(found.info.run_name, found.info)

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

    def log_metrics(
        self, run_id: str, records: Iterable[Record], tags: dict[str, str], parameters: dict[str, Any] | None = None
    ) -> None:
        """Log metrics under the names that group them, tags, and at most 100 parameters, in one request."""
        from mlflow.entities import Metric, Param, RunTag

        points = [
            Metric(metric_name(name), value, record.time, record.step)
            for record in records
            for name, value in record.metrics.items()
        ]
        params = [Param(name, str(value)[:_MAX_VALUE]) for name, value in (parameters or {}).items()]
        self.client.log_batch(run_id, points, params, [RunTag(name, text) for name, text in tags.items()])

    def log_datasets(self, run_id: str, datasets: Iterable[DatasetFacts]) -> None:
        """Show which data a run used. MLflow keeps a data set that was logged before once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for facts in datasets:
            kind = facts.source.partition("://")[0] if "://" in facts.source else "local"
            schema = {"image": "bytes", "labels": f"int64, {facts.num_classes} classes"}
            profile = {
                "num_samples": facts.num_samples,
                "num_classes": facts.num_classes,
                "split": facts.split,
                **facts.notes,
            }
            dataset = Dataset(
                dataset_name(facts), facts.digest[:36], kind, json.dumps({"uri": facts.source}),
                schema=json.dumps(schema), profile=json.dumps(profile),
            )  # fmt: skip
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", facts.context)]))
        if inputs:
            self.client.log_inputs(run_id, inputs)

    def log_artifact(self, run_id: str, path: Path, folder: str = "") -> None:
        self.client.log_artifact(run_id, str(path), folder or None)

    # ---------------------------------------------------------------- logged and registered models
    def create_model(
        self, run_id: str, name: str, step: int, kind: str, tags: dict[str, str], files: list[Path]
    ) -> str:
        """Show a checkpoint of a run as a logged model with these artifacts; returns its ID. One of a killed sender is used again."""
        from mlflow.entities import LoggedModelOutput

        experiment_id = self.client.get_run(run_id).info.experiment_id
        mine = f"source_run_id = '{run_id}' AND name = '{name}'"
        found = [
            m for m in self.client.search_logged_models([experiment_id], mine) if m.tags.get("sha256") == tags["sha256"]
        ]
        model = (
            found[0]
            if found
            else self.client.create_logged_model(experiment_id, name, run_id, tags, {"step": str(step)}, kind)
        )
        with tempfile.TemporaryDirectory() as folder:
            facts = {"uri": model.model_uri, "step": step, **tags}
            (Path(folder) / "weights.json").write_text(json.dumps(facts, indent=1))
            self.client.log_model_artifacts(model.model_id, folder)
        for file in files:
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                (Path(folder) / file.name).hardlink_to(file)
                self.client.log_model_artifacts(model.model_id, folder)
        self.client.finalize_logged_model(model.model_id, "READY")
        if model.model_id not in {output.model_id for output in self.client.get_run(run_id).outputs.model_outputs}:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
        return model.model_id

    def set_model_tags(self, model_id: str, tags: dict[str, str]) -> None:
        self.client.set_logged_model_tags(model_id, tags)

    def delete_model(self, model_id: str) -> None:
        """Delete a logged model if it exists."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.delete_logged_model(model_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise

    def score_model(self, run_id: str, model_id: str, step: int, data: DatasetFacts | None) -> dict[str, float]:
        """Link the run's scores at a step to the model, on the data of the evaluation; returns them all."""
        from mlflow.entities import Metric

        names = [name for name in self.client.get_run(run_id).data.metrics if name.startswith(("eval/", "probe/"))]
        points = [p for name in names for p in self.client.get_metric_history(run_id, name) if p.step == step]
        where = {"dataset_name": dataset_name(data), "dataset_digest": data.digest[:36]} if data else {}
        linked = [Metric(p.key, p.value, p.timestamp, p.step, model_id, **where) for p in points]
        if linked:
            self.client.log_batch(run_id, metrics=linked)
        return {point.key: point.value for point in points}

    def register(self, name: str, run_id: str, model_id: str, tags: dict[str, str]) -> str:
        """Register a logged model as a new version of the registered model `name`; returns the version."""
        self._unless_another_run_did(
            lambda: self.client.create_registered_model(name, description=_REGISTERED),
            lambda: self.client.get_registered_model(name) is not None,
        )
        model = self.client.get_logged_model(model_id)
        # The client of a database would look up models:/ in the default store.
        source = model.model_uri if self.uri.startswith("http") else model.artifact_location
        tags = {**tags, "model_id": model_id}
        version = str(self.client.create_model_version(name, source, run_id, tags, model_id=model_id).version)
        # By this tag, which `mlflow.register_model` sets, the page of the logged model names its versions.
        known = json.loads(model.tags.get(_VERSIONS, "[]"))
        if (here := {"name": name, "version": version}) not in known:
            self.set_model_tags(model_id, {_VERSIONS: json.dumps([*known, here])})
        return version

    def set_version_tags(self, name: str, version: str, tags: dict[str, str]) -> None:
        for tag, text in tags.items():
            self.client.set_model_version_tag(name, version, tag, text)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        self.client.set_registered_model_alias(name, alias, version)

    def tags_of_alias(self, name: str, alias: str) -> dict[str, str] | None:
        """Tags of the version that an alias names; None if there is no such alias."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_model_version_by_alias(name, alias).tags
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def find_model(self, uri: str) -> tuple[str, dict[str, str]]:
        """(ID, tags) of a logged model: models:/ID, models:/NAME@alias, models:/NAME/version, or runs:/ID (its best, else newest).

        Raises UserError if there is none.
        """
        from mlflow.exceptions import MlflowException

        try:
            model = self.client.get_logged_model(self._model_id(uri))
        except MlflowException as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{uri} is not found in MLflow at {hide_passwords(self.uri)} ({reason}). {_WHERE}"
            ) from None
        return model.model_id, model.tags

    def _model_id(self, uri: str) -> str:
        scheme, _, name = uri.partition(":/")
        name = name.strip("/")
        if scheme == "runs":
            run = self.client.get_run(name)
            mine = f"source_run_id = '{run.info.run_id}'"
            found = self.client.search_logged_models([run.info.experiment_id], mine)
            if not found:
                raise UserError(f"{uri} has no logged model: only kept, best and last checkpoints are.")
            found.sort(key=lambda model: ("best" in model.tags.get("roles", ""), int(model.params.get("step", 0))))
            return found[-1].model_id
        if "@" in name:
            version = self.client.get_model_version_by_alias(*name.rsplit("@", 1))
        elif "/" in name:
            version = self.client.get_model_version(*name.rsplit("/", 1))
        else:
            return name
        return version.model_id or version.tags.get("model_id", "")

    def download_model_file(self, model_id: str, name: str, folder: Path) -> Path:
        """Download a file of a logged model's artifacts. Raises UserError if it has none of this name."""
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        try:
            location = self.client.get_logged_model(model_id).artifact_location
            return Path(download_artifacts(f"{location}/{name}", dst_path=str(folder), tracking_uri=self.uri))
        except (MlflowException, OSError) as error:
            raise UserError(
                f"models:/{model_id} has no {name} in MLflow at {hide_passwords(self.uri)} ({error})."
            ) from None

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


def _with_children(note: str, tags: dict[str, str]) -> str:
    """The description, and links to the runs that were made from this one, which its tags name."""
    children = [text for name, text in sorted(tags.items()) if name.startswith(_CHILD)]
    return note + _CHILDREN + "\n".join(f"- {child}" for child in children) if children else note


def _link(name: str, info: Any) -> str:
    """Markdown: a link from any page of a server to that of a run."""
    return f"[{name}](#/experiments/{info.experiment_id}/runs/{info.run_id})"


def _open_databases_in_one_try() -> None:
    """MLflow tries to open a database ten times over 100 s, and logs three lines each time. The sender tries again by itself.

    MLflow has no setting for it. Without this, a wrong password is reported after 100 s.
    """
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 1
    logging.getLogger(utils.__name__).setLevel(logging.WARNING)  # The import has set it to INFO.


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
