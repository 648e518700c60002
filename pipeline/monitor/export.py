"""Exports a run folder to a tracker: a background thread follows the folder and appends what the tracker lacks.

The folder is the truth. A tracker is a copy to look at: an exporter appends to it by its public interface, and reads
nothing back into the run. How much it has received is in a small file of the folder, so that nothing is sent twice: a
resumed run repeats the numbers of the steps that run again, and those that were sent are skipped. After a rollback the
numbers differ, and the new points follow.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.base.words import on_one_line
from pipeline.monitor.metrics_file import METRICS_FILE, Record, parse_line
from pipeline.monitor.page_folder import End, PageFolder
from pipeline.monitor.run_page import RunFacts
from pipeline.process.committed import run_of_checkpoint
from pipeline.process.start import silence_broken_output
from pipeline.process.waits import waiting

# Step -> metric -> (value, milliseconds since 1970), of evaluations and probes.
Scores = dict[int, dict[str, tuple[float, int]]]
# Of MLflow: which of its runs belongs to a run folder.
_MLFLOW_STATE = "mlflow.json"
_METRICS_PER_REQUEST = 500
# Seconds between looks at files and checkpoints, unless there are new scores.
_LOOK_SECONDS = 60.0


@dataclass(frozen=True)
class SentModel:
    """A checkpoint that MLflow shows as a logged model. num_scores: sent for it."""

    model_id: str
    roles: tuple[str, ...]
    num_scores: int = 0


@dataclass
class Sent:
    """The parts of a run folder that one tracker has received.

    key: of the run there, by which it is found if a kill came before its run_id was written. is_described: it has
    parameters and data sets. last: metric -> step of its last point (its time, for a run without steps, which logs all
    at step 0). rollbacks: steps that the run went back to: points of later steps were sent twice. files: name -> size
    and time. models: SHA-256 -> logged model. The mappings are replaced, never changed: another thread may be writing
    the state.
    """

    key: str = ""
    run_id: str = ""
    is_described: bool = False
    last: dict[str, int] = field(default_factory=dict)
    rollbacks: tuple[int, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    models: dict[str, SentModel] = field(default_factory=dict)


class Exporter:
    """A tracker that receives one run. All methods may raise whatever its client raises, and are called by one thread.

    name: of the file that says what it received. destination: where it is, without passwords; one folder may go to
    several. title: in messages. sent: what it has received; update: sets fields of it and saves it.
    """

    name: str
    destination: str
    title: str
    sent: Sent
    update: Callable[..., None]

    def connect(self) -> None:
        """Continue the run that `sent` names, or create one; also after an error."""

    def log(self, records: Sequence[Record]) -> None:
        """Append points."""

    def upload(self, path: Path, name: str) -> None:
        """Append or replace a file. name: relative to the run folder."""

    def finish(self, end: End) -> None:
        """Say how the run ended."""

    def show_models(self, scores: Scores, ended: bool) -> None:
        """Show the run's checkpoints."""

    def explain(self, error: Exception) -> str:
        """Describes an error, such as "cannot be reached (connection refused)"."""
        return on_one_line(error)


@dataclass(frozen=True)
class ExportTiming:
    """Waits of the thread, and how long the end of a run waits for it at most, in seconds."""

    poll: float = 30.0
    retry: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    finish: float = 30.0
    finish_in_a_hurry: float = 5.0


class FolderExport:
    """Follows one run folder for one exporter.

    The lock protects the state and the content of metrics.jsonl. It is never held during a request, so training does
    not wait for one.
    """

    def __init__(self, folder: Path, exporter: Exporter, facts: RunFacts, timing: ExportTiming) -> None:
        self.exporter, self.facts, self.timing = exporter, facts, timing
        self.page, self.path = PageFolder(folder), folder / METRICS_FILE
        self.state_path = folder / f"{exporter.name}.json"
        try:
            self._states = read_states(self.state_path)
        except UserError as error:
            warn(f"{error} Everything is sent again, as a new run.")
            self._states = {}
        self.sent = exporter.sent = self._states.pop(exporter.destination, Sent())
        self._states[exporter.destination] = self.sent  # The one in use is the last.
        exporter.update = self._update
        self._lock = threading.RLock()
        self._num_rewrites = self._offset = 0
        self._scores: Scores = {}
        self._warned = set[Path]()
        self._next_look = 0.0
        self._is_connected = self._is_complete = self._has_new_scores = False
        self._end: End | None = None
        self._give_up = 0.0  # When the end of the run stops waiting.
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name=exporter.name, daemon=True)

    @property
    def run_id(self) -> str:
        """ID of the run in the tracker; "" until it answered in this process."""
        return self.sent.run_id if self._is_connected else ""

    # ---------------------------------------------------------------- called by the training thread
    @contextlib.contextmanager
    def rewriting(self, back_to: int | None) -> Iterator[None]:
        """The block replaces metrics.jsonl. back_to: points of later steps follow with other values; None if they
        repeat.
        """
        with self._lock:
            if back_to is not None and any(step > back_to for step in self.sent.last.values()):
                last = {name: min(step, back_to) for name, step in self.sent.last.items()}
                self._update(last=last, rollbacks=(*self.sent.rollbacks, back_to))
            yield
            self._num_rewrites += 1
            self._offset, self._scores = 0, {}

    def end(self, end: End, in_a_hurry: bool) -> None:
        """Send the rest and say how the run ended, all within the time limit."""
        seconds = self.timing.finish_in_a_hurry if in_a_hurry else self.timing.finish
        self._end, self._give_up = end, time.monotonic() + seconds
        self._stop.set()
        with waiting(f"{self.exporter.title} to receive the rest of the run", seconds):
            self.thread.join(seconds)
        if not self._is_complete:
            warn(
                f"{self.exporter.title} has not received all of {self.path.parent}: the next start sends the rest, and"
                " so does launch/track_sync.py."
            )

    def send_all(self, end: End) -> None:
        """Send all of a run that has ended, in this thread. Raises what the tracker's client raises."""
        self._send(end)
        if not self._is_complete:
            raise UserError("some files could not be sent, see above")

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        num_failures, has_answered, has_warned = 0, False, False
        while True:
            stopping = self._stop.is_set()
            try:
                self._send(self._end if stopping else None)
                if stopping:
                    return
                num_failures, has_answered, has_warned = 0, True, False
                self._stop.wait(self.timing.poll)
            except Exception as error:  # Whatever the tracker raises, training continues.
                was_connected, self._is_connected = self._is_connected, False
                has_answered |= was_connected
                num_failures += 1
                if num_failures == 1 and was_connected:
                    continue  # Connecting again makes a new run if it was deleted, or reports the error.
                if not has_warned:
                    has_warned = True
                    warn(f"{self.what_failed(error)}: training continues, metrics are kept in {METRICS_FILE}.")
                wait = self.timing.retry[min(num_failures, len(self.timing.retry)) - 1]
                if not stopping:
                    self._stop.wait(wait)
                elif (
                    not has_answered or num_failures > len(self.timing.retry) or time.monotonic() + wait > self._give_up
                ):
                    return  # One that has been away is not waited for.
                else:
                    time.sleep(wait)

    def what_failed(self, error: Exception) -> str:
        return f"{self.exporter.title} {error if isinstance(error, UserError) else self.exporter.explain(error)}"

    def _send(self, end: End | None) -> None:
        if not self._is_connected:
            self.exporter.connect()
            self._is_connected = True
            self._offset, self._scores = 0, {}  # What was read may not have arrived, and a new run gets everything.
        self._is_complete = False
        self._send_points()
        if end:  # First: little time may be left.
            self.exporter.finish(end)
        if end or self._has_new_scores or time.monotonic() >= self._next_look:
            self._is_complete = self._send_files(final=end is not None)
            self.exporter.show_models(self._scores, end is not None)
            self._has_new_scores, self._next_look = False, time.monotonic() + _LOOK_SECONDS

    def _send_points(self) -> None:
        while True:
            records, num_rewrites = self._next_records()
            if not records:
                return
            self.exporter.log(records)
            with self._lock:
                if num_rewrites == self._num_rewrites:  # Else the run has gone back meanwhile.
                    self._update(last=self.sent.last | {name: self._at(r) for r in records for name in r.metrics})

    def _next_records(self) -> tuple[list[Record], int]:
        """The next records of the file that were not sent, enough for a request; and the number of rewrites of the
        file.
        """
        records, num_metrics = list[Record](), 0
        with self._lock:
            if not self.path.exists():
                return [], self._num_rewrites
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n") or num_metrics >= _METRICS_PER_REQUEST:
                        break  # A line without its end is still being written.
                    self._offset += len(line)
                    if (record := parse_line(line)) is None:
                        warn(f"skipped a damaged line of {METRICS_FILE}, perhaps cut short by a kill: {line[:60]!r}")
                        continue
                    for name, value in record.metrics.items():
                        if self.facts.metric(name).group in ("eval", "probe"):
                            self._has_new_scores = True
                            self._scores.setdefault(record.step, {})[name] = value, record.time
                    at, last = self._at(record), self.sent.last
                    new = {name: value for name, value in record.metrics.items() if at > last.get(name, -1)}
                    if new:
                        records.append(replace(record, metrics=new))
                        num_metrics += len(new)
            return records, self._num_rewrites

    def _at(self, record: Record) -> int:
        return record.step if self.facts.steps else record.time

    def _send_files(self, final: bool) -> bool:
        """Send files that are new or have changed. Returns whether all were sent."""
        complete = True
        metrics = (METRICS_FILE,) if final else ()  # It grows all the time.
        for path, name in self.page.artifacts((*self.facts.artifacts, *metrics)):
            try:
                found = path.stat()
                version = f"{found.st_size} bytes, {found.st_mtime_ns} ns"
                if version == self.sent.files.get(name):
                    continue
                self.exporter.upload(path, name)
            except FileNotFoundError:  # It was just removed.
                continue
            except OSError as error:
                if error.errno is None:  # A failed request: the tracker is unreachable.
                    raise
                if path not in self._warned:
                    self._warned.add(path)
                    warn(f"{path} cannot be sent to {self.exporter.title} ({error}); it is tried again.")
                complete = False
                continue
            self._update(files={**self.sent.files, name: version})
        return complete

    def _update(self, **fields: object) -> None:
        with self._lock:
            for name, value in fields.items():
                setattr(self.sent, name, value)
            write_text(self.state_path, json.dumps({uri: asdict(sent) for uri, sent in self._states.items()}, indent=1))


def read_states(path: Path) -> dict[str, Sent]:
    """Returns destination -> state, the one used last is the last; empty without a file. Raises UserError for a
    damaged one.
    """
    try:
        return json_record.read(path, dict[str, Sent])
    except FileNotFoundError:
        return {}


def last_uri(folder: Path) -> str:
    """The tracking URI that a folder was sent to last, or tried, without its password; "" if there is none."""
    return next(reversed(read_states(folder / _MLFLOW_STATE)), "")


def tracked_folder_of(weights: str) -> Path | None:
    """The folder of the tracked run that made weights: that they lie in, or that keeps its checkpoints elsewhere
    (checkpoint.folder); None for other weights, and for a run that was not tracked.
    """
    path = Path(weights).absolute()
    keeper = run_of_checkpoint(path)
    return next((folder for folder in (*filter(None, [keeper]), path, *path.parents[:3]) if run_id_of(folder)), None)


def run_of_weights(weights: str) -> str | None:
    """ID of the MLflow run that made weights; None as above."""
    folder = tracked_folder_of(weights)
    return run_id_of(folder) if folder else None


def run_id_of(folder: Path) -> str | None:
    """ID of a folder's MLflow run at the tracking URI that was used last; None if it was never sent."""
    with contextlib.suppress(OSError, UserError):
        return next(
            (sent.run_id for sent in reversed(read_states(folder / _MLFLOW_STATE).values()) if sent.run_id), None
        )
    return None


def warn(line: str) -> None:
    try:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # The terminal was closed: sending continues.
        silence_broken_output()
