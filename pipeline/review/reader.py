"""Reads the record of a run from its folder, or from what `mlflow artifacts download` made of it: these are files of the same names."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline import model as models
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import did_you_mean
from pipeline.base.words import counted
from pipeline.evaluate import architecture
from pipeline.lifecycle.run_folder import holder, read_status
from pipeline.monitor.metrics_file import METRICS_FILE, read_metrics
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.page_folder import PAGE, End, SavedFacts, parse_starts
from pipeline.monitor.run_page import RunFacts, hide_passwords
from pipeline.process.outputs import kind_of
from pipeline.review.record import RunFiles, RunRecord, Series, as_count
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

T = TypeVar("T")

# The status of page/end.json in the words of status.json, which reports and downloaded runs do not have.
_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
# What only the results.json of one kind of run has.
_KIND_BY_RESULT = {"protocol": "vtab", "trials": "grid", "question": "study"}


def is_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run, a grid, a sweep or a report."""
    return any(os.path.isfile(folder / name) for name in ("config.json", "results.json", f"{PAGE}/facts.json"))


def from_folder(folder: Path) -> RunRecord:
    """The record of a run folder. Raises UserError for a folder that is not a run, and for a damaged file in one line."""
    if not is_run(folder):
        if kind_of(folder) == "experiment":
            raise UserError(
                f"{folder} is an experiment that has not ended: results.json is missing. Wait, or continue it by the command that began it."
            )
        raise UserError(f"{folder} is not the folder of a started run: config.json is missing.")
    files = RunFiles(folder)
    # A run that goes on writes metrics, then how it ended, and leaves its folder last. Read in the other order, the end that is
    # found has its metrics, and is that of a run that was killed only if it was.
    is_free = False
    with contextlib.suppress(OSError):  # Of another user's run, or one whose lock is no file, only the status is known.
        is_free = holder(folder) is None
    status = read_status(folder)
    word, outcome = (status.status, status.reason or status.status) if status else ("", "")
    if word == "running" and is_free:
        word, outcome = "killed", "ended without a word: killed, or its host was lost"
    end = _parsed(files, "end.json", End)
    facts = _facts(files)
    metrics, num_damaged = _metrics_of(folder)
    tags = (facts.all_tags() if facts else {}) | (end.tags if end else {})
    if not word and end:
        word = "diverged" if tags.get("outcome", "").startswith("diverged") else _STATUS.get(end.status, "unknown")
    word = word or ("unknown" if (folder / "config.json").exists() else "finished")
    record = RunRecord(
        folder.resolve().name,
        "",
        str(folder),
        files,
        folder,
        run_id_of(folder),
        word,
        tags.get("outcome", outcome or word),
        metrics=metrics,
        tags=tags,
        num_damaged=num_damaged,
    )
    if facts is not None:
        record = replace(
            record,
            parameters={key: str(value) for key, value in facts.parameters.items()},
            datasets=facts.datasets,
            parents=facts.parents,
            origin=facts.origin,
            declared=facts.metrics,
        )
    return _completed(record, facts)


def _metrics_of(folder: Path) -> tuple[dict[str, Series], int]:
    """Returns (metrics, number of damaged lines)."""
    if not (folder / METRICS_FILE).exists():
        return {}, 0
    records, num_damaged = read_metrics(folder / METRICS_FILE)
    points: dict[str, list[tuple[int, float, int]]] = {}
    for record in records:
        for name, value in record.metrics.items():
            points.setdefault(name, []).append((record.step, value, record.time))
    return {name: Series.of(found) for name, found in points.items()}, num_damaged


def _completed(record: RunRecord, facts: RunFacts | None = None) -> RunRecord:
    """The record with what follows from its files, tags and parameters."""
    files, tags, parameters = record.files, record.tags, record.parameters
    results = _mapping(files, "results.json")
    starts, num_cut = parse_starts(files.read("starts.jsonl") or b"")
    config = _config(files)
    if config is not None:
        settings = schema.flatten(schema.to_dict(config))
    else:
        # A run of training has beside them what follows from its settings; an evaluation has nothing else.
        is_evaluation = tags.get("kind") == "evaluation"
        settings = {key: value for key, value in parameters.items() if "." in key or is_evaluation}
    built, flops = _model(files)
    if built:
        settings = {key: value for key, value in settings.items() if not key.startswith("model.")} | built
    settings = {key: hide_passwords(value) if isinstance(value, str) else value for key, value in settings.items()}
    kinds = [kind for name, kind in _KIND_BY_RESULT.items() if name in results]
    kind = kinds[0] if kinds else "finetune" if settings.get("init.weights") else "pretrain"
    planned = facts.steps if facts and facts.steps else as_count(parameters.get("steps"))
    return replace(
        record,
        name=facts.name if facts else config.name if config else str(results.get("name") or record.name),
        kind=tags.get("kind", kind),
        settings=settings,
        has_all_settings=config is not None,
        steps=planned,
        images_per_step=as_count(settings.get("train.global_batch")),
        flops_per_image=facts.flops_per_image or flops if facts else flops,
        starts=tuple(starts),
        results=results,
        ignored=(f"{counted(num_cut, 'damaged line')} of starts.jsonl are ignored",) * bool(num_cut),
    )


def _config(files: RunFiles) -> RunConfig | None:
    """The settings of a run; None if its files do not have them. Raises UserError for damaged ones."""
    if (tree := _parsed(files, "config.json", dict[str, Any])) is not None:
        return schema.build(RunConfig, tree, files.where("config.json"))
    return None


def _model(files: RunFiles) -> tuple[dict[str, Any], float]:
    """Returns (architecture as settings, FLOPs of training on one image); ({}, 0) if the files do not have it."""
    values = _parsed(files, architecture.FILE, dict[str, Any])
    if values is None:
        return {}, 0.0
    config = models.config_from_dict(values)
    return architecture.as_settings(config), float(models.training_flops_per_image(config))


def _facts(files: RunFiles) -> RunFacts | None:
    """Content of page/facts.json; None if it is missing."""
    saved = _parsed(files, "facts.json", SavedFacts)
    return saved.facts if saved else None


def _mapping(files: RunFiles, name: str) -> dict[str, Any]:
    return _parsed(files, name, dict[str, Any]) or {}


def _parsed(files: RunFiles, name: str, kind: type[T]) -> T | None:
    """The content of a JSON file, with texts that can be shown; None if it is missing. Raises UserError."""
    content = files.read(name)
    if content is None:
        return None
    tree: Any = json_record.parse(content, Any, files.where(name))
    return json_record.convert(json_record.readable(tree), kind, files.where(name))


def read(address: str) -> RunRecord:
    """The record of a folder that a user names, or of a file in it. Raises UserError in one line if it is not a run, or damaged."""
    path = Path(address)
    path = path.parent if path.suffix == ".json" else path
    if not path.exists():
        raise UserError(f"{address} does not exist.{did_you_mean(path)} Name the folder of a run.")
    return from_folder(path)
