"""Names in tables and figures."""

from pipeline.base.words import shorten


def test_names_are_cut_in_the_middle_and_can_be_drawn() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd…ghi"
    assert [shorten("abcdef", most) for most in (1, 2, 3, 4)] == ["…", "a…", "a…f", "ab…f"]
    assert shorten("caf\udce9") == "caf?"
