"""Runs the cells of a study, as processes that resume from their folders, and reads what became of them."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import IO, Any

from pipeline.base import json_record
from pipeline.base.errors import DivergedError, UserError
from pipeline.base.files import write_text
from pipeline.base.metric import metric_of
from pipeline.checkpoint.store import Checkpoints, checkpoint_folder, step_of
from pipeline.evaluate.probes.probe import probe_metrics
from pipeline.lifecycle.run_folder import RESUME, read_failures, read_status
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.ray_tasks import LostError
from pipeline.settings.commands.study import StudyConfig
from pipeline.settings.run import TrackConfig
from pipeline.study.results import CellResult, State
from pipeline.study.running.cells import Study, StudyCell, own_name
from pipeline.transfer.child_run import (
    ChildRun,
    how_ended,
    is_evaluated,
    read_evaluation,
    read_outcome,
    remove_unreadable_scores,
    start_command,
    wait_until_free,
    why_unusable,
    with_track,
)
from pipeline.transfer.score_table import RESULTS_FILE, read_results

OUTPUT, HOURS, FAILED = "output", "hours", "failed"
# Exit code of a command that refused its settings or its data: another try would end in the same way.
_REFUSED = 2
# Variables of a Ray worker. A command inside of a cell that starts Ray gets a cluster of its own on the cell's machine.
_OF_RAY = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")


# Name of a cell -> (what became of it, the reason).
Ends = Mapping[str, tuple[State, str]]


class StoppedError(Exception):
    """A run was asked to stop, and committed its state: the study stops, too."""


@dataclass(frozen=True)
class StudyJob:
    """The cells that one task runs. track: of their runs, without what is each run's own; None leaves it as the settings say."""

    cells: list[StudyCell]
    config: StudyConfig
    folder: Path
    track: TrackConfig | None = None


def run_job(job: StudyJob) -> dict[str, str]:
    """Run the cells of a job that are not done. Returns the reason of each cell that diverged, by name.

    Raises UserError when a command refuses a cell, LostError when a process died (the job is tried again), StoppedError.
    """
    diverged = {}
    for cell in job.cells:
        begin = time.monotonic()
        failure = _note_file(job.folder, FAILED, cell.name)
        failure.unlink(missing_ok=True)
        try:
            run_cell(cell, job)
        except DivergedError as error:
            diverged[cell.name] = str(error)
        except (UserError, LostError) as error:
            _write_note(job.folder, FAILED, cell.name, {"reason": str(error)})
            raise
        hours = (_read_note(job.folder, HOURS, cell.name).get("hours") or 0.0) + (time.monotonic() - begin) / 3600
        _write_note(job.folder, HOURS, cell.name, {"hours": hours})
    return diverged


def run_cell(cell: StudyCell, job: StudyJob) -> None:
    """Pre-train a cell and score its weights. Raises as `run_job`, and DivergedError."""
    config = job.config
    (job.folder / OUTPUT).mkdir(parents=True, exist_ok=True)
    with open(job.folder / OUTPUT / f"{cell.name}.txt", "ab") as output:
        if cell.trunk and how_ended(cell.run) is None and not _is_planted(cell):
            if max(_steps_of(cell.trunk), default=0) < cell.trunk_steps:
                _run(cell.trunk, "pretrain", job, output)
            # A trunk that has gone on to a longer cell may have removed this checkpoint. The run trains these steps itself then.
            if cell.trunk_steps in _steps_of(cell.trunk):
                _plant(cell)
        _run(cell.run, "finetune" if cell.run.config.init.weights else "pretrain", job, output)
        for finetune in cell.finetunes:
            _run(finetune, "finetune", job, output)
        if config.vtab and not _vtab_scores(job.folder, cell):
            settings = [*config.vtab_settings, f"weights={cell.run.folder}", f"out={_vtab_folder(job.folder, cell)}"]
            environment = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
            code = start_command("vtab", ["--config", config.vtab, *settings], "", output, environment)
            _raise_unless_done(
                code, bool(_vtab_scores(job.folder, cell)), f"the VTAB sweep of {cell.name}", output.name
            )


def _run(run: ChildRun, command: str, job: StudyJob, output: IO[bytes]) -> None:
    """Run one command to its end, unless it has ended."""
    ended = how_ended(run)
    if ended is None or why_unusable(run):
        if who := wait_until_free(run.folder):
            raise LostError(f"{run.folder} is in use by {who}.")
        remove_unreadable_scores(run)
        if job.track is not None:
            own = run.config.track
            run = with_track(run, replace(own, uri=job.track.uri, parent_run=job.track.parent_run))
        launcher = job.config.launcher
        if not launcher and job.config.gpus > 1:
            launcher = f"torchrun --standalone --nproc_per_node {job.config.gpus}"
        before = _version_of_status(run.folder)
        code = start_command(command, ["--config", run.file, *run.overrides], launcher, output)
        ended = how_ended(run)
        has_spoken = _version_of_status(run.folder) != before
        _raise_unless_done(code, ended is not None, str(run.folder), output.name, run.folder if has_spoken else None)
    assert ended is not None
    if ended.status == "diverged":
        raise DivergedError(ended.reason or f"{run.name} diverged")


def _version_of_status(folder: Path) -> tuple[int, int] | None:
    """Changes with each word of a run: a process that dies before it has the folder leaves that of the start before."""
    try:
        found = (folder / "status.json").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _raise_unless_done(code: int, is_done: bool, what: str, output: str, folder: Path | None = None) -> None:
    if is_done:
        return
    if code == RESUME:
        raise StoppedError(f"{what} was asked to stop")
    status = read_status(folder) if folder else None
    reason = (status.reason if status else "") or next(
        (failure.error for failure in read_failures(folder).values()) if folder else iter(()), ""
    )
    text = f"{what} failed (exit code {code}){f': {reason}' if reason else ''}. See {output}."
    raise UserError(text) if code == _REFUSED else LostError(text)


# -------------------------------------------------------------------- runs that share their first steps
def _checkpoints(run: ChildRun) -> Checkpoints:
    return Checkpoints(checkpoint_folder(run.config))


def _steps_of(run: ChildRun) -> list[int]:
    """The steps of which a run has checkpoints."""
    return [step_of(path) for path in _checkpoints(run).candidates()]


def _is_planted(cell: StudyCell) -> bool:
    return max(_steps_of(cell.run), default=0) >= cell.trunk_steps


def _plant(cell: StudyCell) -> None:
    """Give a run the checkpoint of its trunk, from which it resumes. Files are linked, or copied to another disk."""
    assert cell.trunk
    (source,) = [path for path in _checkpoints(cell.trunk).candidates() if step_of(path) == cell.trunk_steps]
    target = _checkpoints(cell.run)
    path = target.begin(cell.trunk_steps, "planted")
    assert isinstance(path, Path), "cells.py refuses checkpoints in a bucket"
    for old in path.iterdir():  # Of a plant that was killed.
        old.unlink()
    for file in Path(str(source)).iterdir():
        _link_or_copy(file, path / file.name)
    final = path.parent / source.name
    path.rename(final)
    target.point_at(final)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        try:
            shutil.copy2(source, target)
        except OSError as error:
            error.filename, error.filename2 = str(target), None  # It names the source, which is no help on a full disk.
            raise


# -------------------------------------------------------------------- what became of a cell
def result_of(study: Study, cell: StudyCell, ends: Ends) -> CellResult:
    """The result of a cell, from its folders. ends: how cells ended in this start of which their folders say nothing."""
    found = CellResult(
        cell.name, cell.model.name, cell.family, cell.parameters, cell.data_size, cell.steps, cell.images_seen, cell.flops / 1e18,
        cell.seed, folder=str(cell.run.folder), run_id=run_id_of(cell.run.folder) or "",
    )  # fmt: skip
    ended = how_ended(cell.run)
    if ended is not None and ended.status == "diverged":
        return replace(found, state="diverged", reason=ended.reason)
    if cell.name in ends:
        state, reason = ends[cell.name]
        return replace(found, state=state, reason=reason)
    if failure := _read_note(study.folder, FAILED, cell.name):
        return replace(found, state="failed", reason=str(failure.get("reason")))
    runs = [cell.run, *cell.finetunes]
    problems = [*map(why_unusable, runs), _vtab_results(study.folder, cell)[1]]
    if any(problems):
        return replace(found, state="damaged", reason=" ".join(filter(None, problems)))
    if ended is None:
        return found
    scores, num_test, effective = _scores(study, cell)
    missing = [
        name
        for name in [*(f"finetune:{own_name(f)}" for f in cell.finetunes), *(["vtab"] if study.config.vtab else [])]
        if name not in scores
    ]
    if missing:
        diverged = [f"{f.name}: {outcome}" for f in cell.finetunes if isinstance(outcome := read_outcome(f), str)]
        return replace(found, state="diverged", reason=diverged[0]) if diverged else found
    # Without those of a start that was killed.
    hours = _read_note(study.folder, HOURS, cell.name).get("hours")
    num_tasks = len(_vtab_scores(study.folder, cell)) if study.config.vtab else 0
    found = replace(found, num_test=num_test, effective_images=effective)
    return replace(found, state="done", scores=scores, vtab_tasks=num_tasks, hours=hours)


def _scores(study: Study, cell: StudyCell) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """Returns (scores, numbers of test images, of images in groups effective ones) by name."""
    scores: dict[str, float] = {}
    num_test: dict[str, int] = {}
    effective: dict[str, float] = {}
    if is_evaluated(cell.run):
        evaluation = read_evaluation(cell.run)
        for name, value, number in (
            ("top1", evaluation.top1, evaluation.top1_effective_images),
            ("top5", evaluation.top5, evaluation.top5_effective_images),
        ):
            if value is not None:
                scores[name], num_test[name] = value, evaluation.num_samples
                effective |= {name: number} if number else {}
    with contextlib.suppress(FileNotFoundError, UserError):
        content = json_record.read(cell.run.folder / "probe.json", dict[str, Any])
        probe, num_probed = probe_metrics(content, ""), content.get("num_samples")  # None of earlier versions.
        for metric, value in probe.items():
            if metric_of(metric).is_share:
                name, number = metric.removeprefix("_"), probe.get(f"{metric}_effective_images")
                scores[name] = value
                num_test |= {name: num_probed} if num_probed else {}
                effective |= {name: number} if number else {}
    if cell.run.config.checkpoint.best:
        kept = _checkpoints(cell.run).kept()
        if kept.metric and kept.metric.endswith("top1") and kept.value is not None:
            scores["best_top1"], num_test["best_top1"] = kept.value, num_test.get("top1", 0)
            effective |= {"best_top1": effective["top1"]} if "top1" in effective else {}
    for finetune in cell.finetunes:
        outcome = read_outcome(finetune)
        if outcome is not None and not isinstance(outcome, str):
            name = f"finetune:{own_name(finetune)}"
            assert outcome.top1 is not None, "else there is no outcome"
            scores[name], num_test[name] = outcome.top1, outcome.num_samples
            effective |= {name: outcome.effective_images} if outcome.effective_images < outcome.num_samples else {}
    if study.config.vtab and (accuracies := _vtab_scores(study.folder, cell)):
        scores["vtab"] = mean(accuracies)
    return scores, num_test, effective


def _vtab_folder(folder: Path, cell: StudyCell) -> Path:
    return folder / f"{cell.name}-vtab"


def _vtab_results(folder: Path, cell: StudyCell) -> tuple[dict[str, Any], str]:
    """Returns (content of the results of a cell's sweep, why it cannot be read); {} and "" where there is none."""
    file = _vtab_folder(folder, cell) / RESULTS_FILE
    try:
        return (read_results(file), "") if file.exists() else ({}, "")
    except UserError as error:
        return {}, str(error)


def _vtab_scores(folder: Path, cell: StudyCell) -> list[float]:
    """Mean accuracy on each of VTAB's tasks; empty while one of the sweep's tasks has no score."""
    content, _ = _vtab_results(folder, cell)
    by_task: dict[str, list[float]] = {}
    for row in content["scores"] if content and not content["failed"] else []:
        by_task.setdefault(row["task"], []).append(row["accuracy"])
    return [mean(accuracies) for accuracies in by_task.values()]


def unpublished_tasks(study: Study) -> list[str]:
    """Names of VTAB tasks that any cell has a score of, and whose images are not those of the published files."""
    tasks: dict[str, None] = {}
    for cell in study.cells if study.config.vtab else []:
        tasks |= dict.fromkeys(_vtab_results(study.folder, cell)[0].get("unpublished", []))
    return list(tasks)


# -------------------------------------------------------------------- notes on a cell beside its run: its hours, why it failed
def _note_file(folder: Path, kind: str, name: str) -> Path:
    return folder / kind / f"{name}.json"


def _write_note(folder: Path, kind: str, name: str, note: dict[str, Any]) -> None:
    (folder / kind).mkdir(exist_ok=True)
    write_text(_note_file(folder, kind, name), json.dumps(note))


def _read_note(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """Empty if there is none, as where a kill left no time to write it."""
    return json_record.read_or_none(_note_file(folder, kind, name), dict[str, Any]) or {}
