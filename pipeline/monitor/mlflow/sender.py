"""Sends metrics.jsonl to an MLflow run from a background thread, and retries while the server is unreachable."""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import remove_unfinished, write_text
from pipeline.base.locks import FileLock
from pipeline.base.words import counted
from pipeline.monitor.metrics_file import METRICS_FILE, Record, Repair, parse_line
from pipeline.monitor.mlflow.mirror import FindModels, RunMirror
from pipeline.monitor.mlflow.models import ModelStore
from pipeline.monitor.mlflow.refusals import Refusals, one_line, warn, what_failed
from pipeline.monitor.mlflow.state import (
    FOLDER_TAG,
    STATE_FILE,
    SyncState,
    folder_id,
    original_of,
    read_states,
    write_states,
)
from pipeline.monitor.page_folder import End, PageFolder, describe
from pipeline.monitor.run_page import NOTE, SCORE, RunFacts, hide_passwords
from pipeline.process.waits import waiting
from pipeline.settings.run import TrackConfig

# Locked by the process that sends a folder. It stays.
LOCK_FILE = "mlflow.lock"
_METRICS_PER_REQUEST = 500
# Bytes in which the last record that was sent is looked for.
_LAST_RECORDS = 1 << 16


@dataclass(frozen=True)
class SenderTimeouts:
    """Waits of the thread, and how long the end of a run waits for it at most, in seconds.

    poll: a request to a database takes 9 ms of processor time, and each record in it 3 ms, so many records share one.
    """

    poll: float = 30.0
    retry: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    finish: float = 30.0
    finish_in_a_hurry: float = 5.0


class FolderInUseError(UserError):
    """Another process sends the folder at this moment."""


class MlflowSender:
    """Sends the metrics of one run folder to one tracking URI.

    The thread reads metrics.jsonl from the byte that mlflow.json names. The lock protects the states and the content of the file;
    it is never held during a request, so `rewrite` does not wait for MLflow. Another lock, on a file, keeps processes from sending one
    folder at the same time, which would make two MLflow runs.
    artifacts: URI of those of an experiment that is created here; None leaves the choice to the server. start: step that the run
    continues from; None for a file without repeated steps.
    """

    def __init__(
        self, folder: Path, uri: str, artifacts: str | None, config: TrackConfig, facts: RunFacts, start: int | None,
        timing: SenderTimeouts, find_models: FindModels,
    ) -> None:  # fmt: skip
        self.experiment, self.artifacts = config.experiment, artifacts
        self.page = PageFolder(folder)
        self.tags = {**facts.all_tags(), FOLDER_TAG: folder_id(folder)}
        self._started = round(time.time() * 1000)  # MLflow's import and a fresh store take seconds.
        self.path, self.state_path = folder / METRICS_FILE, folder / STATE_FILE
        self.uri, self.shown_uri, self.facts, self.start, self.timing = uri, hide_passwords(uri), facts, start, timing
        self._lock = threading.Lock()
        self._states, self._damage = read_states(self.state_path)
        self._num_rewrites = 0
        self._had_metrics = self.path.exists() and self.path.stat().st_size > 0
        self._mirror = RunMirror(folder, facts, find_models, config, self._update, warn)
        self._end: End | None = None
        self._links: dict[str, str] = {}  # ID of a parent, as descriptions have it -> a link to its page.
        self._all_sent = False
        self._give_up = 0.0  # When the end of the run stops waiting.
        self._stop = threading.Event()
        self._store: ModelStore | None = None
        self._folder_lock: FileLock | None = None  # Held from connecting to the end.
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    # ---------------------------------------------------------------- called by the training thread
    def begin(self) -> None:
        self._thread.start()

    def rewrite(self, repair: Repair, start: int) -> None:
        """Replace metrics.jsonl. The thread later deletes the MLflow points of the removed records."""
        self.start = start
        if not repair.changed and (repair.lines or not self._states):
            return
        with self._lock:
            self._num_rewrites += 1
            for state in self._states.values():
                state.sent_bytes = min(state.sent_bytes, repair.unchanged_bytes)
                if repair.back_to is not None:
                    state.back_to = min(repair.back_to, repair.back_to if state.back_to is None else state.back_to)
            # The states first: after a kill in between, the next start finds the same lines to remove.
            if self._states:
                self._save()
            if repair.changed:
                write_text(self.path, b"".join(repair.lines).decode())

    def end(self, end: End, in_a_hurry: bool) -> None:
        """Send the rest, and end the MLflow run, all within the time limit."""
        seconds = self.timing.finish_in_a_hurry if in_a_hurry else self.timing.finish
        self._end, self._give_up = end, time.monotonic() + seconds
        self._stop.set()
        with waiting(f"MLflow at {self.shown_uri} to receive the rest of the run", seconds):
            self._thread.join(seconds)
        if not self._all_sent:
            warn(
                f"MLflow at {self.shown_uri} has not received all of {self.path.parent}: the next start sends the rest, and so "
                "does launch/track_sync.py."
            )

    def send_all(self, end: End) -> None:
        """Send everything that MLflow lacks of a run that has ended, in this thread.

        Raises what MLflow raises, and FolderInUseError while another process sends this folder.
        """
        self._end = end
        try:
            self._connect(starts=False)
            if not self._close(*self._send()):
                raise UserError("some files could not be sent, see above")
        finally:
            self._unlock_folder()

    @property
    def refusals(self) -> Refusals:
        """What the store refused since this sender began."""
        return self._mirror.refusals

    @property
    def run_id(self) -> str:
        """ID of the MLflow run, once it is connected."""
        run_id = self._states[self.shown_uri].run_id
        assert run_id is not None
        return run_id

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        try:
            self._send_until_the_end()
        finally:
            self._unlock_folder()

    def _send_until_the_end(self) -> None:
        num_failures = 0
        while True:
            stopping = self._stop.is_set()
            try:
                store, state = self._send()
                if stopping:
                    self._all_sent = self._close(store, state)
                    return
                self._mirror.look(store, state)
                num_failures = 0
                self._stop.wait(self.timing.poll)
            except Exception as error:
                # Whatever the server or its client raises, training continues; the file keeps the metrics.
                if self._is_deleted(error):
                    self._store = None  # Connecting again creates a run.
                    continue
                if not num_failures:
                    is_own = isinstance(error, UserError) or getattr(error, "filename", None) is not None
                    if is_own and self._store is not None:
                        trouble = f"lacks what cannot be read here ({one_line(error)})"
                    else:
                        trouble = str(error) if isinstance(error, UserError) else what_failed(error)
                    warn(
                        f"MLflow at {self.shown_uri} {trouble}: training continues, metrics are kept in metrics.jsonl."
                    )
                wait = self.timing.retry[min(num_failures, len(self.timing.retry) - 1)]
                if stopping:
                    # A store that has answered lately is asked again; one that was away is not waited for.
                    is_lasting = num_failures >= len(self.timing.retry) or self._store is None
                    if is_lasting or time.monotonic() + wait > self._give_up:
                        return
                    time.sleep(wait)
                else:
                    self._stop.wait(wait)
                num_failures += 1

    def _send(self) -> tuple[ModelStore, SyncState]:
        """Send all unsent lines in batches, and save after each how much was sent."""
        store, state = self._connect()
        assert state.run_id is not None
        with self._lock:
            back_to, rewrites = state.back_to, self._num_rewrites
        if back_to is not None:
            self._delete_points_after(store, state, back_to)
        with self._lock:
            if state.back_to is not None:
                if rewrites != self._num_rewrites:
                    return store, state  # The run has gone back again meanwhile: delete those points first.
                state.back_to = None
                self._save()
            rewrites = self._num_rewrites
            lines = self._unsent_lines(state)
        run_id = state.run_id

        def log(records: Sequence[Record]) -> None:
            shown = [replace(record, metrics=self.facts.as_sent(record.metrics)) for record in records]
            store.log_metrics(run_id, shown, self._tags_of(records))

        while lines:
            num_bytes, num_metrics = 0, 0
            records: list[Record] = []
            while lines and num_metrics < _METRICS_PER_REQUEST:
                line = lines.popleft()
                num_bytes += len(line)
                if record := parse_line(line):
                    records.append(record)
                    num_metrics += len(record.metrics)
                elif line.strip():
                    warn(f"skipped a damaged line of metrics.jsonl, perhaps cut short by a kill: {line[:60]!r}")
            self.refusals.send_each(store, run_id, records, lambda r: f"the metrics of step {r.step:,}", log)
            groups = {self.facts.metric(name).group for record in records for name in record.metrics}
            if groups & {"eval", "probe"}:
                self._mirror.has_new_scores = True
            with self._lock:
                if rewrites != self._num_rewrites:
                    return store, state  # The run has gone back meanwhile, which has changed sent_bytes.
                state.sent_bytes += num_bytes
                self._save()
        return store, state

    def _tags_of(self, records: Sequence[Record]) -> dict[str, str]:
        """The tags that show in the list of runs how far this one is, and how good."""
        tags = {}
        if self.facts.steps and records:
            step = max(record.step for record in records)
            tags["progress"] = f"{step / self.facts.steps:.0%} ({step:,} of {counted(self.facts.steps, 'step')})"
        for record in records:
            if (name := self.facts.score_among(record.metrics.keys())) in record.metrics:
                tags[SCORE] = self.facts.score_in_words(name, record.metrics[name])
        return tags

    def _unsent_lines(self, state: SyncState) -> deque[bytes]:
        """The complete lines from `sent_bytes` on; all lines if that is not at the end of a line."""
        with open(self.path, "rb") as file:
            if state.sent_bytes:
                file.seek(state.sent_bytes - 1)
                if file.read(1) != b"\n":  # The file was removed, and this is another one.
                    state.sent_bytes = 0
            file.seek(state.sent_bytes)
            # A line without its end is still being written.
            return deque(line for line in file if line.endswith(b"\n"))

    def _has_lost(self, last_steps: Mapping[str, int], state: SyncState) -> bool:
        """Whether a run lacks the last record that it has received: then it may lack any. last_steps: of its metrics."""
        record: Record | None = None
        with contextlib.suppress(OSError, UserError), open(self.path, "rb") as file:
            file.seek(max(0, state.sent_bytes - _LAST_RECORDS))
            found = map(parse_line, reversed(file.read(min(state.sent_bytes, _LAST_RECORDS)).splitlines()))
            record = next((record for record in found if record and record.metrics), None)
        if record is None:
            return False
        return all(last_steps.get(self.facts.sent_name(name), -1) < record.step for name in record.metrics)

    def _connect(self, starts: bool = True) -> tuple[ModelStore, SyncState]:
        """Open the store, and find or create the MLflow run, once. starts: mark it as running."""
        if self._store is not None:
            return self._store, self._states[self.shown_uri]
        self._lock_folder()
        with self._lock:
            state = self._states.setdefault(self.shown_uri, SyncState())
            # So launch/track_sync.py knows the store also if it does not answer. A damaged file is replaced once it is said what follows.
            if starts and not self._damage:
                self._save()
        store = ModelStore(self.uri)
        run = store.active_run(state.run_id) if state.run_id else None
        original = original_of(self.path.parent, run.info.run_id, run.data.tags) if run else None
        if run is None or original is not None:
            deleted = state.run_id
            if original is not None:
                self._update(state, run_id=None)
            self._find_or_create_run(store, state)
            if original is not None:
                warn(
                    f"{self.path.parent} is a copy of {original}, whose MLflow run is {deleted}: all is sent to {state.run_id}."
                )
            elif deleted and deleted != state.run_id:
                warn(f"MLflow at {self.shown_uri} has no run {deleted} (deleted?): all is sent to {state.run_id}.")
        elif self._has_lost(store.last_steps(run), state):
            warn(
                f"MLflow at {self.shown_uri} lacks points of run {state.run_id} that it had (restored from a backup?): all is sent again."
            )
            self._update(state, sent_bytes=0, has_parameters=False, artifacts={}, models={})
        else:
            self._mirror.find_lost_files(store, state)
        assert state.run_id is not None
        if not state.has_parameters:
            self._send_parameters(store, state.run_id)
            self._update(state, has_parameters=True)
        named: dict[str, str] = {}
        for relation, parent in self.facts.parents.items():
            if shown := store.link_to_parent(state.run_id, self.facts.name, self.facts.kind, parent, state.replaces):
                named[relation], self._links[f"`{parent}`"] = shown
        if old := state.replaces:
            models = f"that the logged models of run {old} are deleted"
            self.refusals.allows(store, state.run_id, models, partial(store.delete_models, old), optional=True)
            store.delete_run(old)
            self._update(state, replaces=None)
        # The name of the parent alone, unless the tags say more of it: those of earlier versions did not.
        by_name = {"parent": named["parent"]} if "parent" in named else {}
        tags = self._linked({**by_name, **self.tags, **self._tags_of_starts()})
        if starts:
            store.client.update_run(state.run_id, status="RUNNING")
        self.refusals.allows(store, state.run_id, "the tags", partial(store.set_tags, state.run_id, tags))
        self._store = store
        return store, state

    def _send_parameters(self, store: ModelStore, run_id: str) -> None:
        def log(parameters: Sequence[tuple[str, Any]]) -> None:
            store.log_parameters(run_id, dict(parameters))

        self.refusals.send_each(store, run_id, list(self.facts.parameters.items()), lambda p: f"parameter {p[0]}", log)
        datasets = partial(store.log_datasets, run_id, self.facts.datasets)
        self.refusals.allows(store, run_id, "the data sets", datasets)

    def _lock_folder(self) -> None:
        """Keep other processes from sending this folder. Raises FolderInUseError while another one does.

        A file system without locks keeps nobody out.
        """
        if self._folder_lock is not None:
            return
        lock, is_free = FileLock(self.path.parent / LOCK_FILE, by_record=True), True
        with contextlib.suppress(OSError):
            is_free = lock.acquire(wait=False)
        if not is_free:
            who = lock.read_owner() or "another process"
            lock.close()
            raise FolderInUseError(f"receives {self.path.parent} from {who} at this moment")
        self._folder_lock = lock
        lock.write_owner(f"host {socket.gethostname()}, pid {os.getpid()}")
        remove_unfinished(self.path.parent, [STATE_FILE])
        with self._lock:  # Another process may have sent since the state was read.
            found, _ = read_states(self.state_path)
            for uri, state in found.items():
                mine = self._states.get(uri)
                if self._num_rewrites:
                    state.sent_bytes = min(state.sent_bytes, mine.sent_bytes) if mine else 0
                    state.back_to = mine.back_to if mine else self.start
            self._states |= found

    def _unlock_folder(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.close()
            self._folder_lock = None

    def _find_or_create_run(self, store: ModelStore, state: SyncState) -> None:
        """Continue the MLflow run that carries this folder's tag, or create one."""
        experiment_id = store.experiment_id(self.experiment, self.artifacts)
        if state.run_id and store.is_active(state.run_id):  # Its experiment was deleted, and was restored just now.
            return
        found = store.find_run(experiment_id, self.tags[FOLDER_TAG])
        # A new folder may have the path and the inode number of one that was removed. A run that is empty is that of a start which
        # was killed before it could write mlflow.json.
        if found and (self._had_metrics or not any(found[1:])):
            # What it has received is not known: send all again, a database keeps equal points once.
            (run_id, has_parameters, _), back_to = found, self.start
            outcome = f"continuing run {run_id}, which has this folder's tag."
        else:
            run_id = store.create_run(experiment_id, self.facts.name, self.tags, self._started)
            has_parameters, back_to = False, None
            outcome = f"no run at {self.shown_uri} has this folder's tag, so everything is sent to a new one, {run_id}."
        self._update(
            state, run_id=run_id, sent_bytes=0, has_parameters=has_parameters, back_to=back_to, artifacts={}, models={}
        )
        if self._damage:
            warn(f"{self.state_path}, which names the MLflow run, was {self._damage}: {outcome}")
        self._damage = ""

    def _is_deleted(self, error: Exception) -> bool:
        """Whether the MLflow run was deleted since connecting; False if the store cannot tell."""
        if self._store is None or getattr(error, "error_code", "INTERNAL_ERROR") == "INTERNAL_ERROR":  # No answer.
            return False
        try:
            return not self._store.is_active(self.run_id)
        except Exception:  # Whatever the server or its client raises: the reason for the first failure is said.
            return False

    def _delete_points_after(self, store: ModelStore, state: SyncState, step: int) -> None:
        """Delete the points of later steps: in a database these alone; on a server by a new run that replaces the old one."""
        assert state.run_id is not None
        if store.delete_points_after(state.run_id, step) or not store.has_points_after(state.run_id, step):
            return
        old, new = state.run_id, store.create_copy(state.run_id)
        warn(
            f"MLflow at {self.shown_uri} has points of steps after {step:,}, which run again, and a server cannot delete points: run "
            f"{new} replaces {old}, which is deleted (`mlflow gc` removes it for good)."
        )
        self._update(state, run_id=new, sent_bytes=0, has_parameters=False, replaces=old, artifacts={}, models={})
        self._store = None  # Connecting again sends the parameters and deletes the old run.
        self._connect()

    def _tags_of_starts(self) -> dict[str, str]:
        """The number of starts, and the description with a line for each restart."""
        starts = self.page.starts()
        count = {"starts": str(len(starts))} if starts else {}
        return {**count, NOTE: describe(self.facts.description, starts)}

    def _linked(self, tags: dict[str, str]) -> dict[str, str]:
        """The tags, where the description links to the runs that it names by their IDs."""
        for run_id, link in self._links.items() if NOTE in tags else ():
            tags = {**tags, NOTE: tags[NOTE].replace(run_id, link)}
        return tags

    def _close(self, store: ModelStore, state: SyncState) -> bool:
        """Say how the run ended, and send what has changed. Returns whether all was sent."""
        assert state.run_id is not None
        assert self._end is not None
        # The status first: little time may be left.
        tags = self._linked(self._end.tags)
        self.refusals.allows(store, state.run_id, "how the run ended", partial(store.set_tags, state.run_id, tags))
        store.client.set_terminated(state.run_id, self._end.status)
        return self._mirror.look(store, state, final=True)

    def _update(self, state: SyncState, **fields: Any) -> None:
        with self._lock:
            for name, value in fields.items():
                setattr(state, name, value)
            self._save()

    def _save(self) -> None:
        """Write mlflow.json, the state in use last. The lock is held."""
        if self.shown_uri in self._states:
            self._states[self.shown_uri] = self._states.pop(self.shown_uri)
        write_states(self.state_path, self._states)
