"""Counts in messages: by one function, everywhere."""

from pathlib import Path

import pytest

from pipeline.base.words import counted, shorten

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("count", "noun", "shown"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (1024, "test image", "1,024 test images"),
        (2, "class", "2 classes"),
        (2, "copy", "2 copies"),
        (2, "key", "2 keys"),
        (3, "batch", "3 batches"),
        (0.5, "hour", "0.5 hours"),
    ],
)
def test_nouns_follow_their_number(count: float, noun: str, shown: str) -> None:
    assert counted(count, noun) == shown


def test_names_are_cut_in_the_middle_and_can_be_drawn() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd…ghi"
    assert [shorten("abcdef", most) for most in (1, 2, 3, 4)] == ["…", "a…", "a…f", "ab…f"]
    assert shorten("caf\udce9") == "caf?"
