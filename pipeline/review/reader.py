"""Reads the record of a run from its folder, or from what `mlflow artifacts download` made of it: these are files of
the same names.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import missing
from pipeline.cluster.status_files import SETTINGS_FILE, holder, read_settings, read_status
from pipeline.monitor.export import run_id_of
from pipeline.monitor.metrics_file import METRICS_FILE, Record, by_name, read_metrics
from pipeline.monitor.page_folder import RUN_FILE, PageFolder, RunFile
from pipeline.monitor.run_page import RunFacts
from pipeline.review.record import RunRecord, Series
from pipeline.settings import schema

_RESULTS = "results.json"
# The status of run.json in the words of status.json, which reports and downloaded runs do not have.
_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
# What only the results.json of one kind of run has.
_KIND_BY_RESULT = {"protocol": "vtab", "trials": "grid", "question": "study"}


def is_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run, a grid, a sweep or a report."""
    return any(os.path.isfile(folder / name) for name in (RUN_FILE, SETTINGS_FILE, _RESULTS))


def from_folder(folder: Path) -> RunRecord:
    """The record of a run folder. Raises UserError for a folder that is not a run, and for a damaged file in one
    line.
    """
    if not is_run(folder):
        raise UserError(
            f"{folder} is not the folder of a run, or of an experiment that has ended: {RUN_FILE} and {_RESULTS} are"
            " missing."
        )
    # A run in progress writes metrics, then how it ended, and leaves its folder last. Read in the other order, the end
    # that is found has its metrics, and is that of a run that was killed only if it was.
    is_free = False
    with contextlib.suppress(OSError):  # The lock may be unreadable (another user's run): only the status is known.
        is_free = holder(folder) is None
    status = read_status(folder)
    word, outcome = (status.status, status.reason or status.status) if status else ("", "")
    if word == "running" and is_free:
        word, outcome = "killed", "ended without a word: killed, or its host was lost"
    results: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        results = json_record.readable(json_record.read(folder / _RESULTS, dict[str, Any]))
    saved = PageFolder(folder).saved()
    if saved is None and not results:
        raise UserError(f"{folder / RUN_FILE} is missing: {folder} is not the folder of a started run.")
    if saved is None:  # A grid or a sweep that was not tracked.
        kind = next((kind for name, kind in _KIND_BY_RESULT.items() if name in results), "")
        saved = RunFile("", RunFacts(str(results.get("name") or folder.resolve().name), kind))
    facts, tags = saved.facts, saved.facts.all_tags() | (saved.end.tags if saved.end else {})
    if not word and saved.end:
        word = "diverged" if tags.get("outcome", "").startswith("diverged") else _STATUS[saved.end.status]
    records, num_damaged = list[Record](), 0
    with contextlib.suppress(FileNotFoundError):
        records, num_damaged = read_metrics(folder / METRICS_FILE)
    series = {name: Series.of(points) for name, points in by_name(records).items()}
    times = [record.time / 1000 for record in records] or [0.0]
    settings, evaluated = dict(facts.parameters), facts.dataset("evaluation")
    splits = [evaluated.split] if evaluated else [name[:-5] for name in series if name.endswith("_top1")]
    if has_all_settings := (folder / SETTINGS_FILE).exists():
        config = read_settings(folder)
        splits = config.data.evaluated
        built = {name: value for name, value in facts.parameters.items() if name.startswith("model.")}
        found = schema.flatten(schema.to_dict(config))
        settings = {name: value for name, value in found.items() if not built or not name.startswith("model.")} | built
    return RunRecord(
        **{**vars(facts), "tags": tags},
        folder=folder,
        run_id=run_id_of(folder),
        status=word or "finished",
        outcome=tags.get("outcome", outcome or word or "finished"),
        settings=settings,
        has_all_settings=has_all_settings,
        split=next(iter(splits), ""),
        series=series,
        period=(min(times), max(times)),
        starts=saved.starts,
        results=results,
        num_damaged=num_damaged,
    )


def read(address: str) -> RunRecord:
    """The record of a folder that a user names. Raises UserError in one line if it is not a run, or damaged."""
    path = Path(address)
    if not path.exists():
        raise UserError(missing(address, way_out="Name the folder of a run."))
    return from_folder(path)
