"""Opens a store that exists, and requests that read runs back."""

import itertools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.tracking_uri import sqlite_file
from pipeline.monitor.mlflow.refusals import one_line
from pipeline.monitor.mlflow.store import MlflowStore
from pipeline.monitor.run_page import StoredRun, hide_passwords, restored_value, stored_dataset
from pipeline.monitor.tracking import default_uri

S = TypeVar("S", bound=MlflowStore)

# Rows of the table of metrics that are held in memory at once while a run is read.
_ROWS_AT_ONCE = 50_000


class ReadingStore(MlflowStore):
    """A store with requests that read runs back. They raise UserError where a store that was opened does not answer one."""

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # Reading twice does no harm.
        super().__init__(uri)

    def read_run(self, run_id: str) -> StoredRun:
        """All of a run but its metrics and files. Raises UserError if the store has no such run."""
        try:
            run = self.client.get_run(run_id)
        except Exception as error:  # Whatever the server or its client raises.
            raise UserError(f"MLflow run {quoted(run_id)}: {one_line(error)}") from None
        datasets = []
        for used in run.inputs.dataset_inputs:
            tags = {tag.key: tag.value for tag in used.tags}
            facts = (used.dataset.name, used.dataset.digest, used.dataset.source, used.dataset.profile)
            datasets.append(stored_dataset(*facts, tags))
        info = run.info
        metrics = {name: restored_value(value) for name, value in run.data.metrics.items()}
        return StoredRun(
            info.run_id, info.run_name, info.experiment_id, info.status, dict(run.data.tags), dict(run.data.params), metrics,
            tuple(datasets),
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
                with self._asked():
                    history = self.client.get_metric_history(run.run_id, name)
                yield name, [(point.step, restored_value(point.value), point.timestamp) for point in history]
            return
        from mlflow.store.tracking.dbmodels.models import SqlMetric

        with self._asked(), store.ManagedSessionMaker() as session:
            columns = (SqlMetric.key, SqlMetric.step, SqlMetric.value, SqlMetric.timestamp, SqlMetric.is_nan)
            found = session.query(*columns).filter(SqlMetric.run_uuid == run.run_id, SqlMetric.key.in_(names))
            ordered = found.order_by(SqlMetric.key, SqlMetric.step)
            for key, rows in itertools.groupby(ordered.yield_per(_ROWS_AT_ONCE), key=lambda row: row[0]):
                yield key, self._points(rows)

    def _points(self, rows: Iterable[Any]) -> Iterator[tuple[int, float, int]]:
        with self._asked():
            for _, step, value, milliseconds, is_nan in rows:
                yield step, math.nan if is_nan else restored_value(value), milliseconds

    def read_file(self, run_id: str, name: str) -> bytes:
        """Content of an artifact."""
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with self._asked(), tempfile.TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, name, folder)).read_bytes()

    def runs_with_tag(self, tag: str, value: str) -> list[str]:
        """IDs of the runs of all experiments that have a tag of this value, oldest first; at most 1,000."""
        order = ["attributes.start_time ASC"]
        with self._asked():
            experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
            found = self.client.search_runs(experiments, f"tags.`{tag}` = '{value}'", order_by=order, max_results=1000)
        return [run.info.run_id for run in found]

    def list_files(self, run_id: str, folder: str = "") -> list[str]:
        with self._asked():
            return super().list_files(run_id, folder)

    def models_of(self, run: StoredRun) -> list[dict[str, str]]:
        """The tags and parameters of the logged models of a run, with "model_id"; oldest first."""
        with self._asked():
            found = self.logged_models(run.experiment_id, run.run_id)
        found.sort(key=lambda model: model.creation_timestamp)
        return [{**model.params, **model.tags, "model_id": model.model_id} for model in found]

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Raise UserError for whatever the server, its client or the place of the artifacts raises."""
        try:
            yield
        except Exception as error:
            raise UserError(
                f"MLflow at {hide_passwords(self.uri)} did not answer ({one_line(error)}). Try again when it does."
            ) from None


def open_existing(kind: type[S], uri: str, runs: Path, beginning: str = "", setting: str = "") -> S:
    """The MLflow store at `uri`, else at MLFLOW_TRACKING_URI, else the database of the runs in the folder `runs`.

    beginning: of messages. setting: that gives the URI, for messages. Raises UserError for a database that does not exist, which
    MLflow would otherwise create, and for a store that cannot be opened.
    """
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(runs)
    if (database := sqlite_file(uri)) and not database.is_file():
        way_out = f"set {setting}MLFLOW_TRACKING_URI to the store of the runs."
        raise UserError(f"{beginning}there is no MLflow database {database}: {way_out}")
    try:
        return kind(uri)
    except Exception as error:  # Whatever MLflow and its database drivers raise.
        raise UserError(f"{beginning}MLflow at {hide_passwords(uri)} cannot be opened: {one_line(error)}") from None
