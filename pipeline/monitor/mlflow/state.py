"""mlflow.json: which MLflow run belongs to a run folder, and which part of metrics.jsonl it has received."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes, replacing
from pipeline.base.json_record import Count, Limits
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.committed import run_of_checkpoint

STATE_FILE = "mlflow.json"
# Tags of an MLflow run: the identity of its run folder, by which it is found when mlflow.json is damaged, and the folder's path.
FOLDER_TAG, _PATH_TAG = "run_folder", "run_folder_path"


@dataclass(frozen=True)
class SentModel:
    """A checkpoint that MLflow shows as a logged model. num_scores: sent for it. version: of the registered model, if any."""

    model_id: str
    roles: tuple[str, ...]
    num_scores: int = 0
    version: str | None = None


@dataclass
class SyncState:
    """State of one MLflow run; there is one for each tracking URI that the folder was sent to.

    back_to: points of later steps must be deleted before more are sent; None if there are none.
    replaces: ID of an MLflow run that this one replaces, and that must still be deleted.
    artifacts: name of each uploaded file -> its size and time. models: SHA-256 of the weights -> the logged model.
    Both mappings are replaced, never changed: another thread may be writing the state.
    """

    run_id: str | None = None
    sent_bytes: Count = 0
    has_parameters: bool = False
    back_to: Annotated[int, Limits(-1, 2**53 - 1)] | None = None
    replaces: str | None = None
    artifacts: dict[str, str] = field(default_factory=dict)
    models: dict[str, SentModel] = field(default_factory=dict)


def read_states(path: Path) -> tuple[dict[str, SyncState], str]:
    """Returns (tracking URI without its password -> state, reason why the file is damaged); both are empty without a file."""
    try:
        return json_record.read(path, dict[str, SyncState]), ""
    except FileNotFoundError:
        return {}, ""
    except UserError as error:
        reason = str(error).removeprefix(str(path)).strip(" :.").removesuffix(": the file is damaged")
        return {}, f"damaged ({reason})"


def write_states(path: Path, states: dict[str, SyncState]) -> None:
    """Replace the file, also while another process does: a run may start while launch/track_sync.py sends it.

    The state of the tracking URI in use must be the last.
    """
    with replacing(path) as file:
        file.write(as_bytes(json.dumps({uri: asdict(state) for uri, state in states.items()}, indent=1)))


def sent_to(folder: Path, uri: str) -> SyncState:
    """What a tracking URI has received of a folder; without a run_id if it has no run of it."""
    return read_states(folder / STATE_FILE)[0].get(hide_passwords(uri), SyncState())


def tracked_folder_of(weights: str) -> Path | None:
    """The folder of the tracked run that made weights: that they lie in, or that keeps its checkpoints elsewhere
    (checkpoint.folder); None for other weights, and for a run that was not tracked.
    """
    path = Path(weights).absolute()
    keeper = run_of_checkpoint(path)
    return next((folder for folder in (*filter(None, [keeper]), path, *path.parents[:3]) if run_id_of(folder)), None)


def run_of_weights(weights: str) -> str | None:
    """ID of the MLflow run that made weights; None as above."""
    folder = tracked_folder_of(weights)
    return run_id_of(folder) if folder else None


def run_id_of(folder: Path) -> str | None:
    """ID of a folder's MLflow run at the tracking URI that was used last; None if it was never sent."""
    try:
        states, _ = read_states(folder / STATE_FILE)
    except OSError:
        return None
    return next((state.run_id for state in reversed(states.values()) if state.run_id), None)


def folder_id(folder: Path) -> str:
    """The same on every host that shares the folder, another for a folder of the same path on another disk."""
    named = os.fsencode(f"{folder.resolve()} {folder.stat().st_ino}")  # A name need not be UTF-8.
    return hashlib.sha256(named).hexdigest()[:32]


def original_of(folder: Path, run_id: str, tags: Mapping[str, str]) -> Path | None:
    """The folder of which `folder` is a copy, if the MLflow run that both name is still that one's. tags: of the run.

    None if there is no such folder here any more: it was moved, or is on another host.
    """
    other = Path(tags.get(_PATH_TAG, ""))
    with contextlib.suppress(OSError, ValueError):  # It is missing, or no path at all.
        names_run = folder_id(other) == tags.get(FOLDER_TAG) and run_id_of(other) == run_id
        if names_run and other.is_absolute() and not other.samefile(folder):
            return other
    return None
