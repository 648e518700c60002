"""Sends run folders to MLflow after the fact: what a run could not send, or all of it to another store."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.checkpoint.store import Checkpoints, checkpoint_folder
from pipeline.lifecycle.logged_models import logged_models
from pipeline.lifecycle.run_folder import holder, last_end_in_words, read_settings, read_status
from pipeline.monitor.mlflow.refusals import one_line
from pipeline.monitor.mlflow.sender import FolderInUseError
from pipeline.monitor.mlflow.state import STATE_FILE, read_states
from pipeline.monitor.mlflow.store import is_refusal
from pipeline.monitor.page_folder import PAGE, End, PageFolder
from pipeline.monitor.run_page import ModelFacts, hide_passwords
from pipeline.monitor.tracking import default_uri, make_sender
from pipeline.settings.commands.reports import SyncConfig
from pipeline.settings.run import RunConfig, TrackConfig

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def run(config: SyncConfig) -> list[str]:
    """Send each run folder; prints a line for each, and returns the IDs of the MLflow runs.

    A folder that another process uses or sends at this moment is left to it, with a line. What the store refuses is named, and the
    rest is sent, as are the others of a damaged run. Raises UserError for a folder without runs, for a store that cannot be reached
    (what was sent until then stays), and, at the end, for damaged runs.
    """
    folders = [folder for given in config.runs for folder in find_runs(Path(given))]
    sent, num_damaged = [], 0
    for folder in folders:
        if who := holder(folder):
            print(f"{folder}: in use by {who}, which sends it")
            continue
        try:
            sent.append(send(folder, config.uri))
        except FolderInUseError as error:
            print(f"{folder}: not sent, because MLflow {error}")
        except _DamagedRunError as error:
            if len(folders) == 1:
                raise
            print(f"{folder}: not sent: {error}")
            num_damaged += 1
    if num_damaged:
        raise UserError(f"{num_damaged:,} of {counted(len(folders), 'run')} could not be read and sent, see above.")
    return sent


class _DamagedRunError(UserError):
    """What a run folder has for MLflow cannot be read."""


def find_runs(path: Path) -> list[Path]:
    """The run folders at or below a path. Raises UserError if there are none."""
    if (path / PAGE).is_dir():
        return [path]
    found = sorted(facts.parents[1] for facts in path.glob(f"**/{PAGE}/facts.json"))
    if not found:
        raise UserError(f"{path} contains no run with {PAGE}/facts.json. Name a run folder, or a folder of runs.")
    return found


def send(folder: Path, uri: str = "") -> str:
    """Send what MLflow lacks of a run folder that no process uses; returns the ID of the MLflow run.

    Raises FolderInUseError while another process sends it, and UserError as `run`.
    """
    page = PageFolder(folder)
    try:
        saved, settings = page.read_facts(), _settings(folder)
    except UserError as error:
        raise _DamagedRunError(str(error)) from error
    for refused in page.refused(saved.facts.artifacts):
        print(f"{folder}: not sent: {refused}")
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "") or next(reversed(read_states(folder / STATE_FILE)[0]), "")
    uri = uri or (settings.track.uri if settings else "") or default_uri(folder.parent)
    if "***" in uri:
        raise UserError(
            f"{folder} is tracked at {uri}, whose password is not kept: give uri=... or MLFLOW_TRACKING_URI."
        )

    def models(ended: bool) -> list[ModelFacts]:
        return logged_models(Checkpoints(checkpoint_folder(settings)), ended) if settings else []

    track = settings.track if settings else TrackConfig()
    track = replace(track, uri=uri, experiment=saved.experiment)
    sender = make_sender(track, folder.parent, folder, saved.facts, None, find_models=models)
    try:
        sender.send_all(page.read_end() or _end_without_word(folder))
    except FolderInUseError:
        raise
    except Exception as error:  # Whatever the server or its client raises.
        if is_refusal(error):
            raise UserError(f"{folder}: MLflow at {hide_passwords(uri)} refused the run ({one_line(error)}).") from None
        raise UserError(
            f"{folder}: MLflow at {hide_passwords(uri)} did not take all of it ({one_line(error)}). The same command sends the rest."
        ) from None
    print(f"{folder}: sent to {hide_passwords(uri)}, run {sender.run_id}")
    for name, reason in sender.refusals.names.items():
        print(f"{folder}: without {name}, which this MLflow refuses ({reason}): it will never arrive there")
    return sender.run_id


def _end_without_word(folder: Path) -> End:
    """How a run ended whose process could not say it: killed, or lost with its host."""
    status = read_status(folder)
    name = _MLFLOW_STATUS.get(status.status, "FAILED") if status else "FINISHED"
    return End(name, {"outcome": last_end_in_words(folder)} if status else {})


def _settings(folder: Path) -> RunConfig | None:
    """The settings of a training run; None for a report."""
    with contextlib.suppress(FileNotFoundError):
        return read_settings(folder)
    return None
