"""Every test that docs/guarantees.md names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_tests_of_the_guarantees_exist() -> None:
    named, file = [], ""
    for cell in re.findall(r"`((?:tests/[\w/]+\.py)?::test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()):
        path, _, test = cell.partition("::")
        file = path or file  # `::test_x` follows another test of the same file.
        named.append((file, test))
    assert len(named) > 15
    assert not [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
