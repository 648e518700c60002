"""Names in tables, figures and commands."""

import shlex

from pipeline.base.words import command_line, shorten


def test_names_are_cut_in_the_middle_and_can_be_drawn() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd…ghi"
    assert [shorten("abcdef", most) for most in (1, 2, 3, 4)] == ["…", "a…", "a…f", "ab…f"]
    assert shorten("caf\udce9") == "caf?"


def test_a_command_can_be_pasted_into_a_shell() -> None:
    command = command_line("shard", "source=My Pets", "val_share=0.1")
    assert shlex.split(command) == ["python", "launch/shard.py", "source=My Pets", "val_share=0.1"]
