"""Metrics of a run: a file that is always written, and MLflow, which may be away. The only file that imports mlflow.

`metrics.jsonl` in the run's folder is the record; a thread of its own follows it and sends what MLflow does not have yet.
So a step never waits for a server, nothing is lost while the server is away, and a restart goes on where the last left
off, in the same MLflow run.

Points are sent at once, so that a curve is live. When steps run again (after a kill, or when a run goes back behind a
spike of the loss), their first records are removed from the file and from MLflow: each step has one point, its last.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import posixpath
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import json_record
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.settings.run import TrackConfig

_METRICS, _CURSORS = "metrics.jsonl", "mlflow.json"
# Identifies the folder of a run, so that the MLflow run is found again when mlflow.json is damaged.
_FOLDER_TAG = "run_folder"

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
_METRIC_NAME = re.compile(r"[/\w.\- :]{1,250}")
# Steps and times above this are damage; MLflow stores 64 bits.
_MAX_WHOLE = 1 << 53


@dataclass(frozen=True)
class Record:
    """One line of metrics.jsonl. time: milliseconds since 1970. metrics: also nan and inf."""

    step: int
    time: int
    metrics: dict[str, float]

    def to_line(self) -> bytes:
        # JSON has no nan and no inf: they are written as text that float() reads.
        readable = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        return json.dumps({"step": self.step, "time": self.time, "metrics": readable}).encode() + b"\n"


@dataclass(frozen=True)
class _Line:
    step: int
    metrics: dict  # Checked by _number: there are millions of them.
    time: int = 0


@dataclass
class _Cursor:
    """How far the MLflow run of one tracking URI has come.

    back_to: points of later steps must be removed from it before more are sent; None when there are none.
    replaces: id of an MLflow run that this one replaces, and that must still be deleted.
    """

    run_id: str | None = None
    sent_bytes: int = 0
    has_parameters: bool = False
    back_to: int | None = None
    replaces: str | None = None


class Tracker:
    """Writes metrics to `<folder>/metrics.jsonl` and follows it into MLflow. For rank 0 only.

    start: the step that the run goes on from. Records of later steps are removed: these steps run again. None keeps all.
    notes: lines that say what was removed.
    """

    def __init__(
        self, config: TrackConfig, out: Path, folder: Path, name: str, parameters: dict[str, Any], tags: dict[str, str],
        start: int | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.parameters, self.start = folder, name, parameters, start
        self.path = folder / _METRICS
        self.experiment = config.experiment
        self.tags = {**tags, "git_revision": git_revision(), _FOLDER_TAG: _folder_id(folder)}
        self.uri = config.uri or default_uri(out)
        # A local store puts artifacts beside its database, not into whatever folder the command was started in.
        database = self.uri.removeprefix("sqlite:///")
        self.artifact_location = (
            (Path(database).resolve().parent / "mlartifacts").as_uri() if database != self.uri else None
        )
        # Held for the cursors and for what is read of the file, never while MLflow is asked.
        self._lock = threading.Lock()
        self._num_rewrites = 0
        self._has_history = self.path.exists() and self.path.stat().st_size > 0
        self._cursors, self._damage = _read_cursors(folder / _CURSORS)
        # Names of the metrics that the step which the run goes on from has already.
        self._logged: set[str] = set()
        self.notes = [] if start is None else self._forget_after(start)
        _end_last_line(self.path)
        self.file = open(self.path, "ab")  # noqa: SIM115  (finish() closes it)
        self._stop = threading.Event()
        self._warned = self._all_sent = False
        self._artifacts: list[Path] = []
        self._client: Any = None
        self._thread = threading.Thread(target=self._follow, name="mlflow", daemon=True) if config.enabled else None
        if self._thread:
            self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of a step. Never waits for MLflow."""
        if (
            step == self.start
        ):  # A kill between an evaluation's record and its scores.json has the evaluation done again.
            metrics = {name: value for name, value in metrics.items() if name not in self._logged}
        if metrics:
            self.file.write(Record(step, round(time.time() * 1000), metrics).to_line())
            self.file.flush()

    def go_back(self, step: int) -> list[str]:
        """The run goes on from an earlier step: remove the records of later ones. Returns lines that say what was removed."""
        self.file.close()
        self.start = step
        notes = self._forget_after(step)
        self.file = open(self.path, "ab")  # noqa: SIM115
        return notes

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
                _warn(f"MLflow at {self.uri} does not have all of {self.path}: the rest goes with the next start.")
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
        client, cursor = self._connect()
        with self._lock:
            back_to, rewrites = cursor.back_to, self._num_rewrites
        if back_to is not None:
            self._take_back(client, cursor, back_to)
        with self._lock:
            if cursor.back_to is not None:
                if rewrites != self._num_rewrites:
                    return  # The run has gone back again meanwhile: first that.
                cursor.back_to = None
                self._save_cursors()
            rewrites = self._num_rewrites
            lines = self._unsent(cursor)
        from mlflow.entities import Metric

        while lines:
            num_bytes = 0
            metrics: list[Any] = []
            while lines and len(metrics) < _BATCH:
                line = lines.popleft()
                num_bytes += len(line)
                if record := _parse(line):
                    metrics += [Metric(k, v, record.time, record.step) for k, v in record.metrics.items()]
                elif line.strip():
                    _warn(f"a line of metrics.jsonl was cut short and is left out: {line[:60]!r}")
            client.log_batch(cursor.run_id, metrics=metrics)
            with self._lock:
                if rewrites != self._num_rewrites:
                    return  # The run has gone back meanwhile, which has moved the cursor.
                cursor.sent_bytes += num_bytes
                self._save_cursors()

    def _unsent(self, cursor: _Cursor) -> deque[bytes]:
        """The whole lines behind the cursor; all lines when the cursor is not at the end of one."""
        with open(self.path, "rb") as file:
            if cursor.sent_bytes:
                file.seek(cursor.sent_bytes - 1)
                if file.read(1) != b"\n":  # Another file: the old one was removed.
                    cursor.sent_bytes = 0
            file.seek(cursor.sent_bytes)
            # A line without its end is still being written.
            return deque(line for line in file if line.endswith(b"\n"))

    def _connect(self) -> tuple[Any, _Cursor]:
        """The client, and the cursor of this run's MLflow run, made at the first start, found again at later ones."""
        if self._client is not None:
            return self._client, self._cursors[self.uri]
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        import logging

        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow.entities import Param, RunStatus, RunTag
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        with self._lock:
            cursor = self._cursors.setdefault(self.uri, _Cursor())
        if not cursor.run_id or not _exists(client, cursor.run_id):
            self._find_or_create(client, cursor)
        assert cursor.run_id is not None
        if not cursor.has_parameters:
            params = [Param(k, str(v)[:_MAX_PARAMETER]) for k, v in self.parameters.items()]
            for first in range(0, len(params), _MAX_PARAMETERS):
                client.log_batch(cursor.run_id, params=params[first : first + _MAX_PARAMETERS])
            self._change(cursor, has_parameters=True)
        if cursor.replaces:
            _delete(client, cursor.replaces)
            self._change(cursor, replaces=None)
        client.update_run(cursor.run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        client.log_batch(cursor.run_id, tags=[RunTag(k, v) for k, v in self.tags.items()])
        self._client = client
        return client, cursor

    def _find_or_create(self, client: Any, cursor: _Cursor) -> None:
        """Give the cursor the MLflow run that carries this folder's tag, or a new one."""
        experiment = client.get_experiment_by_name(self.experiment)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(self.experiment, artifact_location=self.artifact_location)
        )
        damage = f"{self.folder / _CURSORS}, which names the MLflow run, was {self._damage}" if self._damage else ""
        # A fresh folder may have the path and the inode of one that was removed.
        tag = f"tags.{_FOLDER_TAG} = '{self.tags[_FOLDER_TAG]}'"
        found = client.search_runs([experiment_id], tag, order_by=["attributes.start_time DESC"], max_results=1)
        if found and self._has_history:
            (run,) = found
            # How much of the file it has is not known: MLflow's database keeps equal points once.
            self._change(
                cursor, run_id=run.info.run_id, sent_bytes=0, has_parameters=bool(run.data.params), back_to=self.start
            )
            if damage:
                _warn(f"{damage}: going on in run {cursor.run_id}, which carries this folder's tag.")
        else:
            run = client.create_run(experiment_id, run_name=self.name, tags=self.tags)
            self._change(cursor, run_id=run.info.run_id, sent_bytes=0, has_parameters=False, back_to=None)
            if damage:
                _warn(
                    f"{damage}: no run at {self.uri} carries this folder's tag, so all goes into a new one, {cursor.run_id}."
                )
        self._damage = ""

    # ---------------------------------------------------------------- steps that run again
    def _forget_after(self, last_step: int) -> list[str]:
        """Remove records of steps after `last_step`, damaged lines, and repeats (the last one stays) from metrics.jsonl.

        What MLflow may have of them is taken back later, by the thread. Returns lines that say what was removed.
        """
        lines = _read_lines(self.path)
        kept, steps, removed, num_damaged = list[bytes](), list[int](), list[int](), 0
        seen: dict[int, set[str]] = {}
        for line in reversed(lines):
            record = _parse(line)
            if record is None:
                num_damaged += bool(line.strip())
                continue
            known = seen.setdefault(record.step, set())
            if record.step > last_step or not record.metrics.keys() - known:
                removed.append(record.step)
                continue
            if known & record.metrics.keys():
                removed.append(record.step)
                record = dataclasses.replace(
                    record, metrics={name: value for name, value in record.metrics.items() if name not in known}
                )
                line = record.to_line()
            known.update(record.metrics)
            kept.append(line if line.endswith(b"\n") else line + b"\n")
            steps.append(record.step)
        kept.reverse()
        steps.reverse()
        self._logged = seen.get(last_step, set())
        if kept == lines and (lines or not self._cursors):
            return []
        num_same = next((i for i, (old, new) in enumerate(zip(lines, kept, strict=False)) if old != new), len(kept))
        back_to = min(last_step, *(step - 1 for step in removed)) if removed else last_step
        in_order = all(step <= back_to for step in steps[:num_same])
        with self._lock:
            self._num_rewrites += 1
            for cursor in self._cursors.values():
                cursor.sent_bytes = min(cursor.sent_bytes, sum(map(len, kept[:num_same]))) if in_order else 0
                if removed or not lines:
                    cursor.back_to = back_to if cursor.back_to is None else min(cursor.back_to, back_to)
            # The cursors first: a kill before the file is written finds the same lines to remove at the next start.
            if self._cursors:
                self._save_cursors()
            if kept != lines:
                write_text(self.path, b"".join(kept).decode())
        num_later, num_repeats = sum(step > last_step for step in removed), sum(step <= last_step for step in removed)
        told = {
            f"records after step {last_step:,}, from where the run goes on": num_later,
            "records of steps that were recorded again": num_repeats,
            "damaged lines": num_damaged,
        }
        return [f"{self.path}: removed {count:,} {what}" for what, count in told.items() if count]

    def _take_back(self, client: Any, cursor: _Cursor, step: int) -> None:
        """Remove the MLflow run's points of later steps: from a database, or by a new MLflow run on a server."""
        assert cursor.run_id is not None
        if _delete_points(client, cursor.run_id, step) or not _has_later(client, cursor.run_id, step):
            return
        old = client.get_run(cursor.run_id)
        tags = {name: text for name, text in old.data.tags.items() if name != "mlflow.runName"}
        new = client.create_run(old.info.experiment_id, run_name=old.info.run_name, tags=tags).info.run_id
        _warn(
            f"MLflow at {self.uri} has points of steps after {step:,}, which run again, and a server cannot delete points: run "
            f"{new} replaces {old.info.run_id}, which is deleted (`mlflow gc` removes it for good)."
        )
        self._change(cursor, run_id=new, sent_bytes=0, has_parameters=False, replaces=old.info.run_id)
        self._client = None  # To be told its parameters, and to delete the old one.
        self._connect()

    def _close(self) -> None:
        run_id = self._cursors[self.uri].run_id
        for path in self._artifacts:
            if not path.exists():  # A run that failed early has no scores.
                continue
            try:
                self._client.log_artifact(run_id, str(path))
            except Exception as error:
                _warn(f"MLflow at {self.uri} does not take {path} ({_one_line(error)}).")
        self._client.set_terminated(run_id, self._status)

    def _change(self, cursor: _Cursor, **fields: Any) -> None:
        with self._lock:
            for name, value in fields.items():
                setattr(cursor, name, value)
            self._save_cursors()

    def _save_cursors(self) -> None:
        """Each tracking URI that was ever used has its own; the one in use is the last. The lock is held."""
        if self.uri in self._cursors:
            self._cursors[self.uri] = self._cursors.pop(self.uri)
        content = {uri: asdict(cursor) for uri, cursor in self._cursors.items()}
        write_text(self.folder / _CURSORS, json.dumps(content, indent=1))


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


def read_metrics(path: Path) -> tuple[list[Record], int]:
    """(the records of a metrics.jsonl, how many of its lines are damaged). Raises FileNotFoundError, and UserError."""
    if not path.exists():
        raise FileNotFoundError(path)
    if not path.is_file():
        raise UserError(f"{path} is not a regular file.")
    lines = [line for line in _read_lines(path) if line.strip()]
    records = [record for line in lines if (record := _parse(line))]
    return records, len(lines) - len(records)


def by_name(records: Iterable[Record]) -> dict[str, dict[int, float]]:
    """Metric -> step -> value. A step that was recorded again counts as it was recorded last."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            found.setdefault(name, {})[record.step] = value
    return found


def _read_lines(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.readlines()
    except FileNotFoundError:
        return []
    except IsADirectoryError:
        raise UserError(f"{path} is a folder. Remove it, or start another run with name=...") from None


def _parse(line: bytes) -> Record | None:
    """One line of metrics.jsonl; None when it is damaged, as by a kill that cut it short."""
    try:
        found = json_record.parse(line.decode(), _Line, _METRICS)
        metrics = {name: _number(value) for name, value in found.metrics.items()}
    except (ValueError, OverflowError):
        return None
    in_range = 0 <= found.step < _MAX_WHOLE and 0 <= found.time < _MAX_WHOLE
    return Record(found.step, found.time, metrics) if in_range and all(map(_is_metric_name, metrics)) else None


def _number(value: Any) -> float:
    """A value as `Record.to_line` writes it. Raises ValueError."""
    if type(value) is float or type(value) is int or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError


@functools.cache
def _is_metric_name(name: str) -> bool:
    """Whether MLflow takes a name; it would refuse the whole batch."""
    return bool(_METRIC_NAME.fullmatch(name)) and posixpath.normpath(name) == name and not name.startswith((".", "/"))


def _end_last_line(path: Path) -> None:
    """A kill in the middle of a line must not spoil the next life's first one."""
    lines = _read_lines(path)
    if lines and not lines[-1].endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")


def _read_cursors(path: Path) -> tuple[dict[str, _Cursor], str]:
    """(tracking URI -> cursor, what is wrong with the file); none of either when there is no file."""
    try:
        cursors = json_record.read(path, dict[str, _Cursor])
        for cursor in cursors.values():
            if not (0 <= cursor.sent_bytes < _MAX_WHOLE and -1 <= (cursor.back_to or 0) < _MAX_WHOLE):
                raise UserError(f"{path}: sent_bytes or back_to is out of range.")
        return cursors, ""
    except FileNotFoundError:
        return {}, ""
    except UserError as error:
        reason = str(error).removeprefix(str(path)).strip(" :.").removesuffix(": the file is damaged")
        return {}, f"damaged ({reason})"


def _folder_id(folder: Path) -> str:
    """The same on every host that shares the folder; another one for a folder of the same path on another disk."""
    return hashlib.sha256(f"{folder.resolve()} {folder.stat().st_ino}".encode()).hexdigest()[:32]


def run_id_of(folder: Path) -> str | None:
    """MLflow's id of the run of a folder, in the store that it was sent to last; None when it was sent nowhere."""
    try:
        cursors, _ = _read_cursors(folder / _CURSORS)
    except OSError:
        return None
    return next((cursor.run_id for cursor in reversed(cursors.values()) if cursor.run_id), None)


def default_uri(out: Path) -> str:
    """The tracking store of all runs below `out`, when no server is given."""
    return f"sqlite:///{(out / 'mlflow.db').resolve()}"


def git_revision() -> str:
    """Commit of the working tree, with '+changes' when it differs, or 'unknown' outside of git."""
    root = Path(__file__).resolve().parents[2]
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
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return False
        raise


def _delete(client: Any, run_id: str) -> None:
    """Delete a run that was replaced, as by the button of MLflow's page; it can be restored until `mlflow gc`."""
    if _exists(client, run_id):
        client.delete_run(run_id)


def _has_later(client: Any, run_id: str, step: int) -> bool:
    """Whether a run has points of steps after `step`."""
    names = client.get_run(run_id).data.metrics
    return any(point.step > step for name in names for point in client.get_metric_history(run_id, name))


def _delete_points(client: Any, run_id: str, step: int) -> bool:
    """Delete a run's points of steps after `step`; False when the store is no database that this process opens itself.

    MLflow's API cannot delete points, so this uses the tables of the release that pyproject.toml names. Without it, runs
    in a database would be replaced as those on a server are: their id would change with every kill.
    """
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = client._tracking_client.store
    if not isinstance(store, SqlAlchemyStore):
        return False
    with store.ManagedSessionMaker(read_only=False) as session:
        later = session.query(SqlLatestMetric).filter(SqlLatestMetric.run_uuid == run_id, SqlLatestMetric.step > step)
        names = [row.key for row in later]
        later.delete(synchronize_session=False)
        points = session.query(SqlMetric).filter(SqlMetric.run_uuid == run_id)
        points.filter(SqlMetric.step > step).delete(synchronize_session=False)
        for name in names:  # What stays has a last point, too.
            newest = (SqlMetric.step.desc(), SqlMetric.timestamp.desc(), SqlMetric.value.desc())
            if last := points.filter(SqlMetric.key == name).order_by(*newest).first():
                fields = ("run_uuid", "key", "value", "timestamp", "step", "is_nan")
                session.add(SqlLatestMetric(**{field: getattr(last, field) for field in fields}))
    return True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
