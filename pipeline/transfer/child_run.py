"""Runs that a grid or a study starts as processes of their own. They resume from their folders, so that they can be killed at any time."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from pipeline import json_record
from pipeline.errors import UserError
from pipeline.lifecycle.run_folder import Status, read_status
from pipeline.process import die_with_parent
from pipeline.settings import schema
from pipeline.settings.run import RunConfig, TrackConfig
from pipeline.words import counted

_COMMANDS = Path(__file__).resolve().parents[2] / "launch"


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
class Scores:
    """The fields that are read of a run's scores.json."""

    top1: float
    loss: float
    num_samples: int


def make_child(name: str, file: str, overrides: list[str]) -> ChildRun:
    """Raises UserError for settings that cannot be used."""
    return ChildRun(name, file, overrides, schema.load(RunConfig, file, overrides))


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
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run launch/<command>.py by a launcher (empty: one process); returns its exit code. output: of both streams; None is ours.

    Raises UserError where there is no such file.
    """
    script = _COMMANDS / f"{command}.py"
    if not script.exists():  # A worker of a Ray cluster whose job brought the packages alone.
        raise UserError(
            f"{socket.gethostname()} has no {script}. On a Ray cluster, use: ray job submit --working-dir . -- python launch/..."
        )
    start = shlex.split(launcher) or [sys.executable]
    environment = os.environ if environment is None else environment
    # Find the launchers beside this interpreter even if its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return subprocess.run(
        [*start, str(script), *arguments],
        env={**environment, "PATH": path},
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        # A command whose driver or Ray worker is killed commits its state and ends, so that another can continue it.
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    ).returncode


def how_ended(run: ChildRun) -> Status | None:
    """How a run with exactly these settings finished or diverged; None if it must be started, or continued."""
    status = read_status(run.folder)
    if status is None or status.status not in ("finished", "diverged"):
        return None
    finished = _read_settings(run.folder)
    # Where a run was sent to does not change what came of it.
    if finished is None or replace(finished, track=run.config.track) != run.config:
        return None
    return status


def read_outcome(run: ChildRun) -> Scores | str | None:
    """Scores of a run that has finished with exactly these settings; the reason if it diverged; None if it must be run."""
    status = how_ended(run)
    if status is None:
        return None
    return status.reason if status.status == "diverged" and status.reason else _read_scores(run)


def _read_settings(folder: Path) -> RunConfig | None:
    """The settings that a run was started with last; None, with a message if they are damaged, when there are none."""
    file = folder / "config.json"
    try:
        # Built, so that settings which did not exist then have their defaults.
        return schema.build(RunConfig, json_record.read(file, dict[str, Any]), str(file))
    except FileNotFoundError:
        return None
    except UserError as error:
        print(f"{error} The run is started again, which writes it anew.")
        return None


def _read_scores(run: ChildRun) -> Scores | None:
    """The last evaluation of a run; None if there is none. A damaged file is removed with a message."""
    file = run.folder / "scores.json"
    try:
        scores = json_record.read(file, Scores)
        if not (0 <= scores.top1 <= 1 and scores.num_samples > 0):
            raise UserError(f"{file}: top1 = {scores.top1} of {counted(scores.num_samples, 'sample')} is out of range.")
        return scores
    except FileNotFoundError:
        return None
    except UserError as error:
        file.unlink()  # Without the file, the run, which is trained already, is only evaluated again.
        print(f"{error} It is removed, and the run is evaluated again.")
        return None
