"""Exports run folders after the fact: what a run could not send, or all of it to another MLflow server."""

import os
from dataclasses import replace
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.checkpoint.store import Checkpoints, checkpoint_folder
from pipeline.cluster.logged_models import logged_models
from pipeline.cluster.status_files import SETTINGS_FILE, holder, last_end_in_words, read_settings, read_status
from pipeline.monitor.export import last_uri
from pipeline.monitor.page_folder import RUN_FILE, End, PageFolder
from pipeline.monitor.run_page import ModelFacts
from pipeline.monitor.tracking import default_uri, exports_of
from pipeline.settings.commands.reports import SyncConfig
from pipeline.settings.run import TrackConfig

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}


def run(config: SyncConfig) -> None:
    """Send each run folder; prints a line for each.

    A folder that another process uses is left to it, with a line. Raises UserError for a folder without runs, and at
    the end if a run could not be read or sent.
    """
    folders = [folder for given in config.runs for folder in find_runs(Path(given))]
    num_failed = 0
    for folder in folders:
        if who := holder(folder):
            print(f"{folder}: in use by {who}, which sends it")
            continue
        try:
            send(folder, config.uri)
        except UserError as error:
            if len(folders) == 1:
                raise
            print(f"{folder}: not sent: {error}")
            num_failed += 1
    if num_failed:
        raise UserError(f"{num_failed:,} of {counted(len(folders), 'run')} could not be read and sent, see above.")


def find_runs(path: Path) -> list[Path]:
    """The run folders at or below a path. Raises UserError if there are none."""
    found = [path] if (path / RUN_FILE).exists() else sorted(file.parent for file in path.glob(f"**/{RUN_FILE}"))
    if not found:
        raise UserError(f"{path} contains no run with {RUN_FILE}. Name a run folder, or a folder of runs.")
    return found


def send(folder: Path, uri: str = "") -> None:
    """Send what MLflow lacks of a run folder that no process uses. Raises UserError as `run`."""
    page = PageFolder(folder)
    saved = page.read_facts()
    settings = read_settings(folder) if (folder / SETTINGS_FILE).exists() else None
    track = settings.track if settings else TrackConfig()
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "") or last_uri(folder) or track.uri
    uri = uri or default_uri(folder.parent)
    if "***" in uri:
        raise UserError(
            f"{folder} is tracked at {uri}, whose password is not kept: give uri=... or MLFLOW_TRACKING_URI."
        )

    def models(ended: bool) -> list[ModelFacts]:
        return logged_models(Checkpoints(checkpoint_folder(settings)), ended) if settings else []

    track = replace(track, enabled=True, uri=uri, experiment=saved.experiment)
    if (end := saved.end) is None:  # Its process could not say it: killed, or lost with its host.
        status = read_status(folder)
        name = _MLFLOW_STATUS.get(status.status, "FAILED") if status else "FINISHED"
        page.end(end := End(name, {"outcome": last_end_in_words(folder)} if status else {}))
    for export in exports_of(track, folder.parent, folder, saved.facts, find_models=models):
        try:
            export.send_all(end)
        except Exception as error:  # Whatever the server or its client raises.
            raise UserError(f"{folder}: {export.what_failed(error)}. The same command sends the rest.") from None
        run_id = f", run {export.sent.run_id}" * bool(export.sent.run_id)
        print(f"{folder}: sent to {export.exporter.title}{run_id}")
