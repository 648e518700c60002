"""Tracking URIs of SQLite databases: to a path and back. Imports neither MLflow nor SQLAlchemy."""

import re
from pathlib import Path
from urllib.parse import unquote

from pipeline.base.errors import UserError

_SQLITE = re.compile(r"sqlite(?:\+\w+)?://(?:/(?P<path>[^?]*))?(?P<query>\?.*)?", re.DOTALL)


def sqlite_uri(database: Path) -> str:
    """The tracking URI of a database file, whatever characters its path has."""
    # SQLAlchemy ends the path at a question mark and replaces %20 by a space; it takes every other character as it is.
    return "sqlite:///" + str(database.resolve()).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> Path | None:
    """File of an SQLite database; None for another store. Raises UserError for one in memory, which ends with this
    process.
    """
    found = _SQLITE.fullmatch(uri)
    if found is None:
        return None
    path = unquote(found["path"] or "")
    if not path or ":memory:" in path or "mode=memory" in (found["query"] or ""):
        raise UserError(f"{uri} is a database in memory, which ends with this process. Give sqlite:////PATH/mlflow.db.")
    return Path(path)
