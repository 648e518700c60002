"""A table column of labels: names, numbers, or lists of either."""

from typing import Any

import pyarrow as pa
import pyarrow.types as types

from data_tools.sources.class_numbers import ClassNumbers
from pipeline.errors import UserError


class LabelColumn:
    """Maps the values of a column to class names. names: class names in order; if given, text values are parsed as numbers.

    separator: between several labels in one text; if empty, a text is one label. Raises UserError for a column type that
    cannot hold labels.
    """

    def __init__(self, field: pa.Field, where: str, names: list[str], separator: str = "") -> None:
        kind = field.type
        if types.is_list(kind) or types.is_large_list(kind):
            kind = kind.value_type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
            raise UserError(
                f"{where}: column {field.name!r} holds {field.type}, but labels are text, whole numbers or lists of them."
            )
        self._numbers = ClassNumbers(names) if names or types.is_integer(kind) else None
        self._separator = separator

    def names(self, value: Any, where: str) -> list[str]:
        """The class names of one row; empty for a missing value. where: place of the row, for errors."""
        if isinstance(value, str) and self._separator:
            value = value.split(self._separator)
        labels = value if isinstance(value, list) else [value]
        labels = [label.strip() if isinstance(label, str) else label for label in labels if label is not None]
        labels = [label for label in labels if label != ""]
        if self._numbers is None:
            return [str(label) for label in labels]
        if not all(isinstance(label, int) or label.lstrip("-").isdecimal() for label in labels):
            raise UserError(f"{where}: label {value!r} is no number, as those before it or label_names ask for.")
        return [self._numbers.name(int(label), where) for label in labels]

    def classes(self) -> list[str]:
        """All class names in order if labels are numbers, else empty."""
        return self._numbers.classes() if self._numbers else []


def check_columns(there: list[str], wanted: dict[str, str], where: str) -> None:
    """Raises UserError for a missing column. wanted: setting -> name of the column."""
    for setting, column in wanted.items():
        if column not in there:
            raise UserError(f"{where} has no column {column!r} ({setting}). It has: {', '.join(there)}.")
