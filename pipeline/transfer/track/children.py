"""Sends the child runs of a sweep to MLflow from a background thread, one request at a time.

What MLflow has already is read from MLflow itself at each start: every child has a tag with its key. So a killed driver
leaves neither doubles nor gaps, and the folder needs no list of what was sent.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.atomic import write_files
from pipeline.monitor.metrics_file import Record
from pipeline.monitor.mlflow.refusals import one_line, warn, what_failed
from pipeline.monitor.mlflow.state import sent_to
from pipeline.monitor.mlflow.store import MlflowStore, is_refusal
from pipeline.monitor.page_folder import FIGURES
from pipeline.monitor.run_page import SCORE, DatasetFacts, RunFacts, hide_passwords, metric_name

# Tags of a child: its key among the children of its parent, and the digest of what was sent.
KEY_TAG, DIGEST_TAG = "cell", "cell_digest"
# Tag by which MLflow shows a run below another.
PARENT_TAG = "mlflow.parentRunId"
# Runs that one request lists.
_MAX_RUNS = 1000
# Of so many unsent children at the end, the driver says that it sends them. A child takes up to four requests: create_run,
# log_batch, log_inputs, update_run. MLflow has none for several runs.
_MANY = 100
# Returns file name -> PNG.
Draw = Callable[[], dict[str, bytes]]


@dataclass(frozen=True)
class Pace:
    """poll: time between two looks at the queue. retry: pauses after a failure, the last one again and again. redraw: least time
    between two drawings. finish: how long the end waits for a store that does not answer; while it answers, the end waits until
    all is sent. All in seconds.
    """

    poll: float = 1.0
    retry: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    redraw: float = 60.0
    finish: float = 30.0


@dataclass(frozen=True)
class NestedRun:
    """key: unique among the children. status: FINISHED or FAILED. started, ended: milliseconds since 1970. score: a metric."""

    key: str
    name: str
    status: str
    started: int
    ended: int
    parameters: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: tuple[DatasetFacts, ...] = ()
    score: str = ""

    def facts(self) -> RunFacts:
        """What its line of the list of runs says of its score."""
        return RunFacts(self.name, "cell", datasets=self.datasets, score=self.score)

    def digest(self) -> str:
        """Hash of what is sent, without times, because copying a folder changes these."""
        content = json.dumps([self.status, self.metrics, self.parameters, self.tags], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _KnownChild:
    """A child run that a store has. digest: of what was sent of it."""

    run_id: str
    status: str
    digest: str


class ChildSender:
    """Sends children below the MLflow run of `folder`, which another sender creates and names in mlflow.json.

    tags: of all children. draw: draws the figures in <folder>/page/figures, which that sender uploads.
    """

    def __init__(
        self, folder: Path, uri: str, tags: dict[str, str], draw: Draw | None = None, pace: Pace | None = None
    ):
        self.folder, self.uri, self.tags, self.pace = folder, uri, tags, pace or Pace()
        self.num_sent = 0
        self._draw, self._drawn, self._changed = draw, -1e9, False
        self._queue: dict[str, NestedRun] = {}
        self._lock = threading.Lock()
        self._store: MlflowStore | None = None
        self._parent, self._experiment = "", ""
        self._known: dict[str, _KnownChild] = {}
        self._warned = set[str]()
        self._stop = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="mlflow children", daemon=True)

    # ---------------------------------------------------------------- called by the driver
    def begin(self) -> None:
        self._thread.start()

    def add(self, children: Iterable[NestedRun]) -> None:
        """Queue children. One of a key that was added before replaces it."""
        with self._lock:
            self._queue |= {child.key: child for child in children}
            self._changed = True

    def end(self) -> bool:
        """Send the rest and draw the figures. Returns whether all was sent."""
        if len(self._queue) > _MANY:
            print(
                f"sending {counted(len(self._queue), 'cell')} to MLflow at {hide_passwords(self.uri)}; Ctrl-C leaves those that are missing "
                "to the next start of this command",
                flush=True,
            )
        self._deadline = time.monotonic() + self.pace.finish
        self._stop.set()
        self._thread.join()
        if self._queue:
            warn(
                f"MLflow at {hide_passwords(self.uri)} has not received {counted(len(self._queue), 'cell')} of {self.folder}: the same "
                "command sends them at its next start."
            )
        return not self._queue

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        num_failures = 0
        while True:
            stopping = self._stop.is_set()
            self._redraw(stopping)
            try:
                complete = self._send()
                num_failures = 0
            except Exception as error:  # Whatever the server or its client raises, the sweep goes on.
                complete, self._store = False, None
                num_failures += 1
                self._warn_once(
                    f"MLflow at {hide_passwords(self.uri)} {what_failed(error)}: the sweep goes on, and its "
                    "cells are sent later."
                )
            if stopping and (complete or time.monotonic() > self._deadline):
                return
            retry = self.pace.retry[min(num_failures, len(self.pace.retry)) - 1]
            wait = retry if num_failures else self.pace.poll
            if stopping:
                time.sleep(min(wait, 1.0))
            else:
                self._stop.wait(wait)

    def _redraw(self, final: bool) -> None:
        now = time.monotonic()
        if self._draw is None or not (final or (self._changed and now - self._drawn >= self.pace.redraw)):
            return
        self._drawn, self._changed = now, False
        draw, self._draw = self._draw, None if final else self._draw
        try:
            write_files(self.folder / FIGURES, draw())
        except Exception as error:  # A picture must not end a sweep.
            self._warn_once(
                f"the figures of {self.folder} cannot be drawn ({type(error).__name__}: {one_line(error)})."
            )

    def _send(self) -> bool:
        """Send what is queued. Returns False while the parent's run does not exist yet."""
        while True:
            with self._lock:
                child = next(iter(self._queue.values()), None)
            if child is None:
                return True
            if self._store is None and not self._connect():
                return False
            assert self._store is not None
            try:
                self._send_child(self._store, child)
            except Exception as error:
                if not is_refusal(error):
                    raise
                self._warn_once(f"MLflow at {hide_passwords(self.uri)} refused cell {child.key} ({one_line(error)}).")
            if self._stop.is_set():
                self._deadline = time.monotonic() + self.pace.finish  # It answers: go on.
            with self._lock:
                if self._queue.get(child.key) is child:  # Else it was replaced meanwhile.
                    del self._queue[child.key]

    def _connect(self) -> bool:
        """Find the parent and the children that it has."""
        parent = sent_to(self.folder, self.uri).run_id
        if not parent:
            return False
        store = MlflowStore(self.uri)
        run = store.active_run(parent)
        if run is None:  # Deleted: the other sender creates another one.
            return False
        if parent != self._parent:
            self._known = {}
        self._parent, self._experiment = parent, run.info.experiment_id
        self._find_children(store)
        self._store = store
        return True

    def _find_children(self, store: MlflowStore) -> None:
        mine, token = f"tags.`{PARENT_TAG}` = '{self._parent}' AND tags.`{KEY_TAG}` != ''", None
        while True:
            page = store.client.search_runs([self._experiment], mine, max_results=_MAX_RUNS, page_token=token)
            for run in page:
                tags = run.data.tags
                self._known[tags[KEY_TAG]] = _KnownChild(run.info.run_id, run.info.status, tags.get(DIGEST_TAG, ""))
            if not (token := page.token):
                return

    def _send_child(self, store: MlflowStore, child: NestedRun) -> None:
        digest, known = child.digest(), self._known.get(child.key)
        if known and (known.status, known.digest) == (child.status, digest):
            return
        if known is None:
            below = {**self.tags, **child.tags, KEY_TAG: child.key, PARENT_TAG: self._parent}
            run_id = store.create_run(self._experiment, child.name, below, child.started)
            known = _KnownChild(run_id, "RUNNING", "")
            self._known[child.key] = known
        facts = child.facts()
        record = Record(0, child.ended, facts.as_sent(child.metrics))
        scored = child.metrics.get(child.score)
        score = {} if scored is None else {SCORE: facts.score_in_words(child.score, scored)}
        # The tags may have changed: a cell that failed before has an outcome now.
        store.log_metrics(known.run_id, [record], {**child.tags, **score, DIGEST_TAG: digest}, child.parameters)
        store.log_datasets(known.run_id, child.datasets)
        store.client.set_terminated(known.run_id, child.status, child.ended)
        self._known[child.key] = _KnownChild(known.run_id, child.status, digest)
        self.num_sent += 1

    def _warn_once(self, line: str) -> None:
        kind = line.partition("(")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warn(line)


def attach(uri: str, folder: Path, metrics: dict[str, float], files: Iterable[Path]) -> bool:
    """Add numbers and the files of a report to the MLflow run of a folder. Returns False if it has none in this store. Raises UserError."""
    if not (run_id := sent_to(folder, uri).run_id):
        return False
    try:
        store = MlflowStore(uri)
        if not store.is_active(run_id):
            return False
        shown = {metric_name(name): value for name, value in metrics.items()}
        store.log_metrics(run_id, [Record(0, round(time.time() * 1000), shown)], {})
        for path in files:
            store.log_artifact(run_id, path, "report")
    except Exception as error:  # Whatever the server or its client raises.
        raise UserError(
            f"MLflow at {hide_passwords(uri)} did not take all of the report ({one_line(error)}). Run the command again."
        ) from None
    return True
