"""Adds the samples of a CSV to a list of excluded samples; entry point: `run`."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.exclusion import EXCLUDED, paths_of_lists, read_lists, write_list
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.settings.commands.data import ExcludeConfig

# Columns of the CSV that are not a reason.
_COLUMNS = ("split", "row", "key", "picture")


def run(config: ExcludeConfig) -> int:
    """Write the list and print its size; returns how many samples were added. Raises UserError before it is written."""
    dataset = open_dataset(config.data)
    of_splits = defaultdict(list)
    for line in _read(config.samples):
        of_splits[line["split"]].append(line)
    found = [row for split, lines in of_splits.items() for row in _rows(dataset, config.samples, split, lines)]
    lists = read_lists(dataset, config.name if config.name in paths_of_lists(dataset) else "none").values()
    path = write_list(dataset, config.name, pa.concat_tables([*lists, pa.Table.from_pylist(found, EXCLUDED)]))
    table = read_lists(dataset, config.name)[config.name]
    added = len(table) - sum(map(len, lists))
    counts = sorted(Counter(table["split"].to_pylist()).items())
    excluded = ", ".join(f"{count:,} of {split}" for split, count in counts)
    print(f"{path}: {counted(added, 'sample')} added, {excluded} excluded by this list")
    return added


def _read(path: str) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            lines, header = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"samples = {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if not {"split", "key"} <= {*header}:
        raise UserError(f"samples = {path} must have the columns split and key, and has {', '.join(header)}.")
    return lines


def _rows(dataset: Dataset, path: str, split: str, lines: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """The lines as rows of a list (EXCLUDED). Raises UserError for a sample that the split does not have."""
    every = dataset.table(split).read_all(["key"])["key"]
    wanted = pa.array([line["key"] for line in lines], pa.string())
    places = defaultdict(list)
    for row in np.flatnonzero(pc.is_in(every, wanted)).tolist():
        places[every[row].as_py()].append(row)
    for line in lines:
        key = line["key"]
        # Tars of others may repeat a key.
        found = [row for row in places[key] if len(places[key]) == 1 or str(row) == line.get("row")]
        if not found:
            raise UserError(
                f"samples = {path}: split {split!r} of {dataset.path} has no sample {key!r}, or several, which their"
                " row of the manifest in a column row would tell apart."
            )
        reason = [f"{name} {value}" for name, value in line.items() if name and value and name not in _COLUMNS]
        yield {"split": split, "row": found[0], "key": key, "reason": "; ".join(reason) or Path(path).name}
