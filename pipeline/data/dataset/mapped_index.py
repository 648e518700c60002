"""The columns of a split that training reads, memory-mapped: opening them takes no time, whatever their length.

    index/<split>-<hash of samples.parquet>/             in the data set's folder
        offsets, sizes, label_starts, labels, hashes,    plain little-endian arrays (COLUMNS)
        targets
        max_labels                                       one number
        index.json                                       their checksums, XXH3-128 in hex, by the name of the column

The index is derived from samples.parquet, by one process for all, when it is missing or does not match its checksums.
It goes into a cache folder when the data set's folder cannot be written.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.locks import locked
from pipeline.data.storage.checksum_cache import checksum_of, digest_of
from pipeline.data.storage.content import HASH_BYTES

INDEX_FOLDER = "index"
COLUMNS = {
    "offsets": "<i8",
    "sizes": "<i8",
    "label_starts": "<i8",
    "labels": "<i4",
    "hashes": f"V{HASH_BYTES}",
    "max_labels": "<i4",
    "targets": "<f4",
}
_FORMAT, _INFO = "vit-index/4", "index.json"
# The column of samples.parquet with numbers to predict, if samples have some.
TARGETS = "targets"
_PARQUET_COLUMNS = ["offset", "size", "labels", "xxh128", TARGETS]

# Reads these columns of a split's rows in samples.parquet, part by part.
Read = Callable[[list[str]], Iterable[pa.Table]]


@dataclass(frozen=True)
class ManifestIndex:
    """Columns of n samples, in the order of the manifest.

    offsets, sizes: (n,) int64, of the image's bytes inside its tar. labels: int32, of all samples, one after another;
    sample i has labels[label_starts[i] : label_starts[i + 1]] (label_starts: (n + 1,) int64). max_labels: the largest
    number of labels of a sample. note: a line to print when the split is opened, else empty. hashes: (n,) V16, XXH3-128
    of each image's bytes; empty for images without a manifest. targets: (n, T) float32, the numbers to predict, NaN for
    a missing one; of images without any, T is 0.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    label_starts: np.ndarray
    labels: np.ndarray
    max_labels: int
    targets: np.ndarray
    note: str = ""
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, COLUMNS["hashes"]))

    def __len__(self) -> int:
        return len(self.offsets)


def open_index(folders: Sequence[Path], read: Read) -> ManifestIndex:
    """Map the index from the first of these folders that has it or can store it. Raises UserError if none can."""
    reasons = []
    for folder in folders:
        try:
            index = map_index(folder)
            return _build_once(folder, read) if index is None else index
        except OSError as error:  # Read-only, full, or without locks: try the next folder.
            reasons.append(f"{folder}: {error.strerror or error}")
    raise UserError(
        f"the index of a split cannot be stored ({'; '.join(reasons)}). Set XDG_CACHE_HOME to a folder that can be"
        " written."
    )


def map_index(folder: Path, remember: bool = True) -> ManifestIndex | None:
    """The index in this folder; None when it is missing or damaged, so that it has to be made again. Raises OSError.

    remember: skip files that were verified before and have not been written since.
    """
    columns: dict[str, Any] = {}
    try:
        info = json_record.read(folder / _INFO, dict[str, str])
        for column, dtype in COLUMNS.items():
            file, expected = folder / column, info.get(column, "")
            digest = checksum_of(file, expected, xxhash.xxh3_128) if remember else digest_of(file, xxhash.xxh3_128)
            if info.get("format") != _FORMAT or digest != expected:
                return None
            # An empty file cannot be mapped. A plain array costs less to index than np.memmap's own type.
            columns[column] = np.asarray(np.memmap(file, dtype, "r")) if file.stat().st_size else np.empty(0, dtype)
    except (FileNotFoundError, UserError):
        return None
    n, values = len(columns["offsets"]), columns.pop("targets")
    targets = values.reshape(n, len(values) // n if n else 0)
    return ManifestIndex(max_labels=int(columns.pop("max_labels")[0]), targets=targets, **columns)


def _build_once(folder: Path, read: Read) -> ManifestIndex:
    """Make and map the index; other processes wait, and map it. A failure leaves nothing behind. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp")
    with locked(folder.with_name(f".{folder.name}.lock")):
        if (index := map_index(folder)) is not None:
            return index
        # This process has the lock, so these are damaged, or a killed process left them.
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.mkdir()
            _write(temporary, read)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    if (index := map_index(folder)) is not None:
        return index
    raise OSError(f"{folder} does not hold what was just written to it")


def _write(folder: Path, read: Read) -> None:
    num_labels = max_labels = 0
    with contextlib.ExitStack() as stack:
        files = {column: stack.enter_context(open(folder / column, "wb")) for column in COLUMNS}

        def append(**columns: np.ndarray | list[int]) -> None:
            for column, values in columns.items():
                np.asarray(values, COLUMNS[column]).tofile(files[column])

        append(label_starts=[0])
        for table in read(_PARQUET_COLUMNS):
            counts = pc.list_value_length(table["labels"]).to_numpy()
            append(
                offsets=table["offset"].to_numpy(),
                sizes=table["size"].to_numpy(),
                labels=pc.list_flatten(table["labels"]).to_numpy(),
                label_starts=num_labels + np.cumsum(counts, dtype=np.int64),
                hashes=hash_column(table["xxh128"]),
            )
            if TARGETS in table.column_names:
                values = pc.list_flatten(table[TARGETS])
                append(targets=pc.fill_null(values, float("nan")).to_numpy())
            num_labels += int(counts.sum())
            max_labels = max(max_labels, int(counts.max(initial=0)))
        append(max_labels=[max_labels])
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    info = {"format": _FORMAT} | {column: digest_of(folder / column, xxhash.xxh3_128) for column in COLUMNS}
    (folder / _INFO).write_text(json.dumps(info))


def hash_column(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) V16 of the manifest's column xxh128."""
    column = column.combine_chunks()
    data = np.frombuffer(column.buffers()[1], COLUMNS["hashes"])
    return data[column.offset : column.offset + len(column)]
