"""Each folder of the library says who uses it, and that is true; what a folder may import is in pyproject.toml."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [path.parent for path in sorted((ROOT / "pipeline").rglob("__init__.py")) if path.parent.name != "pipeline"]
_MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
            for folder in ("pipeline", "data_tools", "launch") for path in (ROOT / folder).rglob("*.py")}  # fmt: skip

# A room with more users says "most rooms".
_MANY = 8


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
    assert said, f"{room}/__init__.py lacks a sentence: Used by {', '.join(sorted(users))}."
    assert said[1] == "most rooms" if len(users) > _MANY else set(re.split(", | and ", said[1])) == users


def test_only_rooms_stand_in_the_library() -> None:
    assert [path.name for path in (ROOT / "pipeline").glob("*.py")] == ["__init__.py"]


def _imported(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{name.name}" for name in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
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
