"""Classes of sources whose labels are numbers: which name a number stands for, and whether it stands for any."""

from collections import Counter
from pathlib import Path

from pipeline.errors import UserError
from pipeline.json_record import quoted

# Without names a label tells how many classes there are; beyond this it is rather a mistake.
_MOST_CLASSES = 2**20


class ClassNumbers:
    """Turns labels from 0 into names. names: of all classes in order; empty, and a class is called by its number."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._highest = -1

    def name(self, label: int, where: str) -> str:
        """Raises UserError for a label out of range, with where it was found."""
        limit = len(self._names) or _MOST_CLASSES
        if not 0 <= label < limit:
            known = (
                f"there are {limit:,} class names" if self._names else "class names are not known (label_names=FILE)"
            )
            hint = " Images without a label (-1) belong in no split: leave them out." if label == -1 else ""
            raise UserError(f"{where}: label {quoted(label)} is out of range, {known}; labels begin at 0.{hint}")
        self._highest = max(self._highest, label)
        return self._names[label] if self._names else str(label)

    def classes(self) -> list[str]:
        """All class names in order; without given names, as many as the labels that were met ask for."""
        return self._names or [str(number) for number in range(self._highest + 1)]


def read_lines(path: str, setting: str) -> list[str]:
    """Lines of a text file that a setting names, without blank ones and surrounding spaces. Raises UserError."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"{setting} = {path} cannot be read ({reason}).") from None
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise UserError(f"{setting} = {path} is empty.")
    return lines


def read_names(path: str, setting: str) -> list[str]:
    """Class names, one a line, none twice."""
    names = read_lines(path, setting)
    (name, count) = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"{setting} = {path} names {name!r} {count} times.")
    return names
