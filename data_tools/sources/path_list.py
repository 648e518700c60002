"""A list of image files and their labels, as CSV (.csv, .tsv) or Parquet."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pyarrow.types as types

from data_tools.sources.class_numbers import read_names
from data_tools.sources.labels import LabelColumn, check_columns
from data_tools.sources.listing import Collector
from pipeline.data.bucket import AnyPath, local_path
from pipeline.data_config import ShardConfig
from pipeline.errors import UserError

_ROWS_AT_ONCE = 2**16


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Tell the collector every row of the list of every split.

    source: the list, or a folder that holds one for each split. A file that is not there is listed all the same: the job
    finds it unreadable, counts it and names it.
    """
    given = read_names(config.label_names, "label_names") if config.label_names else []
    source = local_path(source, "layout = list")
    labels: LabelColumn | None = None
    lists = {split: source / name if name else source for split, name in collector.splits.items()}
    collector.root = source.parent if source.is_file() else source
    for split, path in lists.items():
        if not path.is_file():
            raise UserError(f"{path} is no list of images (split {split!r}). Name it: splits.{split}=FILE.csv")
        table = _read(path, config)
        labels = labels or LabelColumn(
            table.schema.field(config.label_column), str(path), given, config.label_separator
        )
        folder = str(path.parent)
        inside = "" if path.parent == collector.root else path.parent.relative_to(collector.root).as_posix() + "/"
        row = 0
        for batch in table.to_batches(_ROWS_AT_ONCE):
            for name, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                row += 1
                if not name:
                    raise UserError(f"{path}, row {row}: {config.path_column} is empty.")
                names = labels.names(value, f"{path}, row {row}")
                place = name if name.startswith("/") else inside + name
                collector.sample(split, _key(name), names, place, -1, 0, _size(os.path.join(folder, name)))
    assert labels is not None
    collector.classes = labels.classes()


def _read(path: Path, config: ShardConfig) -> pa.Table:
    """The columns of paths (text) and of labels."""
    wanted = {"path_column": config.path_column, "label_column": config.label_column}
    columns = list(wanted.values())
    try:
        if path.suffix == ".parquet":
            check_columns(pq.read_schema(path).names, wanted, str(path))
            table = pq.read_table(path, columns=columns).select(columns)
        else:
            parse = pacsv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",", newlines_in_values=True)
            with pacsv.open_csv(path, parse_options=parse) as reader:
                check_columns(reader.schema.names, wanted, str(path))
            convert = pacsv.ConvertOptions(include_columns=columns, column_types=dict.fromkeys(columns, pa.string()))
            table = _with_numbers(pacsv.read_csv(path, parse_options=parse, convert_options=convert), columns[1])
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    kind = table.schema.field(0).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise UserError(f"{path}: column {config.path_column!r} holds {kind}, but paths are text.")
    return table


def _with_numbers(table: pa.Table, column: str) -> pa.Table:
    """The text of a CSV as whole numbers where all of it is: else class 10 would come before class 2."""
    labels = table[column]
    if len(labels) and pc.all(pc.match_substring_regex(labels, r"^(0|-?[1-9]\d{0,17})$")).as_py():
        table = table.set_column(1, column, labels.cast(pa.int64()))
    return table


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _key(path: str) -> str:
    """The path without its extension, and staying inside whatever folder a tar is unpacked in."""
    return "/".join(part for part in os.path.splitext(path)[0].split("/") if part not in ("", ".", ".."))
