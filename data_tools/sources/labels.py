"""A column of labels: each row has a name, a number, or a list of either."""

from typing import Any

import pyarrow as pa
import pyarrow.types as types

from data_tools.sources.class_numbers import ClassNumbers
from pipeline.errors import UserError


class LabelColumn:
    """Turns the values of a column into class names. names: what numbers stand for, in order; given, text is numbers too.

    separator: stands between several labels of one text; empty, a text is one label. Raises UserError when a column of
    this type can hold no labels.
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
        """The class names of one row; none for an empty value. where: the row, for errors."""
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
        """All class names in order, where labels are numbers; else none."""
        return self._numbers.classes() if self._numbers else []


def check_columns(there: list[str], wanted: dict[str, str], where: str) -> None:
    """Raises UserError for a column that is not there. wanted: setting -> name of the column."""
    for setting, column in wanted.items():
        if column not in there:
            raise UserError(f"{where} has no column {column!r} ({setting}). It has: {', '.join(there)}.")
