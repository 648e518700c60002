"""Adds the samples of a CSV to a list of excluded samples; entry point: `run`."""

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.exclusion import EXCLUDED, paths_of_lists, read_lists, write_list
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.settings.commands.data import ExcludeConfig

_COLUMNS = ("split", "row", "key")


def run(config: ExcludeConfig) -> int:
    """Write the list and print its size; returns how many samples were added. Raises UserError before it is written."""
    dataset = open_dataset(config.data)
    given = _read(config.samples)
    tables = [_found(dataset, config.samples, split, lines) for split, lines in _by_split(given).items()]
    earlier = read_lists(dataset, config.name)[config.name] if config.name in paths_of_lists(dataset) else None
    together = pa.concat_tables([*([earlier] if earlier else []), *tables])
    table = together.group_by(["split", "row"], use_threads=False).aggregate([("key", "first"), ("reason", "first")])
    path = write_list(dataset, config.name, table.rename_columns(EXCLUDED.names))
    added = len(table) - (len(earlier) if earlier else 0)
    counts = Counter(table["split"].to_pylist())
    of_splits = ", ".join(f"{count:,} of {split}" for split, count in sorted(counts.items()))
    print(f"{path}: {counted(added, 'sample')} added, {of_splits} excluded by this list")
    return added


def _read(path: str) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            lines, header = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"samples = {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if missing := [name for name in ("split", "key") if name not in header]:
        raise UserError(f"samples = {path} has no column {' and no column '.join(missing)}, but {', '.join(header)}.")
    if not lines:
        raise UserError(f"samples = {path} has no line, so there is nothing to exclude.")
    return lines


def _by_split(lines: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        found.setdefault(line["split"] or "", []).append(line)
    return found


def _found(dataset: Dataset, path: str, split: str, lines: list[dict[str, str]]) -> pa.Table:
    """The lines as rows of a list (EXCLUDED). Raises UserError for a sample that the split does not have."""
    table = dataset.table(split)
    keys = [line["key"] for line in lines]
    every = pa.concat_tables(table.read(["key"]))["key"]
    at: dict[str, list[int]] = {}
    for row in np.flatnonzero(pc.is_in(every, pa.array(keys, pa.string())).to_numpy()).tolist():
        at.setdefault(every[row].as_py(), []).append(row)
    rows = []
    for line, key in zip(lines, keys, strict=True):
        places = at.get(key, [])
        if len(places) > 1:  # Tars of others may repeat a key.
            places = [row for row in places if str(row) == line.get("row")]
        if not places:
            several = "several samples" if key in at else "no sample"
            remedy = " Give its row of the manifest in a column row." if key in at else ""
            raise UserError(f"samples = {path}: split {split!r} of {dataset.path} has {several} {key!r}.{remedy}")
        rows += places
    reasons = ["; ".join(f"{name} {value}" for name, value in _about(line)) or Path(path).name for line in lines]
    return pa.table([[split] * len(rows), rows, keys, reasons], EXCLUDED)


def _about(line: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in line.items() if name and name not in (*_COLUMNS, "picture") and value]
