"""Class names of labels that are numbers; table columns of labels (names, numbers, or lists of either) and groups."""

import re
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.types as types

from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted, shortened
from pipeline.process.installed import read_lines
from pipeline.settings.commands.data import ShardConfig

# Without names the largest label gives the number of classes; a larger one than this is probably a mistake.
_MOST_CLASSES = 2**20
# A label in text, such as 7 or 7.0.
WHOLE_NUMBER = r"-?[0-9]{1,18}(\.0+)?"
# A number to predict, in text, and the largest one of float32.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LARGEST = 3.4e38
# What programs write where a value is missing: the list of Arrow (and pandas), and what Python and pandas write in
# addition.
MISSING = frozenset([*pacsv.ConvertOptions().null_values, "None", "<NA>"])


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


def read_names(path: str, setting: str) -> list[str]:
    """Class names, one per line. Raises UserError for a repeated name."""
    names = read_lines(path, setting)
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UserError(f"{setting} = {path} names {name!r} {count} times.")
    return names


class TableColumns:
    """The columns of labels and groups of a source's tables. label: the label column of the last one that was opened;
    "" without labels.

    The first table decides whether there are labels, and whether these are names or numbers.
    """

    def __init__(self, config: ShardConfig, collector: Collector) -> None:
        self.label = ""
        self._config, self._collector = config, collector
        self._given = read_names(config.label_names, "label_names") if config.label_names else []
        self._first, self._names_of_first = "", list[str]()
        self._are_numbers: bool | None = None
        self._numbers: ClassNumbers | None = None
        self._has_labels = False

    def choose(self, there: list[str], where: str, others: list[tuple[str, str]]) -> list[str]:
        """Choose the label column of a table with these columns; returns all that are read, first the others.

        There are no labels if label_column is empty, and, with a note, if there is no column of its default name.
        others: (setting, column or "") of the other columns. Raises UserError where only some tables of the source have
        labels, and for a column that is missing or there twice.
        """
        config, notes, is_first = self._config, self._collector.notes, not self._first
        self._first = self._first or where
        label, unused = config.label_column, ShardConfig.split_column
        if label in config.target_columns and label == ShardConfig.label_column:
            label = ""
        elif label not in there and label == ShardConfig.label_column and not config.label_names:
            label = ""
            if is_first:
                notes.append(
                    f"{where} has no column {config.label_column!r}: its images have no labels. If another column holds"
                    f" labels, name it: label_column=NAME (there: {shortened(', '.join(there))})"
                )
        if not is_first and bool(self.label) != bool(label):
            raise UserError(
                f"{where} has {'labels' if label else 'no labels'}, but a table before it has"
                f" {'none' if label else 'some'}. Shard them into two data sets, or all without labels: label_column= ."
            )
        self.label, self._collector.is_labelled = label, bool(label)
        self._collector.targets = list(config.target_columns)
        targets = [("target_columns", name) for name in config.target_columns]
        wanted = [*others, ("label_column", label), ("group_column", config.group_column), *targets]
        check_columns(there, wanted, where)
        if is_first and config.split_column == unused and unused in set(there) - {column for _, column in wanted}:
            notes.append(
                f"warning: the column {unused!r} is not used: each split is a file of its own here (splits.train=train"
                " splits.val=val)"
            )
        return list(dict.fromkeys(column for _, column in wanted if column))

    def check(self, schema: pa.Schema, where: str, names: list[str], are_numbers: bool | None = None) -> None:
        """Raise UserError for columns whose types cannot hold labels or groups, or whose labels are of another type or
        other classes than those of the first table.

        names: class names by number that the table has itself. are_numbers: what the text of a CSV is; the rows of a
        later one are checked.
        """
        if group := self._config.group_column:
            check_names(schema.field(group), where, "group_column")
        if not self.label:
            return
        field, names = schema.field(self.label), self._given or names
        one = field.with_type(field.type.value_type) if is_list(field.type) else field
        of_type = check_names(one, where, "label_column") if are_numbers is None else are_numbers
        if self._are_numbers is None:
            self._are_numbers, self._names_of_first = of_type, names
            self._numbers = ClassNumbers(names) if names or of_type else None
        if are_numbers is None and of_type != self._are_numbers:
            raise UserError(
                f"{where}: column {field.name!r} holds text in one of this file and {self._first}, and numbers in the"
                " other. Give all files the same type."
            )
        refuse_other_names(f"{where}, by its metadata `huggingface`", names, self._first, self._names_of_first)

    def of_row(self, row: dict[str, Any], where: str, separator: str = "") -> tuple[list[str], str, list[float | None]]:
        """(class names, group, numbers to predict) of a row: no names without labels and for a missing one; "" without
        groups. where: for errors. separator: of the labels in a text, if it is not one label.
        """
        names = self._class_names(row[self.label], where, separator) if self.label else []
        self._has_labels |= bool(names)
        targets = [_as_number(row[name], where, name) for name in self._config.target_columns]
        if not self._config.group_column:
            return names, "", targets
        group = str(row[self._config.group_column]).strip()
        if group in MISSING:
            raise UserError(
                f"{where}: its group is missing (group_column). An image that is like no other is a group of its own."
            )
        return names, group, targets

    def _class_names(self, value: Any, where: str, separator: str) -> list[str]:
        if separator and isinstance(value, str):
            value = value.split(separator)
        if isinstance(value, list) and any(label is None for label in value):
            raise UserError(
                f"{where}: {quoted(value)} has a missing label (null). An image without a label has [] or null."
            )
        labels = [value] if isinstance(value, str | int) else value or []
        labels = [label.strip() if isinstance(label, str) else label for label in labels]
        labels = [label for label in labels if label not in MISSING]
        if self._numbers is None:
            return [str(label) for label in labels]
        if not all(isinstance(label, int) or re.fullmatch(WHOLE_NUMBER, label) for label in labels):
            raise UserError(f"{where}: label {quoted(value)} is not a number, as label_names or earlier labels need.")
        numbers = (label if isinstance(label, int) else int(label.partition(".")[0]) for label in labels)
        return [self._numbers.name(number, where) for number in numbers]

    def finish(self) -> None:
        """Gives the collector all class names in order, if labels are numbers.

        Raises UserError for a label column in which no row has a label.
        """
        if self.label and not self._has_labels:
            raise UserError(
                f"{self._first}: no row has a label in the column {self.label!r}. Fill it in, or, for images without"
                " labels, set label_column= (empty)."
            )
        self._collector.classes = self._numbers.classes() if self._numbers else []


def _as_number(value: Any, where: str, column: str) -> float | None:
    """A number to predict, from text or a number; None for a missing one. Raises UserError for anything else.

    where: the row.
    """
    text = "" if value is None else str(value).strip()
    if text in MISSING:
        return None
    if _NUMBER.fullmatch(text) and abs(number := float(text)) <= _LARGEST:
        return number
    raise UserError(
        f"{where}: {quoted(text)} in column {column!r} is not a number (with a decimal point). Correct it, or leave it"
        " empty, which is a missing value."
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, in any of Arrow's layouts."""
    return str(_value_type(kind)) in ("string", "large_string", "string_view")


def is_list(kind: pa.DataType) -> bool:
    """Whether each row of a column of this type is a list."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _value_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values; they may be stored as numbers of a dictionary."""
    return kind.value_type if types.is_dictionary(kind) else kind


def check_names(field: pa.Field, where: str, setting: str) -> bool:
    """Whether a column holds whole numbers. Raises UserError for one that holds neither these nor text."""
    are_numbers = types.is_integer(_value_type(field.type))
    if not (are_numbers or is_text(field.type)):
        raise UserError(
            f"{where}: column {field.name!r} ({setting}) holds {shortened(str(field.type))}, but it has to hold text or"
            f" whole numbers (of pandas, as type Int64). To read no such column: {setting}= ."
        )
    return are_numbers


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
