"""Each folder of the library says who uses it, and that is true, and is short; what it may import, or start, is in pyproject.toml."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [path.parent for path in sorted((ROOT / "pipeline").rglob("__init__.py")) if path.parent.name != "pipeline"]
_MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for folder in ("pipeline", "data_tools", "launch") for path in (ROOT / folder).rglob("*.py")}  # fmt: skip

# A room with more users says "most rooms".
_MANY = 8
# More are not taken in at a glance: files of a room beside __init__.py, and lines of a file.
_MAX_FILES, _MAX_LINES = 12, 450
# launch/ has a file for each command, which share nothing.
_LARGE_ROOMS = {"launch"}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> modules of this repository that it imports."""
    return {module: set(_imported(ast.parse(path.read_text()))) for module, path in _MODULES.items()}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT / "pipeline")))
def test_a_room_names_its_users(room: Path, imports: dict[str, set[str]]) -> None:
    package = ".".join(room.relative_to(ROOT).parts)
    users = {
        _name(module)
        for module, imported in imports.items()
        if not _is_in(module, package) and any(_is_in(other, package) for other in imported)
    }
    docstring = " ".join((ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").split())
    said = re.search(r"Used by (most rooms|(?:[\w/]+(?:, | and )?)+)\.", docstring)
    found = {said[1]} if said and said[1] == "most rooms" else set(re.split(", | and ", said[1])) if said else set()
    needed = {"most rooms"} if len(users) > _MANY else users
    assert found == needed, f"{room}/__init__.py lacks the sentence: Used by {', '.join(sorted(needed))}."


def test_only_rooms_stand_in_the_library() -> None:
    assert [path.name for path in (ROOT / "pipeline").glob("*.py")] == ["__init__.py"]


def test_no_room_has_more_files_than_a_reader_keeps_in_mind() -> None:
    files = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in _MODULES.values() if path.name != "__init__.py"
    )
    large = {room for room, count in files.items() if count > _MAX_FILES}
    assert large == _LARGE_ROOMS, (
        f"over {_MAX_FILES} files: give those that share a task a folder, or move one to a folder of its kind"
    )


def test_no_file_is_longer_than_a_reader_follows() -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in _MODULES.values()}
    assert not {file for file, count in lines.items() if count > _MAX_LINES}


def test_a_room_starts_no_process_of_a_room_above() -> None:
    """A module named in a string, as for `python -m MODULE`, must be one that could be imported; docstrings may name any."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["name"] == "Imports between the rooms go down this list")

    def depth(module: str) -> int:
        return next(
            (n for n, layer in enumerate(layers) if any(_is_in(module, m) for m in layer.split(" | "))), len(layers)
        )

    named = {
        (module, found)
        for module, path in _MODULES.items()
        if not module.startswith("launch.")
        for text in _texts(ast.parse(path.read_text()))
        for found in re.findall(
            r"\b(?:pipeline|data_tools)(?:\.\w+)+", re.sub(r"(\w)/(?=\w)", r"\1.", text).replace(".py", "")
        )
        if found in _MODULES
    }
    assert ("pipeline.lifecycle.host_check", "pipeline.lifecycle.host_check") in named, "no string is found any more"
    assert not {(module, found) for module, found in named if depth(found) < depth(module)}


def _texts(tree: ast.Module) -> list[str]:
    """The strings of a module but its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]


def _imported(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{name.name}" for name in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)  # As a command names the module that it runs.
    return [name for name in found if name in _MODULES]


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _name(module: str) -> str:
    """The user as a docstring names it: train/ for a folder of pipeline/, launch/ for one beside it."""
    parts = module.split(".")
    if parts[0] != "pipeline":
        return f"{parts[0]}/"
    return f"{parts[1]}/" if len(parts) > 2 or module in map(_package, ROOMS) else parts[1]


def _package(room: Path) -> str:
    return ".".join(room.relative_to(ROOT).parts)
