"""Class names of sources whose labels are numbers."""

from collections import Counter
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted, shortened
from pipeline.process.installed import shipped

# Without names the largest label gives the number of classes; a larger one than this is probably a mistake.
_MOST_CLASSES = 2**20


class ClassNumbers:
    """Maps labels (from 0) to class names. names: all class names in order; if empty, a class is named by its
    number. highest: the largest label seen.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.highest = -1

    def name(self, label: int, where: str) -> str:
        """Returns the class name of a label. where: place of the label, for errors. Raises UserError for one out of
        range.
        """
        limit = len(self._names) or _MOST_CLASSES
        if not 0 <= label < limit:
            raise UserError(
                f"{where}: label {quoted(label)} is out of range: labels begin at 0, and there are at most {limit:,}"
                " classes (label_names)."
            )
        self.highest = max(self.highest, label)
        return self._names[label] if self._names else str(label)

    def classes(self) -> list[str]:
        """All class names in order; without given names, the numbers up to the largest label seen."""
        return self._names or [str(number) for number in range(self.highest + 1)]


def refuse_other_names(where: str, names: list[str], first: str, of_first: list[str]) -> None:
    """Raise UserError if a part of a source has other class names than its first part: one number would be two classes.

    where, first: what names the classes of the two parts, for the error.
    """
    if names != of_first:
        raise UserError(
            f"{where}: its classes are {shortened(', '.join(names)) or 'not named'}, but"
            f" {shortened(', '.join(of_first)) or 'not named'} in {first}. If both number the same classes, name these:"
            " label_names=FILE; else make each a data set of its own."
        )


def read_lines(path: str, setting: str) -> list[str]:
    """The stripped, non-empty lines of a text file. setting: its name, for errors.

    Raises UserError if it is unreadable or empty, and for an empty line between others in a file of names by number.
    """
    try:
        content = shipped(Path(path)).read_bytes()
        text = content.decode("utf-8-sig")  # Editors on Windows write a byte order mark.
    except (OSError, UnicodeDecodeError) as error:
        reason = "no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{setting} = {path} cannot be read ({reason}).") from None
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if setting == "label_names" and "" in lines:
        raise UserError(
            f"{setting} = {path}: line {lines.index('') + 1} is empty, and would be the name of label"
            f" {lines.index('')}. Name it, or remove the line."
        )
    if not any(lines):
        raise UserError(f"{setting} = {path} is empty.")
    return [line for line in lines if line]


def names_of_synsets(lines: list[str], where: str) -> dict[str, str]:
    """WordNet's ID -> name, from lines 'wnid name'. where: their file, for errors. Raises UserError for an ID with two
    names.
    """
    names: dict[str, str] = {}
    for wnid, name in (parts for line in lines if len(parts := line.strip().split(None, 1)) == 2):
        if names.setdefault(wnid, name) != name:
            raise UserError(
                f"{where} names {quoted(wnid)} twice, {quoted(names[wnid])} and {quoted(name)}. Remove one."
            )
    return names


def read_names(path: str, setting: str) -> list[str]:
    """Class names, one per line. Raises UserError for a repeated name."""
    names = read_lines(path, setting)
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"{setting} = {path} names {name!r} {count} times.")
    return names
