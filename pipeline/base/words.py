"""Counts, errors and names in sentences: "1 rank", "2 ranks". Standard library only; every message that counts
something uses it.
"""

import math
import shlex
from collections.abc import Sequence

_SI = ("", "k", "M", "G", "T", "P", "E")


def counted(count: int | float, noun: str) -> str:
    """The number and its noun, in the plural unless the number is 1: "1 class", "1,024 copies", "0.5 hours".

    noun: singular; its last word is what is counted ("test image").
    """
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def significant(amount: float) -> str:
    """A number with three digits, or as a whole one if it has more: "0.0272", "98.4", "1,234"."""
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:.3g}"


def si(amount: float, unit: str) -> str:
    """An amount with the prefix of its unit that leaves no zeros: "27.2 MFLOP", "1.94 TFLOP/s"."""
    power = 0
    while abs(amount) >= 999.5 and power < len(_SI) - 1:
        amount, power = amount / 1000, power + 1
    return f"{significant(amount)} {_SI[power]}{unit}"


def of_classes(num_classes: int) -> str:
    """How a count of images goes on: "of 3 classes", or "without labels" for 0."""
    return f"of {counted(num_classes, 'class')}" if num_classes else "without labels"


def plural(noun: str) -> str:
    """The regular plural of a noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def aligned(rows: Sequence[Sequence[str]], num_left: float = math.inf) -> list[str]:
    """The rows of a table as lines: the first `num_left` columns are aligned at the left, the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if number < num_left else str.rjust for number in range(len(widths))]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def command_line(name: str, *settings: str) -> str:
    """`python launch/NAME.py` with settings, to be pasted into a shell: what has spaces is quoted."""
    return shlex.join(["python", f"launch/{name}.py", *settings])


def how_to_resume(step: int) -> str:
    """What the same command does after a crash. step: of the last known checkpoint, 0 without one."""
    goes_on = f"resumes from the checkpoint of step {step:,}, or a later one" if step else "starts the run again"
    return f"The same command {goes_on}."


def missing(path: object, what: str = "file or folder", way_out: str = "") -> str:
    """What is said of a path that does not exist."""
    return f"{path}: no such {what}. {way_out}".rstrip()


def on_one_line(message: object) -> str:
    """The text of a message, often an error's, with a single space for each line break and run of spaces."""
    return " ".join(str(message).split())


def printable(name: str) -> str:
    """A name for a one-line message: control characters and bytes that are not UTF-8 are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first `most` of several names in a sentence: "a, b, ..."."""
    return ", ".join(map(printable, names[:most])) + ", ..." * (len(names) > most)


def shorten(name: str, most: int = 24) -> str:
    """Shorten a name to `most` characters by cutting its middle, because long names differ at the ends.

    For figures, in which Matplotlib cannot draw what is not UTF-8: bytes of a path that are not become question marks.
    """
    name = name.encode(errors="replace").decode()
    right = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - right]}…{name[len(name) - right :]}"
