"""tables.toml as plain values: names of other projects' files, and other facts of them. Its comments say what the
tables mean.
"""

import tomllib
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())

# A layer of ours -> the file's layer or layers.
Names = dict[str, Any]


def _names() -> dict[str, Names]:
    found: dict[str, Names] = {}
    for kind, names in TABLES["names"].items():
        found[kind] = found.get(names.get("like", ""), {}) | names
    return found


NAMES = _names()
