"""The library has rooms only, and none starts a process of a room above; what a room may import is in
pyproject.toml.
"""

import ast
import re
import tomllib

from ranks import ROOT

_MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("pipeline", "data_tools", "launch")
    for path in (ROOT / folder).rglob("*.py")
}


def test_only_rooms_stand_in_the_library() -> None:
    assert [path.name for path in (ROOT / "pipeline").glob("*.py")] == ["__init__.py"]


def test_a_room_starts_no_process_of_a_room_above() -> None:
    """A module named in a string, as for `python -m MODULE`, must be one that could be imported; docstrings may name
    any.
    """
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
    assert ("pipeline.cluster.host_check", "pipeline.cluster.host_check") in named, "no string is found any more"
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


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
