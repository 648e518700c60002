"""What is said of a path that does not exist: with the similar one that does. Standard library only."""

import difflib
import itertools
import os
from pathlib import Path

# Names that are looked at in a folder and in the folders in it: enough for those that people name by hand.
_MAX_NAMES = 10_000


def missing(path: str | os.PathLike[str], what: str = "file or folder", way_out: str = "") -> str:
    """Returns "PATH: no such file or folder.", and the similar path that exists, else the way out."""
    several = str(path).strip("[]").split(",")
    if len(several) > 1 and all(several):
        return f"{path}: no such {what}. Several are written as a list, where one is read: [{','.join(several)}]."
    if {*"*?"} & {*str(path)}:
        return f"{path}: no such {what}: nothing matches, or no * is read here. Name the folder."
    near = similar_path(path)
    return f"{path}: no such {what}. {f'Did you mean {near}?' if near else way_out}".rstrip()


def similar_path(path: str | os.PathLike[str]) -> Path | None:
    """An existing path of similar names, or of the same name a folder deeper; None for URLs, and if there is none."""
    if "://" in str(path):
        return None
    whole = Path(path)
    found = Path(whole.anchor)
    for number, part in enumerate(parts := whole.relative_to(found).parts):
        if os.path.exists(found / part):
            found /= part
            continue
        names = {name.lower(): found / name for name in _names(found)}
        deeper = (place / name for place in names.values() for name in _names(place))
        first = list(itertools.islice(deeper, _MAX_NAMES))
        names = {place.name.lower(): place for place in reversed(first)} | names
        for near in difflib.get_close_matches(part.lower(), names, 3, 0.7):
            if os.path.exists(there := names[near].joinpath(*parts[number + 1 :])):
                return there
        return None
    return None


def _names(folder: Path) -> list[str]:
    """Visible names in a folder; none of a file, or if it may not be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in itertools.islice(entries, _MAX_NAMES) if not entry.name.startswith(".")]
    except OSError:
        return []
