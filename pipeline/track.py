"""Metrics of a run: a file that is always written, and MLflow, which may be away. The only file that imports mlflow.

`metrics.jsonl` in the run's folder is the record; a thread of its own follows it and sends what MLflow does not have yet.
So a step never waits for a server, nothing is lost while the server is away, and a restart goes on where the last left
off, in the same MLflow run.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from pipeline.config import TrackConfig
from pipeline.run_folder import write_atomically

_BATCH = 500
_RETRY_SECONDS = (1, 2, 5, 10, 30)
_POLL_SECONDS = 1.0
# How long the end of a run may wait for a slow or absent server; what is unsent goes with the next start.
_FINISH_SECONDS = 30.0
# As long as that at most when the machine is about to be taken away.
_HURRIED_FINISH_SECONDS = 5.0
# MLflow's limits: on the length of a parameter's value, on the parameters of one call.
_MAX_PARAMETER = 6000
_MAX_PARAMETERS = 100


class Tracker:
    """Writes metrics to `<folder>/metrics.jsonl` and follows it into MLflow. For rank 0 only."""

    def __init__(
        self, config: TrackConfig, out: Path, folder: Path, name: str, parameters: dict[str, Any], tags: dict[str, str]
    ) -> None:
        self.folder, self.name, self.parameters = folder, name, parameters
        self.experiment = config.experiment
        self.tags = {**tags, "git_revision": git_revision()}
        self.uri = config.uri or default_uri(out)
        # A local store puts artifacts beside its database, not into whatever folder the command was started in.
        database = self.uri.removeprefix("sqlite:///")
        self.artifact_location = (
            (Path(database).resolve().parent / "mlartifacts").as_uri() if database != self.uri else None
        )
        folder.mkdir(parents=True, exist_ok=True)
        _end_last_line(folder / "metrics.jsonl")
        self.file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115  (finish() closes it)
        self._stop = threading.Event()
        self._warned = self._all_sent = False
        self._artifacts: list[Path] = []
        self._client: Any = None
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True) if config.enabled else None
        if self._thread:
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step. Never waits for MLflow."""
        # JSON has no nan and no inf: they are written as text that float() reads.
        readable = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        record = {"step": step, "time": round(time.time() * 1000), "metrics": readable}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def artifact(self, path: Path) -> None:
        """Send a file to the MLflow run when the run finishes."""
        self._artifacts.append(path)

    def finish(self, status: str, in_a_hurry: bool = False) -> None:
        """Send what is left, and close the run with FINISHED, FAILED or KILLED. Waits 30 s at most, 5 s in a hurry."""
        self._status = status
        self._stop.set()
        if self._thread:
            self._thread.join(_HURRIED_FINISH_SECONDS if in_a_hurry else _FINISH_SECONDS)
            if not self._all_sent:
                record = self.folder / "metrics.jsonl"
                _warn(f"MLflow at {self.uri} does not have all of {record}: the rest goes with the next start.")
        self.file.close()

    def _follow(self) -> None:
        attempt = 0
        while True:
            stopping = self._stop.is_set()
            try:
                self._send()
                attempt, self._warned = 0, False
                if stopping:
                    self._all_sent = True
                    self._close()
                    return
                self._stop.wait(_POLL_SECONDS)
            except Exception as error:
                # Whatever the server or its client does, training goes on; the file keeps the metrics.
                if not self._warned:
                    reason = f"MLflow at {self.uri} cannot be reached ({_one_line(error)})"
                    _warn(f"{reason}: going on, metrics are kept in metrics.jsonl.")
                    self._warned = True
                if stopping:
                    return
                self._stop.wait(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)])
                attempt += 1

    def _send(self) -> None:
        """Everything in metrics.jsonl behind the cursor, in batches; the cursor moves after each."""
        cursor = self._cursor()
        client, run_id = self._run(cursor)
        path = self.folder / "metrics.jsonl"
        if path.stat().st_size < cursor["sent_bytes"]:
            cursor["sent_bytes"] = 0  # Another file: the old one was removed.
        with open(path, "rb") as file:
            file.seek(cursor["sent_bytes"])
            # A line without its end is still being written.
            lines = deque(line for line in file if line.endswith(b"\n"))
        from mlflow.entities import Metric

        while lines:
            num_bytes = 0
            metrics: list[Any] = []
            while lines and len(metrics) < _BATCH:
                line = lines.popleft()
                num_bytes += len(line)
                record = _record(line)
                metrics += [Metric(k, float(v), record["time"], record["step"]) for k, v in record["metrics"].items()]
            client.log_batch(run_id, metrics=metrics)
            cursor["sent_bytes"] += num_bytes
            self._save_cursor(cursor)

    def _run(self, cursor: dict[str, Any]) -> tuple[Any, str]:
        """The client and the id of this run's MLflow run, made at the first start, found again at later ones."""
        if self._client is not None:
            return self._client, cursor["run_id"]
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import logging

        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow.entities import Param, RunStatus, RunTag
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        if not cursor["run_id"] or not _exists(client, cursor["run_id"]):
            experiment = client.get_experiment_by_name(self.experiment)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else client.create_experiment(self.experiment, artifact_location=self.artifact_location)
            )
            run_id = client.create_run(experiment_id, run_name=self.name).info.run_id
            cursor.update(run_id=run_id, sent_bytes=0, has_parameters=False)
            self._save_cursor(cursor)
        if not cursor["has_parameters"]:
            params = [Param(k, str(v)[:_MAX_PARAMETER]) for k, v in self.parameters.items()]
            for first in range(0, len(params), _MAX_PARAMETERS):
                client.log_batch(cursor["run_id"], params=params[first : first + _MAX_PARAMETERS])
            cursor["has_parameters"] = True
            self._save_cursor(cursor)
        client.update_run(cursor["run_id"], status=RunStatus.to_string(RunStatus.RUNNING))
        client.log_batch(cursor["run_id"], tags=[RunTag(k, v) for k, v in self.tags.items()])
        self._client = client
        return client, cursor["run_id"]

    def _close(self) -> None:
        run_id = self._cursor()["run_id"]
        for path in self._artifacts:
            if not path.exists():  # A run that failed early has no scores.
                continue
            try:
                self._client.log_artifact(run_id, str(path))
            except Exception as error:
                _warn(f"MLflow at {self.uri} does not take {path} ({_one_line(error)}).")
        self._client.set_terminated(run_id, self._status)

    def _cursor(self) -> dict[str, Any]:
        """How far the MLflow run of this tracking URI has come; each URI that was ever used has its own."""
        return self._cursors().get(self.uri, {"run_id": None, "sent_bytes": 0, "has_parameters": False})

    def _save_cursor(self, cursor: dict[str, Any]) -> None:
        write_atomically(self.folder / "mlflow.json", json.dumps({**self._cursors(), self.uri: cursor}, indent=1))

    def _cursors(self) -> dict[str, dict[str, Any]]:
        path = self.folder / "mlflow.json"
        return json.loads(path.read_text()) if path.exists() else {}


def send_report(
    uri: str,
    folder: Path,
    name: str,
    metrics: dict[str, float],
    files: list[Path],
    tags: dict[str, str],
    experiment: str = "data",
) -> None:
    """Send the numbers and files of a report as an MLflow run of an experiment; made again, it is the same run."""
    tracker = Tracker(TrackConfig(uri=uri, experiment=experiment), folder, folder, name, {}, tags)
    tracker.log(0, metrics)
    for path in files:
        tracker.artifact(path)
    tracker.finish("FINISHED")


def _end_last_line(path: Path) -> None:
    """A kill in the middle of a line must not spoil the next life's first one."""
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        with open(path, "a") as file:
            file.write("\n")


def _record(line: bytes) -> dict[str, Any]:
    """One line of metrics.jsonl; no metrics when a kill cut it short."""
    try:
        return json.loads(line)
    except ValueError:
        _warn(f"a line of metrics.jsonl was cut short and is left out: {line[:60]!r}")
        return {"step": 0, "time": 0, "metrics": {}}


def run_id_of(folder: Path) -> str | None:
    """MLflow's id of the run of a folder, in the store that it was sent to last; None when it was sent nowhere."""
    try:
        cursors = json.loads((folder / "mlflow.json").read_text())
    except (OSError, ValueError):
        return None
    return next((cursor["run_id"] for cursor in reversed(cursors.values()) if cursor["run_id"]), None)


def default_uri(out: Path) -> str:
    """The tracking store of all runs below `out`, when no server is given."""
    return f"sqlite:///{(out / 'mlflow.db').resolve()}"


def git_revision() -> str:
    """Commit of the working tree, with '+changes' when it differs, or 'unknown' outside of git."""
    root = Path(__file__).resolve().parents[1]
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return revision + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        # One that was deleted by hand takes no more metrics.
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
