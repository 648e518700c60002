"""A run of an experiment: a command with its settings, started as a process that resumes from its folder, which says
what became of it.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import DivergedError, UserError
from pipeline.base.metric import metric_of
from pipeline.checkpoint.store import Checkpoints, checkpoint_folder, step_of
from pipeline.cluster.ray_tasks import LostError
from pipeline.cluster.status_files import (
    RESUME,
    SETTINGS_FILE,
    Status,
    holder,
    read_failures,
    read_settings,
    read_status,
)
from pipeline.evaluate.probes.probe import probe_metrics
from pipeline.experiment.table import START, Row
from pipeline.monitor.export import run_id_of
from pipeline.monitor.page_folder import PageFolder
from pipeline.process import waits
from pipeline.process.start import check_program, dying_with_parent
from pipeline.settings import schema
from pipeline.settings.commands.study import ExperimentConfig
from pipeline.settings.run import RunConfig, TrackConfig

SCORES_FILE, PROBE_FILE = "scores.json", "probe.json"
_COMMANDS = Path(__file__).resolve().parents[2] / "launch"
# Most seconds that ranks whose driver was killed may take to commit and end.
_COMMIT_SECONDS = 120.0
# Exit code of a command that refused its settings or its data: another try would end in the same way.
_REFUSED = 2


class StoppedError(Exception):
    """A run was asked to stop, and committed its state: the experiment stops, too."""


@dataclass(frozen=True)
class RunSpec:
    """A run of an experiment. command: of launch/. file: YAML of its settings. overrides: settings over those. config:
    both together.

    group: see `Row`. needs: names of the runs that must be done before. choose: rows by name -> this run with what is
    chosen by those that it needs, None while they have not ended. flops: that it adds. trunk: with a cooldown, the run
    at a constant rate whose checkpoint of trunk_steps this one continues; several runs share it. facts: fields of its
    row that are known beforehand.
    """

    name: str
    command: str
    file: str
    overrides: list[str]
    config: RunConfig
    group: str = ""
    needs: tuple[str, ...] = ()
    choose: Callable[[Mapping[str, Row]], "RunSpec | None"] | None = None
    flops: float = 0.0
    trunk: "RunSpec | None" = None
    trunk_steps: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.config.out) / self.config.name

    @property
    def seed(self) -> int:
        return self.config.seed


@dataclass(frozen=True)
class ScoresFile:
    """The fields of a run's scores.json that are checked. Only a run that predicts masked patches has no top1.

    loss: None if not finite. trained_by: runs that trained on these images; "" for none.
    """

    loss: float | None
    num_samples: int
    top1: float | None = None
    top5: float | None = None
    top1_effective_images: float | None = None
    top5_effective_images: float | None = None
    trained_by: str = ""


def make_spec(name: str, command: str, file: str, overrides: list[str], **more: Any) -> RunSpec:
    """Raises UserError for settings that cannot be used."""
    config = schema.load(RunConfig, file, overrides)
    objectives.check(config)
    return RunSpec(name, command, file, overrides, config, **more)


# -------------------------------------------------------------------- running one
def run_spec(spec: RunSpec, engine: ExperimentConfig, output: IO[bytes], track: TrackConfig | None = None) -> None:
    """Do a run, from the checkpoint of its trunk if it has one, unless it has ended. track: where it is sent to; None
    as its settings say.

    Raises UserError when the command refuses it, DivergedError, LostError when a process died (it is tried again),
    StoppedError.
    """
    is_left, trunk = row_of(spec).state not in ("done", "diverged"), spec.trunk
    if trunk and is_left and max(_steps_of(spec), default=0) < spec.trunk_steps:
        # It finishes once for each of the runs that share it.
        _run(trunk, engine, output, track, lambda: max(_steps_of(trunk), default=0) >= spec.trunk_steps)
        # A trunk that has gone on to a longer run may have removed this checkpoint. The run trains these steps itself
        # then.
        if spec.trunk_steps in _steps_of(trunk):
            _plant(spec)
    _run(spec, engine, output, track, lambda: row_of(spec).state == "done")


def _run(
    spec: RunSpec, engine: ExperimentConfig, output: IO[bytes], track: TrackConfig | None, is_done: Callable[[], bool]
) -> None:
    def has_stopped() -> bool:
        return is_done() or row_of(spec).state == "diverged"

    if not has_stopped():
        wait_until_free(spec.folder)
        for file, kind in ((SCORES_FILE, ScoresFile), (PROBE_FILE, dict[str, Any])):
            if json_record.read_or_none(spec.folder / file, kind) is None:  # So that it is evaluated again.
                (spec.folder / file).unlink(missing_ok=True)
        overrides = spec.overrides
        if track is not None and spec.config.track.enabled:
            overrides = [*overrides, f"track.parent_run={track.parent_run}", f"track.uri={track.uri}"]
        launcher = engine.launcher
        if not launcher and engine.gpus > 1:
            launcher = f"torchrun --standalone --nproc_per_node {engine.gpus}"
        begin = _status_time(spec.folder)
        code = start_command(spec.command, ["--config", spec.file, *overrides], launcher, output)
        if not has_stopped():
            if code == RESUME:
                raise StoppedError(f"{spec.folder} was asked to stop")
            text = f"{spec.folder} failed (exit code {code}){_own_words(spec.folder, begin)}. See {output.name}."
            raise UserError(text) if code == _REFUSED else LostError(text)
    row = row_of(spec)
    if row.state == "diverged":
        raise DivergedError(row.reason or f"{spec.name} diverged")


def start_command(command: str, arguments: Sequence[str], launcher: str, output: IO[bytes]) -> int:
    """Run launch/<command>.py by a launcher (empty: one process); returns its exit code. output: of both streams.

    Raises UserError where there is no such launcher.
    """
    start = shlex.split(launcher) or [sys.executable]
    # Find the launchers beside this interpreter even if its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    check_program(start[0], path)
    return subprocess.run(
        [*start, str(_COMMANDS / f"{command}.py"), *arguments],
        env={**os.environ, "PATH": path},
        stdout=output,
        stderr=subprocess.STDOUT,
        # A command whose driver or Ray worker is killed commits its state and ends, so that another can continue it.
        preexec_fn=dying_with_parent(signal.SIGTERM),
    ).returncode


def wait_until_free(folder: Path) -> None:
    """Wait for the ranks of a start whose driver or worker was killed: they commit a checkpoint before they end.

    Raises LostError if a process still has the folder after that time.
    """
    if (who := holder(folder)) is None:
        return
    with waits.waiting(f"{who} to leave {folder}", _COMMIT_SECONDS) as wait:
        while (who := holder(folder)) is not None and wait.left > 0:
            time.sleep(0.5)
    if who:
        raise LostError(f"{folder} is in use by {who}.")


def _status_time(folder: Path) -> int:
    """When a run last wrote its status. A process that dies before it has the folder leaves that of another start."""
    file = folder / "status.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def _own_words(folder: Path, begin: int) -> str:
    """Why a run says that it failed, if it has said anything since this `_status_time`."""
    status = read_status(folder) if _status_time(folder) != begin else None
    if status is None:
        return ""
    reason = status.reason or next((failure.error for failure in read_failures(folder).values()), "")
    return f": {reason}" if reason else ""


# -------------------------------------------------------------------- runs that share their first steps
def _checkpoints(spec: RunSpec) -> Checkpoints:
    return Checkpoints(checkpoint_folder(spec.config))


def _steps_of(spec: RunSpec) -> list[int]:
    """The steps of which a run has checkpoints."""
    return [step_of(path) for path in _checkpoints(spec).candidates()]


def _plant(spec: RunSpec) -> None:
    """Give a run the checkpoint of its trunk, from which it resumes. Its files are links, where a disk has them."""
    assert spec.trunk
    (source,) = [path for path in _checkpoints(spec.trunk).candidates() if step_of(path) == spec.trunk_steps]
    target = _checkpoints(spec)
    path = Path(str(target.begin(spec.trunk_steps, "planted")))  # study.py refuses checkpoints in a bucket.
    shutil.rmtree(path)  # What a killed call left.
    shutil.copytree(str(source), path, copy_function=_link)
    final = path.parent / source.name
    path.rename(final)
    target.point_at(final)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# -------------------------------------------------------------------- what became of one
def settings_of(spec: RunSpec) -> dict[str, Any]:
    """The settings of a run by dotted name that its result depends on."""
    known = objectives.facts(spec.config.train.loss)
    found = schema.decisive(objectives.flat_settings(spec.config), known, "comparison")
    if spec.needs and Path(str(found.get("init.weights"))).parent == Path(spec.config.out):
        del found["init.weights"]  # A path in another run of the experiment, which may be moved.
    return found


def row_of(spec: RunSpec, hours: float | None = None) -> Row:
    """The row of a run, from its folder. hours: that it took, if it is done."""
    row = Row(
        spec.name,
        spec.group,
        spec.seed,
        folder=str(spec.folder),
        run_id=run_id_of(spec.folder) or "",
        parent=spec.needs[0] if spec.needs else "",
        **spec.facts,
    )
    with contextlib.suppress(UserError):  # It has not begun.
        origin = PageFolder(spec.folder).read_facts().facts.origin
        row = replace(row, weights=origin.sha256 if origin else "")
    try:
        status = json_record.read(spec.folder / "status.json", Status)
        if status.status not in ("finished", "diverged"):
            return row
        then = settings_of(replace(spec, config=read_settings(spec.folder)))
        if other := schema.differences(then, settings_of(spec), {}):
            listed = "; ".join(map(str, other))
            raise UserError(f"{spec.folder} was trained with other settings: {listed}.")
        if status.status == "diverged":
            return replace(row, state="diverged", reason=status.reason)
        # A run that measures nothing of a held-out split has no scores.json.
        is_evaluated = objectives.metrics(spec.config)["scores"]
        scores = json_record.read(spec.folder / SCORES_FILE, ScoresFile) if is_evaluated else None
        found = _scores(spec, scores)
    except FileNotFoundError as error:
        is_begun = any((spec.folder / name).exists() for name in (SETTINGS_FILE, SCORES_FILE))
        return replace(row, state="damaged", reason=f"{error.filename} is missing.") if is_begun else row
    except (PermissionError, UserError) as error:
        return replace(row, state="damaged", reason=str(error))
    if scores and scores.loss is None:
        why = f"{spec.name} has no finite loss on the images it was scored on"
        return replace(row, state="diverged", reason=why)
    values, nums, effective = ({name: one[i] for name, one in found.items() if one[i] is not None} for i in range(3))
    return replace(
        row,
        state="done",
        scores=values,
        num_test=nums,
        effective_images=effective,
        loss=scores.loss if scores else None,
        hours=hours,
    )


def _scores(spec: RunSpec, scores: ScoresFile | None) -> dict[str, tuple[Any, Any, Any]]:
    """Name -> (score, number of its test images if known, effective number of images in groups)."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    if scores:
        found["top1"] = scores.top1, scores.num_samples, scores.top1_effective_images
        found["top5"] = scores.top5, scores.num_samples, scores.top5_effective_images
    with contextlib.suppress(FileNotFoundError):  # Not every run has probes.
        content = json_record.read(spec.folder / PROBE_FILE, dict[str, Any])
        main, *_ = spec.config.probe.tested
        first = content["first"] if spec.config.init.weights else {}
        for data, of_data in {main: content, **content.get("also", {})}.items():
            probe = probe_metrics(of_data, data)
            for metric, value in probe.items():
                if metric_of(metric).is_share:
                    name = metric.removeprefix(f"{data}_") if data == main else metric
                    rest = of_data.get("num_samples"), probe.get(f"{metric}_effective_images")
                    found[name] = value, *rest
                    found[f"{START}{name}"] = first.get(metric), *rest
    if spec.config.checkpoint.best:
        kept = _checkpoints(spec).kept()
        if kept.metric and kept.metric.endswith("top1"):
            found["best_top1"] = kept.value, *found.get("top1", (None, None, None))[1:]
    return {name: score for name, score in found.items() if score[0] is not None}
