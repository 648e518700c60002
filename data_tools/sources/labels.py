"""Table columns of labels (names, numbers, or lists of either), and of groups (names or numbers)."""

import re
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.types as types

from data_tools.sources.class_numbers import ClassNumbers
from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted, shortened
from pipeline.settings.commands.data import ShardConfig

# A label in text, such as 7 or 7.0.
WHOLE_NUMBER = r"-?[0-9]{1,18}(\.0+)?"
# What programs write where a value is missing: the list of Arrow (and pandas), and what Python and pandas write in
# addition.
MISSING = frozenset([*pacsv.ConvertOptions().null_values, "None", "<NA>"])


class LabelColumn:
    """Maps the values of a column to class names. names: class names in order; if given, text values are parsed as
    numbers.

    separator: between several labels in one text; if empty, a text is one label. missing: counts the texts that were
    read as a missing label, without empty ones. Raises UserError for a column type that cannot hold labels.
    """

    def __init__(self, field: pa.Field, where: str, names: list[str], separator: str = "") -> None:
        self._are_numbers, self._first = _are_numbers(field, where), where
        self._numbers = ClassNumbers(names) if names or self._are_numbers else None
        self._separator = separator
        self.missing = Counter[Any]()

    def check(self, field: pa.Field, where: str) -> None:
        """Raise UserError if the column of another file holds numbers where that of the first holds text, or the
        reverse.
        """
        if _are_numbers(field, where) != self._are_numbers:
            raise UserError(
                f"{where}: column {field.name!r} holds text in one of this file and {self._first}, and numbers in the"
                " other. Give all files the same type."
            )

    def names(self, value: Any, where: str) -> list[str]:
        """The class names of one row; empty for a missing value. where: place of the row, for errors."""
        if isinstance(value, list) and any(label is None for label in value):
            raise UserError(
                f"{where}: {quoted(value)} has a missing label (null). An image without a label has [] or null."
            )
        if isinstance(value, str) and self._separator:
            value = value.split(self._separator)
        labels = [value] if isinstance(value, str | int) else value or []
        labels = [label.strip() if isinstance(label, str) else label for label in labels]
        if missing := [label for label in labels if label in MISSING]:
            self.missing.update(filter(None, missing))
            labels = [label for label in labels if label not in MISSING]
        if self._numbers is None:
            return [str(label) for label in labels]
        if not all(isinstance(label, int) or re.fullmatch(WHOLE_NUMBER, label) for label in labels):
            raise UserError(f"{where}: label {quoted(value)} is not a number, as label_names or earlier labels need.")
        numbers = (label if isinstance(label, int) else int(label.partition(".")[0]) for label in labels)
        return [self._numbers.name(number, where) for number in numbers]

    def report(self, collector: Collector) -> None:
        """Gives the collector all class names in order, if labels are numbers, and a note about missing labels."""
        collector.classes = self._numbers.classes() if self._numbers else []
        if self.missing:
            some = ", ".join(f"{text!r} ({count:,})" for text, count in self.missing.most_common())
            collector.notes.append(
                f"read as missing labels: {some}. If one is a class, give it another name in the table"
            )


def label_column(there: list[str], config: ShardConfig, where: str, collector: Collector, before: str | None) -> str:
    """The label column of a table with these columns; "" if its images have no labels.

    That is so if label_column is empty, and, with a note, if there is no column of its default name. before: what this
    returned for the source's first table, None for that one. Raises UserError where only one of the two has labels.
    """
    column = config.label_column
    if column not in there and column == ShardConfig.label_column and not config.label_names:
        column = ""
        if before is None:
            collector.notes.append(
                f"{where} has no column {config.label_column!r}: its images have no labels. If another column holds"
                f" labels, name it: label_column=NAME (there: {shortened(', '.join(there))})"
            )
    if before is not None and bool(before) != bool(column):
        raise UserError(
            f"{where} has {'labels' if column else 'no labels'}, but a table before it has"
            f" {'none' if column else 'some'}. Shard them into two data sets, or all without labels: label_column= ."
        )
    collector.is_labelled = bool(column)
    return column


def note_unused_splits(there: list[str], used: list[str], collector: Collector) -> None:
    """A note if a table has a column of the default name for splits that is not used. used: its other columns."""
    name = ShardConfig.split_column
    note = (
        f"warning: the column {name!r} is not used: each split is a file of its own here (splits.train=train"
        " splits.val=val)"
    )
    if name in set(there) - {*used} and note not in collector.notes:
        collector.notes.append(note)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, in any of Arrow's layouts."""
    kind = value_type(kind)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values; they may be stored as numbers of a dictionary."""
    return kind.value_type if types.is_dictionary(kind) else kind


def check_names(field: pa.Field, where: str, setting: str) -> None:
    """Raises UserError for a column type that cannot hold names of groups or splits."""
    if not (types.is_integer(value_type(field.type)) or is_text(field.type)):
        raise UserError(
            f"{where}: column {field.name!r} ({setting}) holds {shortened(str(field.type))}, but it has to hold text or"
            " whole numbers."
        )


def group_name(value: Any, where: str) -> str:
    """The group of one row. where: place of the row, for errors. Raises UserError for a row without one."""
    name = str(value).strip()
    if name in MISSING:
        raise UserError(
            f"{where}: its group is missing (group_column). An image that is like no other is a group of its own."
        )
    return name


def check_columns(there: list[str], wanted: list[tuple[str, str]], where: str) -> None:
    """Raises UserError for a column that is missing or there twice. wanted: (setting, name of the column, or "" for
    none).
    """
    for setting, column in wanted:
        if column and column not in there:
            raise UserError(
                f"{where} has no column {column!r} ({setting}). It has: {shortened(', '.join(there))}. The first line"
                " of a CSV names its columns, with commas between, in a .tsv tabs."
            )
        if (count := there.count(column)) > 1:
            raise UserError(f"{where} has {count} columns {column!r} ({setting}). Rename all but one.")


def _are_numbers(field: pa.Field, where: str) -> bool:
    """Whether a column holds numbers, not text. Raises UserError for other types."""
    kind = field.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    kind = value_type(kind)
    if not (types.is_integer(kind) or is_text(kind)):
        raise UserError(
            f"{where}: column {field.name!r} holds {shortened(str(field.type))}, but labels are text, whole numbers (of"
            " pandas, as type Int64) or lists of them. For images without labels: label_column= ."
        )
    return types.is_integer(kind)
