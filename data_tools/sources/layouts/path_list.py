"""A list of image files and their labels and numbers, if they have any, as CSV (.csv, .tsv) or Parquet."""

import os
import re

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from data_tools.sources.labels import MISSING, WHOLE_NUMBER, TableColumns, check_columns, check_names, is_text
from data_tools.sources.layouts.archive import damage_named
from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.words import counted, missing
from pipeline.data.storage.bucket import AnyPath, BucketPath, locate, name_inside
from pipeline.data.storage.parquet import open_parquet
from pipeline.settings.commands.data import ShardConfig

_ROWS_AT_ONCE = 2**16


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every row of every split's list to the collector.

    source: the list, or a folder with one list for each split. Paths are relative to the list's folder, absolute, or
    URLs. Missing files are listed too: the job reports them as unreadable images. Rows
    of a list with a split_column are of the splits with its values.
    """
    columns = TableColumns(config, collector)
    listed: dict[BucketPath, dict[str, tuple[int, int]]] = {}
    by_column = _split_column(source, config)
    if by_column:
        lists = {", ".join(collector.splits): source}
    else:
        lists = {split: source / name if name else source for split, name in collector.splits.items()}
    of_value = {value: split for split, value in collector.splits.items()}
    collector.root = source.parent if source.is_file() else source
    for split, path in lists.items():
        if not path.is_file():
            raise UserError(f"splits.{split} = {missing(str(path), 'file', 'Name a list, as FILE.csv.')}")
        others = [("path_column", config.path_column), ("split_column", by_column)]
        wanted = columns.choose(_column_names(path), str(path), others)
        is_csv = path.suffix != ".parquet"
        table = _read(path, wanted)
        if not is_text(kind := table.schema.field(config.path_column).type):
            raise UserError(f"{path}: column {config.path_column!r} holds {kind}, but paths are text.")
        are_numbers = _are_numbers(table[columns.label], config.label_separator) if is_csv and columns.label else None
        columns.check(table.schema, str(path), [], are_numbers)
        if by_column:
            _report_splits(path, config, _splits(table, by_column, path), collector)
        folder = path.parent
        inside = f"{name_inside(folder, collector.root)}/" if folder != collector.root else ""
        rows = (row for batch in table.to_batches(_ROWS_AT_ONCE) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            name, where = row[config.path_column], f"{path}, row {number}"
            of_split = of_value.get(str(row[by_column]).strip()) if by_column else split
            if of_split is None:
                continue
            if not name:
                raise UserError(f"{where}: {config.path_column} is empty.")
            for text in filter(None, row.values() if is_csv else ()):
                if re.search(r"[\r\n]", text):
                    # It goes on in the next line: the rows until its end would be lost.
                    raise UserError(
                        f"{where}: {quoted(text)} has a line break. Is a quotation mark missing, or one too many?"
                    )
            names, group, targets = columns.of_row(row, where, config.label_separator)
            place = name if name.startswith("/") or "://" in name else inside + name
            size, mtime = _look_at(locate(folder, name), listed)
            of_file = place, -1, 0, size
            collector.sample(of_split, _key(name), names, *of_file, group=group, mtime=mtime, targets=targets)
    columns.finish()


def find_splits(source: AnyPath, config: ShardConfig) -> dict[str, str]:
    """Split -> its value in the list's split_column; empty without this column. Raises UserError for values that cannot
    name splits.
    """
    column = _split_column(source, config)
    if not column:
        return {}
    check_columns(_column_names(source), [("split_column", column)], str(source))
    values = sorted(set(_splits(_read(source, [column]), column, source).unique().to_pylist()) - MISSING - {None})
    if not all(re.fullmatch("[a-z0-9_]+", value) for value in values):
        raise UserError(
            f"{source}: the column {column!r} has values that cannot name a split, which needs lower-case letters,"
            f" digits and _: {', '.join(values)}. Say which splits they are: splits.train=VALUE ... To have all rows in"
            " one split: split_column= ."
        )
    return dict(zip(values, values, strict=True))


def _split_column(source: AnyPath, config: ShardConfig) -> str:
    """The column that names the splits of a list's rows; "" if the source is a folder of lists, or has no column of the
    default name.
    """
    column, others = config.split_column, (config.path_column, config.label_column, config.group_column)
    if not source.is_file() or (
        column == ShardConfig.split_column and column not in set(_column_names(source)) - {*others}
    ):
        return ""
    return column


def _splits(table: pa.Table, column: str, path: AnyPath) -> pa.ChunkedArray:
    """The text of the split_column. Raises UserError for a type that cannot hold names."""
    check_names(table.schema.field(column), str(path), "split_column")
    return pc.utf8_trim_whitespace(table[column].cast(pa.string()))


def _report_splits(path: AnyPath, config: ShardConfig, values: pa.ChunkedArray, collector: Collector) -> None:
    """Notes how many rows are of each split. values: of the split_column. Raises UserError for a split without rows."""
    counts = {str(row["values"]): row["counts"] for row in values.value_counts().to_pylist()}
    said = f"by the column {config.split_column!r}, {path} has {counts}"
    for split, value in collector.splits.items():
        if value not in counts:
            raise UserError(
                f"splits.{split} = {value!r}, but {said}. Name one of these, or ignore the column: split_column= ."
            )
    left_out = len(values) - sum(counts[value] for value in collector.splits.values())
    collector.notes.append(
        f"{said}; left out {counted(left_out, 'row')} of no split (split_column= ignores the column)"
    )


def _column_names(path: AnyPath) -> list[str]:
    with damage_named(path, pa.ArrowException, OSError):
        if path.suffix == ".parquet":
            return open_parquet(path).schema_arrow.names
        with path.open("rb") as text, pacsv.open_csv(text, parse_options=_parse_options(path)) as reader:
            return reader.schema.names


def _read(path: AnyPath, columns: list[str]) -> pa.Table:
    with damage_named(path, pa.ArrowException, OSError):
        if path.suffix == ".parquet":
            return open_parquet(path).read(columns=columns).select(columns)
        convert = pacsv.ConvertOptions(include_columns=columns, column_types=dict.fromkeys(columns, pa.string()))
        with path.open("rb") as text:
            return pacsv.read_csv(text, parse_options=_parse_options(path), convert_options=convert)


def _parse_options(path: AnyPath) -> pacsv.ParseOptions:
    return pacsv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",", newlines_in_values=True)


def _are_numbers(labels: pa.ChunkedArray, separator: str) -> bool:
    """Whether all labels of a CSV are whole numbers. As names, class 10 would be sorted before class 2.

    1.0 is one, too: pandas writes a column of numbers so if some are missing.
    """
    parts = pc.list_flatten(pc.split_pattern(pc.unique(labels), separator))
    parts = pc.utf8_trim_whitespace(parts)
    parts = parts.filter(pc.invert(pc.is_in(parts, pa.array(MISSING))))
    if not len(parts) or not pc.all(pc.match_substring_regex(parts, f"^{WHOLE_NUMBER}$")).as_py():
        return False
    # Codes of equal width (001, 010) stay names: their order is that of the numbers.
    is_padded = pc.any(pc.match_substring_regex(parts, r"^0\d")).as_py()
    return not is_padded or len(pc.unique(pc.utf8_length(parts))) > 1


def _look_at(path: AnyPath, listed: dict[BucketPath, dict[str, tuple[int, int]]]) -> tuple[int, int]:
    """(bytes, mtime) of a file, zeros for a missing one. listed: in an object store, each folder is listed once; its
    listing is put here.
    """
    if isinstance(path, BucketPath):
        if path.parent not in listed:
            listed[path.parent] = {file.name: (size, mtime) for file, size, mtime in path.parent.walk(recursive=False)}
        return listed[path.parent].get(path.name, (0, 0))
    try:
        found = path.stat()
    except (OSError, ValueError):  # ValueError for a NUL.
        return 0, 0  # The job reports it as an unreadable image.
    return found.st_size, found.st_mtime_ns


def _key(name: str) -> str:
    """The path without its extension and without parts that would lead out of the folder a tar is unpacked in."""
    _, is_url, rest = name.partition("://")
    plain = rest.partition("?")[0] if is_url else name
    return "/".join(part for part in os.path.splitext(plain)[0].split("/") if part not in ("", ".", ".."))
