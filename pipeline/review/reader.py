"""Reads the record of a run: from its folder, or from MLflow alone.

The files of a run (config, model, scores, page/) are the same in its folder and among its MLflow artifacts, so one function
makes the record from either, and both give the same record.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pipeline import model as models
from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import did_you_mean
from pipeline.base.metric import from_tag
from pipeline.base.words import counted
from pipeline.evaluate import architecture
from pipeline.lifecycle.run_folder import holder, read_status
from pipeline.monitor.metrics_file import METRICS_FILE, read_metrics
from pipeline.monitor.mlflow.reading import ReadingStore, open_existing
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.page_folder import PAGE, End, SavedFacts, parse_starts
from pipeline.monitor.run_page import (
    METRICS_TAG,
    SCORE,
    RunFacts,
    StoredRun,
    hide_passwords,
    origin_in,
    plain_name,
)
from pipeline.process.outputs import kind_of
from pipeline.review.record import RunFiles, RunRecord, Series, as_count, as_number
from pipeline.settings import schema
from pipeline.settings.objective_checks import OBJECTIVES
from pipeline.settings.run import RunConfig
from pipeline.settings.yaml_reader import parse_yaml

T = TypeVar("T")

# Metrics that no report shows. They are half of all points, and a server is asked for each metric by itself.
_NOT_READ = ("system/", "checkpoint_", "grad_norm", "epoch", "images_seen", "exaflops")
# MLflow's status in the words of status.json. A killed run stays RUNNING there, since nobody can say otherwise.
_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped", "RUNNING": "running"}
# What only the results.json of one kind of run has.
_KIND_BY_RESULT = {"protocol": "vtab", "trials": "grid", "question": "study"}


# ---------------------------------------------------------------------- from a folder
@dataclass(frozen=True)
class FolderFiles:
    """The files of a run folder, and of `page/` in it."""

    path: Path

    def read(self, name: str) -> bytes | None:
        for file in (self.path / name, self.path / PAGE / name):
            try:
                return file.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise UserError(f"{file} cannot be read ({error.strerror}).") from None
        return None

    def figures(self) -> list[str]:
        return [f"figures/{file.name}" for file in sorted((self.path / PAGE / "figures").glob("*.png"))]

    def where(self, name: str) -> str:
        in_page = self.path / PAGE / name
        return str(in_page if os.path.exists(in_page) else self.path / name)


@dataclass(frozen=True)
class StoredFiles:
    """The artifacts of an MLflow run. store: a `ReadingStore`."""

    store: Any
    run_id: str

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.store.list_files(self.run_id))

    def read(self, name: str) -> bytes | None:
        there = name in self._names or "/" in name
        return self.store.read_file(self.run_id, name) if there else None

    def figures(self) -> list[str]:
        return [name for name in sorted(self.store.list_files(self.run_id, "figures")) if name.endswith(".png")]

    def where(self, name: str) -> str:
        return f"{name} of MLflow run {self.run_id}"


def is_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run, a grid, a sweep or a report."""
    return any(os.path.isfile(folder / name) for name in ("config.json", "results.json", f"{PAGE}/facts.json"))


def weights_named_in(folder: Path) -> str:
    """The weights that a run folder began with, without reading the rest of it; "" for a new model. Raises UserError."""
    files = FolderFiles(folder)
    config = _mapping(files, "config.json")
    if config:
        return config.get("init", {}).get("weights") or ""
    results = _mapping(files, "results.json")
    return (results.get("checkpoint") or {}).get("path") or results.get("weights") or ""


def from_folder(folder: Path) -> RunRecord:
    """The record of a run folder. Raises UserError for a folder that is not a run, and for a damaged file in one line."""
    if not is_run(folder):
        if (kind := kind_of(folder)) in ("grid", "study", "VTAB-1k sweep"):
            raise UserError(
                f"{folder} is a {kind} that has not ended: results.json is missing. Wait, or continue it by the command that began it."
            )
        raise UserError(f"{folder} is not the folder of a started run: config.json is missing.")
    files = FolderFiles(folder)
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
    tags = end.tags if end else {}
    if not word:
        word = _STATUS.get(
            end.status if end else "", "finished" if not (folder / "config.json").exists() else "unknown"
        )
    if facts is not None:
        tags = facts.all_tags() | tags
    record = RunRecord(
        folder.resolve().name, "", str(folder), files, folder, run_id_of(folder), word, tags.get("outcome", outcome or word), metrics=metrics,
        tags=tags, origin=origin_in(tags), num_damaged=num_damaged,
    )  # fmt: skip
    if facts is not None:
        record = replace(
            record, parameters=_as_text(facts.parameters), datasets=facts.datasets, parents=facts.parents, origin=facts.origin,
            declared=facts.metrics,
        )  # fmt: skip
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


# ---------------------------------------------------------------------- from MLflow
def from_mlflow(store: ReadingStore, run_id: str, with_points: bool = True) -> RunRecord:
    """The record of an MLflow run. store: a `ReadingStore`. Raises UserError for a run that does not exist.

    with_points: read all points of the metrics; otherwise each metric has its last value only, at step 0, which is one request.
    """
    stored: StoredRun = store.read_run(run_id)
    shown = {name: value for name, value in stored.metrics.items() if name != SCORE}  # A copy of another metric.
    wanted = [name for name in shown if not plain_name(name).startswith(_NOT_READ)]
    last = [(name, [(0, value, 0)]) for name, value in shown.items()]
    points = {
        plain_name(name): list(found) for name, found in (store.read_points(stored, wanted) if with_points else last)
    }
    files = StoredFiles(store, stored.run_id)
    declared = from_tag(stored.tags.get(METRICS_TAG, ""))
    metrics = {name: Series.of(sorted(of, key=lambda point: point[2])) for name, of in points.items() if of}
    tags = {
        name: text
        for name, text in stored.tags.items()
        if name not in ("mlflow.runName", "run_folder", "progress", SCORE, METRICS_TAG)
    }
    word = _STATUS.get(stored.status, stored.status.lower())
    outcome = tags.get("outcome", word)
    parents = {name.removesuffix("_run_id"): text for name, text in tags.items() if name.endswith("_run_id")}
    return _completed(RunRecord(
        stored.name, "", f"mlflow:{stored.run_id}", files, run_id=stored.run_id,
        status="diverged" if outcome.startswith("diverged") else word, outcome=outcome, parameters=_as_text(stored.parameters),
        metrics=metrics, tags=tags, datasets=tuple(stored.datasets), parents=parents, origin=origin_in(tags),
        declared=declared,
    ))  # fmt: skip


# ---------------------------------------------------------------------- from both
def _as_text(parameters: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in parameters.items()}


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
        record, name=facts.name if facts else config.name if config else str(results.get("name") or record.name),
        kind=tags.get("kind", kind), settings=settings, has_all_settings=config is not None, steps=planned,
        images_per_step=as_count(settings.get("train.global_batch")),
        flops_per_image=_flops_per_image(settings, facts, parameters, flops),
        starts=tuple(starts) or (None,) * as_count(tags.get("starts")), results=results,
        ignored=(f"{counted(num_cut, 'damaged line')} of starts.jsonl are ignored",) * bool(num_cut),
    )  # fmt: skip


def _config(files: RunFiles) -> RunConfig | None:
    """The settings of a run; None if its files do not have them. Raises UserError for damaged ones."""
    if (tree := _parsed(files, "config.json", dict[str, Any])) is not None:
        return schema.build(RunConfig, tree, files.where("config.json"))
    if (content := files.read("config.yaml")) is not None:
        tree = parse_yaml(content.decode())
        return schema.build(RunConfig, tree, files.where("config.yaml"))
    return None


def _model(files: RunFiles) -> tuple[dict[str, Any], float]:
    """Returns (architecture as settings, FLOPs of training on one image); ({}, 0) if the files do not have it."""
    values = _parsed(files, architecture.FILE, dict[str, Any])
    if values is None:
        return {}, 0.0
    config = models.config_from_dict(values)
    return architecture.as_settings(config), float(models.training_flops_per_image(config))


def _flops_per_image(
    settings: Mapping[str, Any], facts: RunFacts | None, parameters: Mapping[str, Any], of_model: float
) -> float:
    """FLOPs of training on an image, with what the objective adds to the model, of which only the run itself knew all; 0 if unknown."""
    if facts and facts.flops_per_image:
        return facts.flops_per_image
    rounded = max(0.0, as_number(parameters.get("gflops_per_image"))) * 1e9
    loss = settings.get("train.loss", "softmax")
    is_models = loss in OBJECTIVES and objectives.kind(str(loss)).trains_backbone_alone
    return of_model or rounded if is_models else rounded or of_model


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


# ---------------------------------------------------------------------- from an address
@dataclass(frozen=True)
class RunReader:
    """Reads runs by their address: a folder, `mlflow:ID`, or the plain ID of an MLflow run.

    uri: of the MLflow store, which is opened once, and only if it is needed, because the import takes seconds.
    """

    uri: str

    @cached_property
    def store(self) -> Any:
        return open_existing(ReadingStore, self.uri, Path("runs"), setting="mlflow=... or ")

    def read(self, address: str) -> RunRecord:
        """Raises UserError in one line for an address that is no run, and for a damaged run."""
        run_id = run_id_in(address)
        if run_id is not None and not Path(address).exists():
            return from_mlflow(self.store, run_id)
        path = Path(address)
        path = path.parent if path.suffix == ".json" else path
        if not path.exists():
            raise UserError(
                f"{address} does not exist.{did_you_mean(path)} Name a run folder, or an MLflow run as mlflow:ID."
            )
        return from_folder(path)


def run_id_in(address: str) -> str | None:
    """The MLflow run ID in an address; None for a path."""
    for prefix in ("mlflow:", "runs:/"):
        if address.startswith(prefix):
            return address.removeprefix(prefix).strip("/")
    return address if len(address) == 32 and set(address) <= set("0123456789abcdef") else None
