"""Output paths of a command, tried before it does any work. Standard library only.

A setting that names an output says so where it is declared: `setting("", "File for the table.", output="file")`. All
commands try them in `pipeline/command.py`; a folder that is derived from other settings is tried where it is derived.

Trying creates no visible file and no folder: what exists must be of the right kind, the names must be allowed, and an
unnamed file must be possible in the nearest folder that exists. So a command that then refuses for another reason leaves
nothing behind. URLs are left to the storage layer.
"""

import contextlib
import dataclasses
import errno
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import UserError
from pipeline.json_record import quoted

# file: its folder must exist. folder: made if it does not exist. new: a file or a folder made with all folders above it.
Output = Literal["file", "folder", "new"]

# The longest name of a file until it is whole: see `replacing` in files.py.
_UNFINISHED = ".{}.00000000.tmp"
_REASONS = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its links lead in a circle",
    errno.ENOENT: "nothing can be created there",
}


def try_outputs(config: Any, prefix: str = "") -> None:
    """Try every output path of a settings tree. Raises UserError that names the setting, the path and the reason.

    A settings class names in `not_written()` those that its command does not write this time.
    """
    skipped = config.not_written() if hasattr(config, "not_written") else ()
    fields = [field for field in dataclasses.fields(config) if field.name not in skipped]
    # What lies within another output comes after that, so that the error names the setting that is wrong.
    for field in sorted(fields, key=lambda field: field.metadata.get("within") is not None):
        value, output, within = (
            getattr(config, field.name),
            field.metadata.get("output"),
            field.metadata.get("within"),
        )
        if dataclasses.is_dataclass(value):
            try_outputs(value, f"{prefix}{field.name}.")
        folder = getattr(config, within) if within else ""
        if output is None or value in ("", "-") or "://" in f"{folder}{value}":
            continue
        try_output(f"{prefix}{field.name}", Path(folder, value), output)


def try_output(name: str, path: Path, output: Output = "folder") -> None:
    """Raise UserError unless this path can be written. name: of the setting, which the error names."""
    path = Path(os.path.expanduser(path))
    try:
        problem = _problem(path, output)
    except OSError as error:
        problem = _REASONS.get(error.errno or 0, error.strerror or str(error))
    if problem:
        raise UserError(f"{name} = {_shown(path)}: {problem}. Choose another path for the output.")


def _problem(path: Path, output: Output) -> str:
    """What is wrong with it, empty when nothing is. Raises OSError for what the system refuses."""
    if os.path.islink(path) and not os.path.exists(path):
        path.stat()
    if output == "folder":
        return _cannot_create_in(path)
    if os.path.isdir(path):
        return "it is a folder, not a file" if output == "file" else "this folder exists already"
    if os.path.exists(path) and not os.path.isfile(path):
        return ""  # A device, such as /dev/stdout.
    problem = _cannot_create_in(path.parent)
    if not problem and output == "file" and not os.path.isdir(path.parent):
        problem = f"there is no folder {_shown(path.parent)}"
    _check_name(path.with_name(_UNFINISHED.format(path.name)))
    return problem


def _cannot_create_in(folder: Path) -> str:
    """As `_problem`, of a folder or, where it does not exist yet, the nearest one above it that does."""
    existing = folder
    while not os.path.lexists(existing):
        existing = existing.parent
    if not os.path.isdir(existing):
        existing.stat()  # Raises for a link that leads nowhere.
        return f"{_shown(existing)} is a file, not a folder"
    for part in folder.relative_to(existing).parts:
        _check_name(existing / part)
    with tempfile.TemporaryFile(dir=existing):
        return ""


def _check_name(path: Path) -> None:
    """Raises OSError for a name that the file system does not allow."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.lstat()


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 and text.isprintable() else quoted(text)
