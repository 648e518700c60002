"""mlflow.json: which MLflow run belongs to a run folder. Its content is explained in `monitor/export.py`."""

import contextlib
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.monitor.export import read_states
from pipeline.process.committed import run_of_checkpoint

STATE_FILE = "mlflow.json"


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
