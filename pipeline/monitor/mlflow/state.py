"""mlflow.json: which MLflow run belongs to a run folder, and what of the folder it has."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.monitor.run_page import hide_passwords
from pipeline.process.committed import run_of_checkpoint

STATE_FILE = "mlflow.json"


@dataclass(frozen=True)
class SentModel:
    """A checkpoint that MLflow shows as a logged model. num_scores: sent for it."""

    model_id: str
    roles: tuple[str, ...]
    num_scores: int = 0


@dataclass
class Sent:
    """The parts of a run folder that one MLflow store has received.

    key: of the run there, by which it is found if a kill came before its run_id was written. is_described: it has
    parameters and data sets. last: metric -> step of its last point (its time, for a run without steps, which logs all
    at step 0). rollbacks: steps that the run went back to: points of later steps were sent twice. files: name -> size
    and time. models: SHA-256 -> logged model. The mappings are replaced, never changed: another thread may be writing
    the state.
    """

    key: str = ""
    run_id: str = ""
    is_described: bool = False
    last: dict[str, int] = field(default_factory=dict)
    rollbacks: tuple[int, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    models: dict[str, SentModel] = field(default_factory=dict)


def read_states(path: Path) -> dict[str, Sent]:
    """Returns destination -> state, the one used last is the last; empty without a file. Raises UserError for a
    damaged one.
    """
    try:
        return json_record.read(path, dict[str, Sent])
    except FileNotFoundError:
        return {}


def sent_to(folder: Path, uri: str) -> Sent:
    """What a tracking URI has received of a folder; without a run_id if it has no run of it."""
    return read_states(folder / STATE_FILE).get(hide_passwords(uri), Sent())


def last_uri(folder: Path) -> str:
    """The tracking URI that a folder was sent to last, or tried, without its password; "" if there is none."""
    return next(reversed(read_states(folder / STATE_FILE)), "")


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
    with contextlib.suppress(OSError, UserError):
        return next((sent.run_id for sent in reversed(read_states(folder / STATE_FILE).values()) if sent.run_id), None)
    return None
