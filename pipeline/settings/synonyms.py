"""What other tools call our settings, for the "did you mean" of every command: synonyms.yaml.

Settings in one row mean the same in different commands; a command proposes those that it has.
"""

from collections.abc import Collection

from pipeline.settings.yaml_reader import read_table


def synonyms(word: str, known: Collection[str]) -> list[str]:
    """The settings of `known` that a word of other tools means, or a setting of another command."""
    rows = read_table(__file__, dict[str, str]).items()
    return [name for row, words in rows if word in f"{row} {words}".split() for name in row.split() if name in known]
