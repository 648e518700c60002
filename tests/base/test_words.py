"""Counts in messages: by one function, everywhere."""

import ast
import re
from pathlib import Path

import pytest

from pipeline.base.words import counted, plural, shorten

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("count", "noun", "shown"),
    [(1, "rank", "1 rank"), (0, "rank", "0 ranks"), (1024, "test image", "1,024 test images"), (2, "class", "2 classes"),
     (2, "copy", "2 copies"), (2, "key", "2 keys"), (3, "batch", "3 batches"), (0.5, "hour", "0.5 hours")],
)  # fmt: skip
def test_nouns_follow_their_number(count: float, noun: str, shown: str) -> None:
    assert counted(count, noun) == shown


def test_no_message_counts_without_it() -> None:
    """No f-string has a number and then the plural of a noun that is counted elsewhere: it would say "1 ranks"."""
    nouns: set[str] = set()
    counts: list[tuple[str, str]] = []  # A place in the code with its number, and the text behind it.
    for path in (
        path for folder in ("pipeline", "data_tools", "launch") for path in sorted((ROOT / folder).rglob("*.py"))
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "counted":
                if isinstance(node.args[1], ast.Constant):
                    nouns.add(node.args[1].value.split()[-1])
            elif isinstance(node, ast.JoinedStr):
                counts += [
                    (f"{path.relative_to(ROOT)}:{value.lineno}: {{{ast.unparse(value.value)}}}", text.value)
                    for value, text in zip(node.values, node.values[1:], strict=False)
                    if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant) and text.value[0] == " "
                    if _is_count(value)
                ]
    assert len(nouns) > 20
    follows = re.compile(rf" (?:[a-z-]+ )?(?:{'|'.join(sorted(map(plural, nouns)))})\b(?![=/]|\.\w)")
    found = [f"{place}{text[:30]}" for place, text in counts if follows.match(text)]
    assert not found, "\n".join(found)


def _is_count(value: ast.FormattedValue) -> bool:
    """Whether a whole number is shown that may be 1; a constant may not."""
    is_constant = isinstance(value.value, ast.Name) and value.value.id.strip("_").isupper()
    is_whole = ast.unparse(value.value).startswith(("len(", "sum("))
    if isinstance(value.format_spec, ast.JoinedStr) and isinstance(value.format_spec.values[0], ast.Constant):
        is_whole = value.format_spec.values[0].value == ","
    return is_whole and not is_constant


def test_names_are_cut_in_the_middle_and_can_be_drawn() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd…ghi"
    assert [shorten("abcdef", most) for most in (1, 2, 3, 4)] == ["…", "a…", "a…f", "ab…f"]
    assert shorten("caf\udce9") == "caf?"
