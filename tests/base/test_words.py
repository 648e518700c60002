"""Names, numbers and commands in tables, figures and sentences."""

import shlex

from pipeline.base.progress import duration
from pipeline.base.words import command_line, shorten, si, significant


def test_names_are_cut_in_the_middle_and_can_be_drawn() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghi", 8) == "abcd…ghi"
    assert [shorten("abcdef", most) for most in (1, 2, 3, 4)] == ["…", "a…", "a…f", "ab…f"]
    assert shorten("caf\udce9") == "caf?"


def test_no_amount_is_rounded_to_zero() -> None:
    assert [significant(x) for x in (0, 0.00123, 0.5, 98.76, 1234.5)] == ["0", "0.00123", "0.5", "98.8", "1,234"]
    amounts = (0.0, 12.0, 27_212_345.0, 999.96e9, 1.94e12, 4.72e20, 5e22)
    assert [si(x, "FLOP") for x in amounts] == [
        "0 FLOP",
        "12 FLOP",
        "27.2 MFLOP",
        "1 TFLOP",
        "1.94 TFLOP",
        "472 EFLOP",
        "50,000 EFLOP",
    ]
    times = (0.034, 0.6, 8, 122, 7300, 200_000)
    assert [duration(x) for x in times] == ["0.03 s", "0.6 s", "8 s", "2 min", "2.0 h", "2.3 d"]


def test_a_command_can_be_pasted_into_a_shell() -> None:
    command = command_line("shard", "source=My Pets", "val_share=0.1")
    assert shlex.split(command) == ["python", "launch/shard.py", "source=My Pets", "val_share=0.1"]
