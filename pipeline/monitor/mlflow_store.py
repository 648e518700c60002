"""Requests to an MLflow server or database. The only file that imports mlflow, and only when it is used: that takes seconds."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.monitor.metrics_file import Record

# MLflow's limits: characters of a parameter's value, parameters per request.
_MAX_VALUE = 6000
_MAX_PARAMETERS = 100


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
        """ID of an experiment, which is created if it is missing."""
        if experiment := self.client.get_experiment_by_name(name):
            return experiment.experiment_id
        return self.client.create_experiment(name, artifact_location=artifact_location)

    def find_run(self, experiment_id: str, tag: str, value: str) -> tuple[str, bool] | None:
        """Returns (ID, whether it has parameters) of the newest run with a tag; None if there is none."""
        order = ["attributes.start_time DESC"]
        found = self.client.search_runs([experiment_id], f"tags.{tag} = '{value}'", order_by=order, max_results=1)
        return (found[0].info.run_id, bool(found[0].data.params)) if found else None

    def create_run(self, experiment_id: str, name: str, tags: dict[str, str]) -> str:
        return self.client.create_run(experiment_id, run_name=name, tags=tags).info.run_id

    def create_copy(self, run_id: str) -> str:
        """Create an empty run with the experiment, name and tags of another."""
        run = self.client.get_run(run_id)
        tags = {name: text for name, text in run.data.tags.items() if name != "mlflow.runName"}
        return self.create_run(run.info.experiment_id, run.info.run_name, tags)

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
        from mlflow.entities import RunTag

        self.client.update_run(run_id, status="RUNNING")
        self.client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])

    def end_run(self, run_id: str, status: str) -> None:
        self.client.set_terminated(run_id, status)

    # ---------------------------------------------------------------- what a run holds
    def log_parameters(self, run_id: str, parameters: dict[str, Any]) -> None:
        """Log parameters; longer values are cut to MLflow's limit."""
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_MAX_VALUE]) for name, value in parameters.items()]
        for first in range(0, len(params), _MAX_PARAMETERS):
            self.client.log_batch(run_id, params=params[first : first + _MAX_PARAMETERS])

    def log_metrics(self, run_id: str, records: Iterable[Record]) -> None:
        from mlflow.entities import Metric

        points = [Metric(k, v, record.time, record.step) for record in records for k, v in record.metrics.items()]
        self.client.log_batch(run_id, metrics=points)

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
