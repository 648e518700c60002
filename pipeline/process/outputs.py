"""Checks before any work that a command can write its output paths. Standard library only.

A setting that is an output path is declared as one: `setting("", output="file")`. All commands
check these in `pipeline/settings/command.py`; a path derived from several settings is checked where it is derived.

The check creates no visible file and no folder: an existing path must be of the right kind, and an unnamed temporary
file must be possible in the nearest existing folder. What a killed command left of a file is removed. URLs
are left to the storage layer.

A folder holds the results of one kind of command, because many write a report.md or a results.json: `holds` names the
kind that the setting's folder is for, and a folder of another kind is refused. Anything else may be there before, such
as the log files of a scheduler.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline.base.errors import UserError, raise_outage
from pipeline.base.files import remove_unfinished
from pipeline.base.locks import only_writer

# file: its folder must exist. folder: created if missing. new: a new file or folder, created with missing parent
# folders.
Output = Literal["file", "folder", "folder or URL", "new"]

Holds = Literal[
    "experiment",
    "data set",
    "run",
    "evaluation",
    "explanation",
    "verification",
    "statistics",
    "comparison",
    "report of a run",
    "segmentation",
]
# The files by which a folder is recognised, in this order: an evaluation has a scores.json, and so has a run.
_MARKS: dict[Holds, tuple[str, ...]] = {
    "experiment": ("experiment.json",),
    "data set": ("dataset.json",),
    "run": ("status.json", "config.yaml"),
    "evaluation": ("scores.json",),
    "explanation": ("explain.json",),
    "verification": ("report.json", "damage.csv"),
    "statistics": ("stats.json",),
    "comparison": ("runs.parquet",),
    "report of a run": ("report.html",),
    "segmentation": ("segmentation.json",),
}
# Locks of the command that runs, see `holding_outputs`.
_held: contextlib.ExitStack | None = None
_paths: set[Path] = set()


def try_outputs(config: Any, prefix: str = "") -> None:
    """Check every output path of a settings tree. Raises UserError with the setting, the path and the reason.

    Settings that the method `not_written()` of the class returns are skipped.
    """
    skipped = config.not_written() if hasattr(config, "not_written") else ()
    fields = [field for field in dataclasses.fields(config) if field.name not in skipped]
    # An output inside another one is checked after it, so that the error names the wrong setting.
    for field in sorted(fields, key=lambda field: field.metadata.get("within") is not None):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            try_outputs(value, f"{name}.")
        output, within = field.metadata.get("output"), field.metadata.get("within")
        if output is None or value == "":
            continue
        place = os.path.join(getattr(config, within) if within else "", value)
        if "://" not in place:
            kind: Output = "folder" if output == "folder or URL" else output
            try_output(name, Path(place), kind, field.metadata.get("holds"))
            if kind == "file":
                hold(Path(place), is_file=True)
        elif output != "folder or URL":  # It would become the local folder `s3:`.
            setting = f"{prefix}{within}" if within and "://" not in value else name
            raise UserError(f"{setting} = {place}: this is written to a file system, not to a bucket. Give a path.")


def try_output(name: str, path: Path, output: Output = "folder", holds: Holds | None = None) -> None:
    """Raise UserError unless this path can be written, and a folder for results of one kind holds none of another.

    name: name of the setting in the error. holds: the kind, None for a folder that may hold anything. Raises OSError
    while its disk or file server fails.
    """
    try:
        if output != "folder":
            remove_unfinished(path.parent, [path.name])
        problem = _problem(path, output)
        found = kind_of(path) if output == "folder" and holds else None
        if found not in (None, holds):
            problem = f"this folder holds results of another kind ({found}, not {holds})"
    except OSError as error:
        raise_outage(error, path)  # The path is not to blame.
        problem = error.strerror or str(error)
    if problem:
        raise UserError(f"{name} = {path}: {problem}. Choose another path for the output.")


@contextlib.contextmanager
def holding_outputs() -> Iterator[None]:
    """Until the block ends, this process is the only writer of all folders and files passed to `hold` in it."""
    global _held
    with contextlib.ExitStack() as _held:
        try:
            yield
        finally:
            _held = None
            _paths.clear()


def hold(output: Path, is_file: bool = False) -> None:
    """Refuse a second command that writes the same output at the same time (`only_writer`). No-op but in a command,
    once for each output.

    Raises UserError, with the process that writes it.
    """
    path = output.absolute()
    if _held is not None and path not in _paths:
        _held.enter_context(only_writer(output, is_file))
        _paths.add(path)


def kind_of(folder: Path) -> Holds | None:
    """The kind of results in a folder, by its files; None if unknown."""
    for kind, marks in _MARKS.items():
        if any((folder / mark).exists() for mark in marks):
            return kind
    return None


def _problem(path: Path, output: Output) -> str:
    """Returns why the path cannot be written, empty if it can. Raises OSError for what the system refuses."""
    folder = path if output == "folder" else path.parent
    if output != "folder" and os.path.isdir(path):
        return "it is a folder, not a file" if output == "file" else "this folder exists already"
    if output != "folder" and os.path.exists(path) and (not os.path.isfile(path) or folder == Path("/dev")):
        # Root would replace the device, or the link /dev/stdout, for all programs of the machine.
        return "it is not a regular file"
    existing = folder  # Or the nearest folder above it that exists.
    while not os.path.lexists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):
        return f"{existing} is not a folder"
    with tempfile.TemporaryFile(dir=existing):
        return f"there is no folder {folder}" if output == "file" and existing != folder else ""
