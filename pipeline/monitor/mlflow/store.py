"""Requests to an MLflow server or database. mlflow is imported only when it is used, because that takes seconds."""

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.files import create
from pipeline.base.tracking_uri import sqlite_file
from pipeline.monitor.metrics_file import Record
from pipeline.monitor.mlflow.state import FOLDER_TAG
from pipeline.monitor.mlflow.view import VIEW_KEY, VIEW_TAG, is_earlier
from pipeline.monitor.run_page import (
    EXPERIMENT_TAGS,
    NOTE,
    OF_THE_RUN,
    DatasetFacts,
    dataset_name,
)

T = TypeVar("T")

# Key of the lock in PostgreSQL that one process holds while it opens the database: any number that nobody else uses there.
_OPENING = 0x7669745F6F70656E
# MLflow's limits: characters of a parameter's value, and of a tag's, which it cuts; parameters per request.
_MAX_VALUE, _MAX_TAG = 6000, 8000
_MAX_PARAMETERS = 100
# Digest of the description that this project wrote: with another digest, someone has edited it.
# MLflow does not show tags that begin with "mlflow."
_NOTE_DIGEST = "mlflow.note.digest"
# Prefix of the tags of a run that name the runs made from it, as Markdown for its description, and the heading above them there.
_CHILD = "mlflow.made_from_this."
_CHILDREN = "\n\n**Made from this run**\n\n"
# In the text of an error: MLflow has no code for it.
_TOO_LARGE = "failed with error code 413 "


class MlflowStore:
    """An MLflow server, or a database that this process opens itself. Methods raise what MLflow raises.

    The constructor raises UserError for a database in memory, and for one that a killed process left half made.
    """

    def __init__(self, uri: str) -> None:
        database = sqlite_file(uri)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # What sends tries again by itself, after it has looked what arrived. MLflow's client would repeat a request that was carried
        # out although its answer was lost (504 of a web server before it): two runs.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # One line for each retry, for hours.
        # With MLFLOW_TRACKING_INSECURE_TLS, two lines for each request.
        warnings.filterwarnings("once", message="Unverified HTTPS request")
        from mlflow.tracking import MlflowClient

        _open_databases_in_one_try()
        self.uri = uri
        if database and not database.exists():
            _create_database(database)
        try:
            with _alone_in_postgresql(uri):
                self.client: Any = MlflowClient(tracking_uri=uri)
        except Exception as error:
            if database and "_alembic_tmp_" in str(error):
                raise UserError(
                    "was left half made by a process that was killed while it created the database: remove the file; "
                    "all runs are sent again from their folders"
                ) from error
            raise

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
        replaced = {VIEW_TAG} if is_earlier(experiment.tags.get(VIEW_TAG, "")) else set[str]()
        # A description that someone wrote stays, and so does a view that someone changed.
        for tag in (EXPERIMENT_TAGS.keys() - experiment.tags.keys()) | replaced:
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

    def find_run(self, experiment_id: str, folder: str) -> tuple[str, bool, bool] | None:
        """Returns (ID, whether it has parameters, whether it has metrics) of the newest run with the tag of a folder, or None."""
        of_folder, order = f"tags.{FOLDER_TAG} = '{folder}'", ["attributes.start_time DESC"]
        found = self.client.search_runs([experiment_id], of_folder, order_by=order, max_results=1)
        return (found[0].info.run_id, bool(found[0].data.params), bool(found[0].data.metrics)) if found else None

    def create_run(self, experiment_id: str, name: str, tags: dict[str, str], started: int | None = None) -> str:
        """Returns the ID of a new run. started: in milliseconds, if that was before now."""
        tags = {tag: text for tag, text in tags.items() if tag != NOTE}  # `set_tags` sets it.
        return self.client.create_run(experiment_id, start_time=started, run_name=name, tags=tags).info.run_id

    def create_copy(self, run_id: str) -> str:
        """Create an empty run with the experiment, name and tags of another, also with a description that someone has edited.

        That of a killed sender is used again: another run of the same folder, without parameters and metrics.
        """
        run = self.client.get_run(run_id)
        of_folder = f"tags.{FOLDER_TAG} = '{run.data.tags.get(FOLDER_TAG, '')}'"
        for found in self.client.search_runs([run.info.experiment_id], of_folder):
            if found.info.run_id != run_id and not found.data.params and not found.data.metrics:
                return found.info.run_id
        tags = {name: text for name, text in run.data.tags.items() if name != "mlflow.runName"}
        copied = self.client.create_run(run.info.experiment_id, run.info.start_time, tags, run.info.run_name)
        return copied.info.run_id

    def is_active(self, run_id: str) -> bool:
        """Whether a run exists and is not deleted. A deleted run refuses metrics."""
        return self.active_run(run_id) is not None

    def active_run(self, run_id: str) -> Any:
        """MLflow's facts about a run, in one request; None if it does not exist or is deleted."""
        run = found_by(partial(self.client.get_run, run_id))
        return run if run and run.info.lifecycle_stage == "active" else None

    def last_steps(self, run: Any) -> dict[str, int]:
        """Metric -> step of its last point, of a run as `active_run` gives it."""
        return {point.key: point.step for point in run.data._metric_objs}

    def list_files(self, run_id: str, folder: str = "") -> list[str]:
        """Names of a run's artifacts in a folder, with the folder; without those in folders inside it."""
        return [file.path for file in self.client.list_artifacts(run_id, folder or None) if not file.is_dir]

    def logged_models(self, experiment_id: str, run_id: str) -> list[Any]:
        """All logged models of a run; MLflow gives 100 a request."""
        found, mine, token = list[Any](), f"source_run_id = '{run_id}'", None
        while True:
            page = self.client.search_logged_models([experiment_id], mine, page_token=token)
            found += page
            if not (token := page.token):
                return found

    def delete_run(self, run_id: str) -> None:
        """Delete a run if it exists. MLflow can restore it until `mlflow gc`."""
        if self.is_active(run_id):
            self.client.delete_run(run_id)

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        """Set tags of a run. A description that someone has edited stays; under another one the runs made from it are listed."""
        from mlflow.entities import RunTag

        if NOTE in tags:
            present = self.client.get_run(run_id).data.tags
            if _digest(present.get(NOTE, "")) == present.get(_NOTE_DIGEST, _digest("")):
                note = _with_children(tags[NOTE], {**present, **tags})[:_MAX_TAG]
                tags = {**tags, NOTE: note, _NOTE_DIGEST: _digest(note)}
            else:
                tags = {name: text for name, text in tags.items() if name != NOTE}
        self.client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])

    def link_to_parent(
        self, run_id: str, name: str, kind: str, parent: str, replaced: str | None
    ) -> tuple[str, str] | None:
        """Show on the parent's page that this run was made from it, in place of another that it replaced.

        Returns (the parent's name, a link to its page); None if it is in another store.
        """
        if not self.is_active(parent):
            return None
        page = _link(name, self.client.get_run(run_id).info)
        found = self.client.get_run(parent)
        if (link := f"{_CHILD}{replaced}") in found.data.tags:
            self.client.delete_tag(parent, link)
        note = found.data.tags.get(NOTE, "").partition(_CHILDREN)[0]
        self.set_tags(parent, {_CHILD + run_id: f"{kind} {page}", NOTE: note})
        return found.info.run_name, _link(found.info.run_name, found.info)

    # ---------------------------------------------------------------- what a run holds
    def log_parameters(self, run_id: str, parameters: dict[str, Any]) -> None:
        """Log parameters; longer values are cut to MLflow's limit."""
        items = list(parameters.items())
        for first in range(0, len(items), _MAX_PARAMETERS):
            self.log_metrics(run_id, (), {}, dict(items[first : first + _MAX_PARAMETERS]))

    def log_metrics(
        self, run_id: str, records: Iterable[Record], tags: dict[str, str], parameters: dict[str, Any] | None = None
    ) -> None:
        """Log metrics under the names that MLflow shows, tags, and at most 100 parameters, in one request."""
        from mlflow.entities import Metric, Param, RunTag

        points = [
            Metric(name, value, record.time, record.step)
            for record in records
            for name, value in record.metrics.items()
        ]
        params = [Param(name, str(value)[:_MAX_VALUE]) for name, value in (parameters or {}).items()]
        self.client.log_batch(
            run_id, metrics=points, params=params, tags=[RunTag(name, text) for name, text in tags.items()]
        )

    def log_datasets(self, run_id: str, datasets: Iterable[DatasetFacts]) -> None:
        """Show which data a run used. MLflow keeps a data set that was logged before once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for facts in datasets:
            kind = facts.source.partition("://")[0] if "://" in facts.source else "local"
            labels = {"labels": f"int64, {facts.num_classes} classes"} if facts.num_classes else {}
            schema = {"image": "bytes", **labels}
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
            tags = {"mlflow.data.context": facts.context}
            tags |= {name: facts.notes[name] for name in OF_THE_RUN if name in facts.notes}
            inputs.append(DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()]))
        if inputs:
            self.client.log_inputs(run_id, inputs)

    def log_artifact(self, run_id: str, path: Path, folder: str = "") -> None:
        self.client.log_artifact(run_id, str(path), folder or None)

    # ---------------------------------------------------------------- points of steps that run again
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


def _with_children(note: str, tags: dict[str, str]) -> str:
    """The description, and links to the runs that were made from this one, which its tags name; as many as it may hold."""
    children = [text for name, text in sorted(tags.items()) if name.startswith(_CHILD)]
    lines = [f"- {child}\n" for child in dict.fromkeys(children)]
    room, shown = _MAX_TAG - len(note) - len(_CHILDREN) - len(_others(len(lines))), len(lines)
    while shown and sum(map(len, lines[:shown])) > room:
        shown -= 1
    more = _others(len(lines) - shown) if shown < len(lines) else ""
    return note + _CHILDREN + "".join([*lines[:shown], more]).rstrip() if lines else note


def _others(count: int) -> str:
    return f"- and {count:,} more"


def _link(name: str, info: Any) -> str:
    """Markdown: a link from any page of a server to that of a run."""
    return f"[{name}](#/experiments/{info.experiment_id}/runs/{info.run_id})"


def _open_databases_in_one_try() -> None:
    """MLflow tries to open a database ten times over 100 s, and logs three lines each time. The sender tries again by itself.

    MLflow has no setting for it. Without this, a wrong password is reported after 100 s. Nor does it create folders, which it
    names by the URI: `a%3Fb` for a database in `a?b`.
    """
    from mlflow.store.db import utils

    utils.MAX_RETRY_COUNT = 1
    utils._make_parent_dirs_if_sqlite = lambda uri: None
    # It logs a traceback of forty lines for each error, which at each try would be one more; what sends says it in a line, once.
    logging.getLogger(utils.__name__).setLevel(logging.CRITICAL)


def _create_database(path: Path) -> None:
    """Create an SQLite database with MLflow's tables, whole or not at all.

    MLflow makes and changes its tables in some fifty steps that no transaction holds together. A process that is killed
    between them leaves a database that no version of MLflow opens again, and so do two processes that begin at the same
    time. So the tables are made in memory, and the file appears with all of them; the first of several processes wins.
    """
    from mlflow.store.db.utils import _initialize_tables
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401  # Declares the tables that are made.
    from sqlalchemy import create_engine
    from sqlalchemy.pool import StaticPool

    path.parent.mkdir(parents=True, exist_ok=True)  # First: a disk that refuses it is asked again and again.
    engine = create_engine("sqlite://", poolclass=StaticPool)
    _initialize_tables(engine)
    connection: Any = engine.raw_connection().driver_connection
    content: bytes = connection.serialize()
    engine.dispose()
    create(path, content)


@contextmanager
def _alone_in_postgresql(uri: str) -> Iterator[None]:
    """Let one process at a time, on any machine, open a PostgreSQL database; does nothing for another store.

    Processes that opened a fresh one together would each make MLflow's tables, and all but one would fail.
    The lock ends with its transaction, and so with a process that is killed.
    """
    if not uri.startswith("postgresql"):
        yield
        return
    from sqlalchemy import create_engine, text
    from sqlalchemy.pool import NullPool

    with create_engine(uri, poolclass=NullPool).connect() as connection:
        # Longer than making the tables takes: a process that stands still there is not waited for without an end.
        connection.execute(text("SET LOCAL lock_timeout = '100s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _OPENING})
        yield


def found_by(request: Callable[[], T]) -> T | None:
    """The answer to a request; None if what it names does not exist. Raises other errors."""
    from mlflow.exceptions import MlflowException

    try:
        return request()
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def is_refusal(error: Exception) -> bool:
    """Whether the store answered that a request is wrong, so that it would refuse it again.

    413 is of a web server before it, with a limit to the size of a request.
    """
    # Requests about artifacts raise HTTPError.
    status = getattr(getattr(error, "response", None), "status_code", 0)
    code = getattr(error, "error_code", "")
    return status in (400, 413) or code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") or _TOO_LARGE in str(error)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
