"""What other tools call our settings, for the "did you mean" of every command: synonyms.yaml.

Settings in one row mean the same in different commands; a command proposes those that it has.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.settings.yaml_reader import read_table


@dataclass(frozen=True)
class _Advice:
    """What is said about words that no setting stands for, in a command with the setting `needs` ("": in all)."""

    words: str
    said: str
    needs: str = ""


@dataclass(frozen=True)
class _Synonyms:
    settings: dict[str, str]
    advice: list[_Advice]


def synonyms(word: str, known: Collection[str]) -> list[str]:
    """The settings of `known` that a word of other tools means, or a setting of another command."""
    rows = read_table(__file__, _Synonyms).settings.items()
    return [name for row, words in rows if word in f"{row} {words}".split() for name in row.split() if name in known]


def advice(word: str, known: Collection[str]) -> str:
    """What to do in place of setting this word, as a sentence; "" for other words. known: the command's settings."""
    rows = read_table(__file__, _Synonyms).advice
    return next((row.said for row in rows if word in row.words.split() and (not row.needs or row.needs in known)), "")
