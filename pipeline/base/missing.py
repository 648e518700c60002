"""What is said of a path that does not exist: with the similar one that does. Standard library only."""

import difflib
import itertools
import os
from pathlib import Path

# Names that are looked at in a folder, and in all folders in it: enough for those that people name by hand.
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
    whole = Path(path)
    folder = next(filter(os.path.exists, whole.parents), None)
    if folder is None or "://" in str(path):
        return None
    name, *rest = whole.relative_to(folder).parts
    there = (itertools.islice(folder.glob(names), _MAX_NAMES) for names in ("[!.]*/[!.]*", "[!.]*"))
    places = {place.name.lower(): place for place in itertools.chain(*there)}
    near = difflib.get_close_matches(name.lower(), places, 3, 0.7)
    return next((found for name in near if os.path.exists(found := places[name].joinpath(*rest))), None)
