"""Finds the committed and complete checkpoints of a local folder, for readers of weights. Standard library only."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.base import json_record
from pipeline.base.errors import UserError, is_outage

NAME = re.compile(r"step-(\d{8,})")
CHECKSUMS, LATEST = "checksums.json", "latest"
GONE = "it is gone. A run in training removes its older checkpoints: name one that is kept, or a copy"


@dataclass(frozen=True)
class Checksum:
    """Size of a file, and its SHA-256 or, of a rank's file, its XXH3-128 (hex; "" for the other), which takes a tenth
    of the time.
    """

    bytes: int
    sha256: str = ""
    xxh128: str = ""


def read_checksums(path: Any) -> dict[str, Checksum] | None:
    """Returns checksums.json of a checkpoint (a local or bucket path) by file name; None if it is missing or damaged.

    Raises OSError while its disk or file server fails.
    """
    try:
        content = (path / CHECKSUMS).read_bytes()
        return json_record.parse(content, dict[str, Checksum], str(path / CHECKSUMS))
    except (OSError, UserError) as error:
        if _is_outage(error, path):
            raise
        return None


def _is_outage(error: Exception, path: Any) -> bool:
    """Whether a checkpoint could not be read for the moment. A stale handle is also what another host's removal of it
    leaves.
    """
    return is_outage(error) and path.exists()


def checkpoints_of(run: Path) -> Path | str:
    """The folder of a run's checkpoints: that of its setting checkpoint.folder, a URL as text, else `checkpoints` in
    its folder.
    """
    facts = (json_record.read_or_none(run / "run.json", dict[str, Any]) or {}).get("facts", {})
    elsewhere = facts.get("checkpoint_folder")
    return _place(elsewhere, facts.get("name", "")) if elsewhere else run / "checkpoints"


def _place(setting: str, name: str) -> Path | str:
    """The folder of the checkpoints of a run of this name. setting: its checkpoint.folder."""
    folder, mark, options = setting.partition("?")  # Options of a URL.
    return f"{folder.rstrip('/')}/{name}{mark}{options}" if "://" in folder else Path(setting, name)


def run_of_checkpoint(path: Path) -> Path | None:
    """The folder of the run whose checkpoint.folder a checkpoint is in, or was copied from if that is a bucket.

    path: the checkpoint or a file in it. None if its run is not where its settings say, which may be relative to the
    current
    folder: a run of the same name that keeps its checkpoints elsewhere is another one.
    """
    folder = path if os.path.isdir(path) else path.parent  # Path.is_dir raises for a name that is too long.
    # All settings of its run, by dotted name.
    identity = (json_record.read_or_none(folder / "state.json", dict[str, Any]) or {}).get("identity", {})
    name, out, elsewhere = (identity.get(key, "") for key in ("name", "out", "checkpoint.folder"))
    if not elsewhere:
        return None
    run = Path(out, name)
    place = checkpoints_of(run)
    if isinstance(place, str):
        return run if place == _place(elsewhere, name) else None
    return run if place.resolve() == folder.resolve().parent else None


def newest_complete(folder: Path, say: Callable[[str], object] | None = None) -> Path | None:
    """Returns the newest checkpoint whose files all have the recorded sizes; contents are verified when they are read.

    say: called with a line for each newer one that is damaged.
    """
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True):
        checksums = read_checksums(path)
        if checksums and _have_sizes(path, checksums):
            return path
        if say and path.exists():  # A run in training may just have removed it.
            why = "a file is missing or cut short" if checksums else f"{CHECKSUMS} is missing or unreadable"
            say(f"{path} is damaged ({why}).")
    return None


def _have_sizes(path: Path, checksums: Mapping[str, Checksum]) -> bool:
    try:
        return all((path / name).stat().st_size == c.bytes for name, c in checksums.items())
    except (OSError, ValueError) as error:
        if _is_outage(error, path):
            raise
        return False
