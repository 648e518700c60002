"""One meaning each: a name stands for one class of the code. The library has rooms only."""

import ast
from collections import defaultdict

from ranks import ROOT


def test_each_class_has_a_name_of_its_own() -> None:
    """A private class counts by its name without the underscore: who searches for `Record` finds `_Record` too."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in ("pipeline", "data_tools", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) > 200
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_only_rooms_stand_in_the_library() -> None:
    assert [path.name for path in (ROOT / "pipeline").glob("*.py")] == ["__init__.py"]
