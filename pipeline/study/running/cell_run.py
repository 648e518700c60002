"""Runs the cells of a study, as processes that resume from their folders, and reads what became of them."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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

OUTPUT, NOTES = "output", "notes"
# Exit code of a command that refused its settings or its data: another try would end in the same way.
_REFUSED = 2


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
        begin, hours = time.monotonic(), _read_note(job.folder, cell.name).get("hours") or 0.0
        _write_note(job.folder, cell.name, {"hours": hours})
        try:
            run_cell(cell, job)
        except DivergedError as error:
            diverged[cell.name] = str(error)
        except (UserError, LostError) as error:
            _write_note(job.folder, cell.name, {"hours": hours, "failed": str(error)})
            raise
        _write_note(job.folder, cell.name, {"hours": hours + (time.monotonic() - begin) / 3600})
    return diverged


def run_cell(cell: StudyCell, job: StudyJob) -> None:
    """Pre-train a cell and score its weights. Raises as `run_job`, and DivergedError."""
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
        try:
            os.link(file, path / file.name)
        except OSError:
            shutil.copy2(file, path / file.name)
    final = path.parent / source.name
    path.rename(final)
    target.point_at(final)


# -------------------------------------------------------------------- what became of a cell
def result_of(study: Study, cell: StudyCell, ends: Ends) -> CellResult:
    """The result of a cell, from its folders. ends: how cells ended in this start of which their folders say nothing."""
    found = CellResult(
        cell.name,
        cell.model.name,
        cell.family,
        cell.parameters,
        cell.data_size,
        cell.steps,
        cell.images_seen,
        cell.flops / 1e18,
        cell.seed,
        folder=str(cell.run.folder),
        run_id=run_id_of(cell.run.folder) or "",
    )
    ended = how_ended(cell.run)
    if ended is not None and ended.status == "diverged":
        return replace(found, state="diverged", reason=ended.reason)
    if cell.name in ends:
        state, reason = ends[cell.name]
        return replace(found, state=state, reason=reason)
    note = _read_note(study.folder, cell.name)
    if "failed" in note:
        return replace(found, state="failed", reason=note["failed"])
    if problems := list(filter(None, map(why_unusable, [cell.run, *cell.finetunes]))):
        return replace(found, state="damaged", reason=" ".join(problems))
    if ended is None:
        return found
    measured = _scores(cell)
    if not measured.keys() >= {f"finetune:{own_name(finetune)}" for finetune in cell.finetunes}:
        diverged = [f"{f.name}: {outcome}" for f in cell.finetunes if isinstance(outcome := read_outcome(f), str)]
        return replace(found, state="diverged", reason=diverged[0]) if diverged else found
    return replace(
        found,
        state="done",
        scores={name: value for name, (value, _, _) in measured.items()},
        num_test={name: number for name, (_, number, _) in measured.items() if number},
        effective_images={name: number for name, (_, _, number) in measured.items() if number},
        hours=note.get("hours"),  # Without those of a start that was killed.
    )


def _scores(cell: StudyCell) -> dict[str, tuple[float, int | None, float | None]]:
    """By name: the score, the number of its test images if known, and of images in groups their effective number."""
    found: dict[str, tuple[float | None, int | None, float | None]] = {}
    if is_evaluated(cell.run):
        evaluation = read_evaluation(cell.run)
        found["top1"] = evaluation.top1, evaluation.num_samples, evaluation.top1_effective_images
        found["top5"] = evaluation.top5, evaluation.num_samples, evaluation.top5_effective_images
    with contextlib.suppress(FileNotFoundError, UserError):
        content = json_record.read(cell.run.folder / "probe.json", dict[str, Any])
        probe = probe_metrics(content, "")
        for metric, value in probe.items():
            if metric_of(metric).is_share:
                effective = probe.get(f"{metric}_effective_images")
                found[metric.removeprefix("_")] = value, content.get("num_samples"), effective
    if cell.run.config.checkpoint.best:
        kept = _checkpoints(cell.run).kept()
        if kept.metric and kept.metric.endswith("top1"):
            found["best_top1"] = kept.value, *found.get("top1", (None, None, None))[1:]
    for finetune in cell.finetunes:
        outcome = read_outcome(finetune)
        if outcome is not None and not isinstance(outcome, str):
            found[f"finetune:{own_name(finetune)}"] = outcome.top1, outcome.num_samples, outcome.effective_images
    return {name: (value, num, effective) for name, (value, num, effective) in found.items() if value is not None}


# -------------------------------------------------------------------- a note on a cell beside its run: its hours, or why it failed
def _write_note(folder: Path, name: str, note: dict[str, Any]) -> None:
    (folder / NOTES).mkdir(exist_ok=True)
    write_text(folder / NOTES / f"{name}.json", json.dumps(note))


def _read_note(folder: Path, name: str) -> dict[str, Any]:
    """Empty if there is none, as where a kill left no time to write it."""
    return json_record.read_or_none(folder / NOTES / f"{name}.json", dict[str, Any]) or {}
