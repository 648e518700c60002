"""Runs that a grid or a study starts as processes of their own. They resume from their folders, so that they can be killed at any time."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.checkpoint.store import Checkpoints, checkpoint_folder, read_state
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.data.storage.retry import Retry
from pipeline.lifecycle.run_folder import Status, holder, read_settings, refuse_checkpoint_of_another
from pipeline.monitor.run_page import hide_passwords
from pipeline.process import waits
from pipeline.process.committed import checkpoints_of
from pipeline.process.start import check_program, dying_with_parent
from pipeline.settings import changes, schema
from pipeline.settings.changes import Change
from pipeline.settings.run import RunConfig, TrackConfig

_COMMANDS = Path(__file__).resolve().parents[2] / "launch"
_SCORES, _PROBE = "scores.json", "probe.json"
# Most seconds that ranks whose driver was killed may take to commit and end.
_COMMIT_SECONDS = 120.0


@dataclass(frozen=True)
class ChildRun:
    """One run of a grid or a study. file: YAML of its settings. overrides: settings over those. config: both together."""

    name: str
    file: str
    overrides: list[str]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out) / self.config.name


@dataclass(frozen=True)
class ScoresFile:
    """The fields of a run's scores.json that are checked. Only a run that predicts masked patches has no top1.

    loss: None where it is no finite number. trained_by: runs that trained on these images; "" for none.
    """

    loss: float | None
    num_samples: int
    top1: float | None = None
    top5: float | None = None
    top1_effective_images: float | None = None
    top5_effective_images: float | None = None
    trained_by: str = ""

    @property
    def effective_images(self) -> float:
        """Of top1, see `effective_number`; num_samples without groups."""
        return self.num_samples if self.top1_effective_images is None else self.top1_effective_images


def make_child(name: str, file: str, overrides: list[str]) -> ChildRun:
    """Raises UserError for settings that cannot be used."""
    config = schema.load(RunConfig, file, overrides)
    objectives.check(config)
    return ChildRun(name, file, overrides, config)


def with_track(run: ChildRun, track: TrackConfig) -> ChildRun:
    """The run with other settings of `track`: its parent and where it is sent to."""
    overrides = [f"track.parent_run={track.parent_run}"] if track.enabled else []
    if track.uri != run.config.track.uri:
        overrides.append(f"track.uri={track.uri}")
    return replace(run, config=replace(run.config, track=track), overrides=[*run.overrides, *overrides])


def start_command(
    command: str,
    arguments: Sequence[str],
    launcher: str = "",
    output: IO[bytes] | None = None,
) -> int:
    """Run launch/<command>.py by a launcher (empty: one process); returns its exit code. output: of both streams; None is ours.

    Raises UserError where there is no such file or no such launcher.
    """
    script = _COMMANDS / f"{command}.py"
    if not script.exists():  # A worker of a Ray cluster whose job brought the packages alone.
        raise UserError(
            f"{socket.gethostname()} has no {script}. On a Ray cluster, use: ray job submit --working-dir . -- python launch/..."
        )
    start = shlex.split(launcher) or [sys.executable]
    # Find the launchers beside this interpreter even if its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    check_program(start[0], path)
    return subprocess.run(
        [*start, str(script), *arguments],
        env={**os.environ, "PATH": path},
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        # A command whose driver or Ray worker is killed commits its state and ends, so that another can continue it.
        preexec_fn=dying_with_parent(signal.SIGTERM),
    ).returncode


def wait_until_free(folder: Path) -> str:
    """Wait for the ranks of a start whose driver or worker was killed: they commit a checkpoint before they end.

    Returns who has the folder after that time; "" if nobody has.
    """
    if (who := holder(folder)) is None:
        return ""
    with waits.waiting(f"{who} to leave {folder}", _COMMIT_SECONDS) as wait:
        while (who := holder(folder)) is not None and wait.left > 0:
            time.sleep(0.5)
    return who or ""


def how_ended(run: ChildRun) -> Status | None:
    """How a run with these settings finished or diverged, wherever its folder was then; None if it must be started, or continued."""
    return _look(run)[0]


def why_unusable(run: ChildRun) -> str:
    """Why the files of a run cannot be used: damaged, missing after its end, or of other settings; empty if that is not so.

    Empty as well for a run that has not begun, or not ended.
    """
    status, problem = _look(run)
    if problem or status is None or status.status == "diverged":
        return problem
    return "; ".join(_unreadable_scores(run).values())


def remove_unreadable_scores(run: ChildRun) -> None:
    """Remove damaged files of the scores of a run, so that its next start evaluates it again, however far it is trained."""
    for file in _unreadable_scores(run):
        file.unlink(missing_ok=True)


def trained_otherwise(run: ChildRun) -> str:
    """How settings differ from those that a run was trained with so far; empty if it is to go on, or has no checkpoint.

    It would go on from its checkpoint, partly trained with each, and be reported as one of today's settings. Raises UserError if
    neither its config.yaml nor a checkpoint tells the settings, and if its checkpoint is of another run.
    """
    problem, changed = "", list[Change]()
    try:
        changed = _trained_changes(run, objectives.flat_settings(read_settings(run.folder)))
        if not changed and how_ended(run) is not None:
            return ""
    except FileNotFoundError:
        problem = f"{run.folder / 'config.yaml'} is missing."
    except UserError as error:
        problem = str(error)
    found = _saves(run)
    if not found:
        return ""
    # It goes on from a checkpoint whatever its config.yaml says.
    for path in found if problem or not changed else []:
        identity: dict[str, Any] | None = None
        with contextlib.suppress(UserError):
            identity = read_state(path).identity
        if identity is not None:
            refuse_checkpoint_of_another(path, identity, objectives.flat_settings(run.config))
            changed, problem = _trained_changes(run, identity), ""
            break
    inside = (run.folder / "checkpoints").absolute()
    elsewhere = list(dict.fromkeys(str(path.parent) for path in found if path.parent != inside))
    if problem:
        folders = " and ".join([str(run.folder), *elsewhere])
        refusal = f"{problem} No checkpoint tells the run's settings either: remove {folders} to train it again."
        raise UserError(hide_passwords(refusal))
    said = [*map(str, changed), *(f"with checkpoints in {place}" for place in elsewhere if changed)]
    return hide_passwords("; ".join(said))


def _trained_changes(run: ChildRun, before: Mapping[str, Any]) -> list[Change]:
    """What differs from earlier settings, by dotted name, where a run that goes on would be trained partly with each."""
    # Another length is another schedule of the rate, although a single run may train on.
    changed = _changes_since(run, before)
    return [change for change in changed if change.fact.means("result") or change.name == "train.length"]


def _saves(run: ChildRun) -> list[AnyPath]:
    """A run's checkpoints, newest first, then unfinished ones, where they are to be now, and then where its last start kept them."""
    retry = Retry(60 * run.config.data.retry_minutes, "data.retry_minutes")
    before = to_path(str(checkpoints_of(run.folder)), retry)
    places = [checkpoint_folder(run.config), before.absolute() if isinstance(before, Path) else before]
    stores = [Checkpoints(place) for place in {str(place): place for place in places}.values()]
    return [path for store in stores for path in (*store.candidates(), *store.unfinished())]


def is_evaluated(run: ChildRun) -> bool:
    """Whether a run measures anything of a held-out split, and has a scores.json then."""
    return bool(objectives.metrics(run.config)["scores"])


def read_evaluation(run: ChildRun) -> ScoresFile:
    """The last evaluation of a run. Raises FileNotFoundError, and UserError for a damaged file."""
    file = run.folder / _SCORES
    found = json_record.read(file, ScoresFile)
    if found.top1 is None and objectives.kind(run.config.train.loss).predicts_classes:
        raise UserError(f"{file}: top1 is missing.")
    return found


def read_outcome(run: ChildRun) -> ScoresFile | str | None:
    """Scores of a run that has finished with these settings; the reason if it diverged; None if it must be run."""
    status = how_ended(run)
    if status is None:
        return None
    if status.status == "diverged":
        return status.reason or f"{run.name} diverged"
    try:
        found = read_evaluation(run)
    except (FileNotFoundError, UserError):
        return None
    if found.top1 is None:
        return None
    if found.loss is None:
        return f"{run.name} has no finite loss on the images it was scored on"
    return found


def _look(run: ChildRun) -> tuple[Status | None, str]:
    """Returns (how a run with these settings ended, why its folder does not tell; None and "" if it has not ended)."""
    file = run.folder / "config.yaml"
    try:
        status = json_record.read(run.folder / "status.json", Status)
        if status.status not in ("finished", "diverged"):
            return None, ""
        # Built, so that settings which did not exist then have their defaults.
        before = objectives.flat_settings(read_settings(run.folder))
    except FileNotFoundError as error:
        if not file.exists() and not (run.folder / _SCORES).exists():  # Nothing was begun.
            return None, ""
        return None, f"{error.filename or error} is missing."
    except PermissionError as error:  # It is of another user.
        return None, f"{error.filename or run.folder}: permission denied."
    except UserError as error:
        return None, str(error)
    if other := _changes_since(run, before):
        return None, f"{run.folder} was trained with other settings: {'; '.join(map(str, other))}."
    return status, ""


def _changes_since(run: ChildRun, before: Mapping[str, Any]) -> list[Change]:
    """What differs from the settings of an earlier start, by dotted name, where that means that the two cannot be compared."""
    then, now = (_moved_along(settings) for settings in (before, objectives.flat_settings(run.config)))
    return changes.differences(then, now, objectives.facts(run.config.train.loss), "comparison")


def _moved_along(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, where weights of a run beside it are named by their place there, as both move together."""
    weights, out = settings.get("init.weights"), str(settings.get("out"))
    if weights and "://" not in str(weights) and Path(str(weights)).is_relative_to(out):
        return {**settings, "init.weights": f"beside it: {Path(str(weights)).relative_to(out)}"}
    return dict(settings)


def _unreadable_scores(run: ChildRun) -> dict[Path, str]:
    """Files of the scores of a finished run that are damaged or missing, with the reason."""
    unreadable = {}
    try:
        if is_evaluated(run):
            read_evaluation(run)
    except FileNotFoundError:
        unreadable[run.folder / _SCORES] = f"{run.folder / _SCORES} is missing."
    except UserError as error:
        unreadable[run.folder / _SCORES] = str(error)
    try:
        json_record.read(run.folder / _PROBE, dict[str, Any])
    except FileNotFoundError:
        pass  # Not every run has probes.
    except UserError as error:
        unreadable[run.folder / _PROBE] = str(error)
    return unreadable
