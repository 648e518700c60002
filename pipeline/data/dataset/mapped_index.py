"""The columns of a split that training reads, memory-mapped: opening them takes no time, whatever their length.

    index/<split>-<hash of samples.parquet>/             in the data set's folder
        offsets, sizes, label_starts, labels, hashes,    plain little-endian arrays (COLUMNS)
        targets
        chunks                                           XXH3-64 of each ROWS rows of the columns, one after another
        index.json                                       lengths of the columns; checksum of itself and of chunks

The index is derived from samples.parquet, by one process for all, when it is missing. It goes into a cache folder when
the data set's folder cannot be written. A chunk of a column is compared with its checksum when a process first reads
it, so that opening does not take longer the larger a data set is.
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
from pipeline.base.errors import OneRankCrashError, OneRankError, UserError
from pipeline.base.locks import locked

INDEX_FOLDER = "index"
COLUMNS = {
    "offsets": "<i8",
    "sizes": "<i8",
    "label_starts": "<i8",
    "labels": "<i4",
    "hashes": "V16",
    "targets": "<f4",
}
# Rows that have one checksum: about those of a shard, of which a process often reads all.
ROWS = 2**13
_FORMAT, _INFO, _CHUNKS = "vit-index/5", "index.json", "chunks"
# The column of samples.parquet with numbers to predict, if samples have some.
TARGETS = "targets"
_PARQUET_COLUMNS = ["offset", "size", "labels", "xxh128", TARGETS]

# Reads these columns of a split's rows in samples.parquet, part by part.
Read = Callable[[list[str]], Iterable[pa.Table]]


class CheckedArray:
    """A memory-mapped array. What is read of it, by numbers of rows or by slices, is an ordinary one.

    Each ROWS rows are compared with their checksum when this process first reads some of them. Damage raises
    OneRankCrashError, after the index was removed: the next start makes it again.
    """

    def __init__(self, file: Path, values: np.ndarray, digests: np.ndarray) -> None:
        self._file, self._values, self._digests = file, values, digests
        self._is_checked = bytearray(len(digests))
        self.shape = values.shape

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            chunks: Iterable[int] = range(start // ROWS, -(-stop // ROWS))
        elif isinstance(rows, np.ndarray):
            chunks = np.unique(rows // ROWS).tolist()
        else:
            chunks = (int(rows) // ROWS,)
        for chunk in chunks:
            if not self._is_checked[chunk]:
                if _digest(self._values, chunk) != self._digests[chunk]:
                    self._give_up(chunk)
                self._is_checked[chunk] = True
        return self._values[rows]

    def is_intact(self) -> bool:
        """Whether all rows have their checksums. Reads all."""
        return _digests(self._values) == self._digests.tolist()

    def _give_up(self, chunk: int) -> None:
        """Remove the index, and raise."""
        found = f"{self._file} is damaged: rows {chunk * ROWS:,} to {(chunk + 1) * ROWS - 1:,} do not match their"
        try:
            (self._file.parent / _INFO).unlink(missing_ok=True)
        except OSError as error:
            raise OneRankError(
                f"{found} checksum. Remove {self._file.parent} ({error.strerror} here): the next start makes it again."
            ) from None
        raise OneRankCrashError(f"{found} checksum. The same command makes {self._file.parent} again, and goes on.")


Column = np.ndarray | CheckedArray


@dataclass(frozen=True)
class ManifestIndex:
    """Columns of n samples, in the order of the manifest.

    offsets, sizes: (n,) int64, of the image's bytes inside its tar. labels: int32, of all samples, one after another;
    sample i has labels[label_starts[i] : label_starts[i + 1]] (label_starts: (n + 1,) int64). max_labels: the largest
    number of labels of a sample. hashes: (n,) V16, XXH3-128 of each image's bytes; empty for images without a manifest.
    targets: (n, T) float32, the numbers to predict, NaN for a missing one; of images without any, T is 0.
    """

    offsets: Column
    sizes: Column
    label_starts: Column
    labels: Column
    max_labels: int
    targets: Column
    hashes: Column = field(default_factory=lambda: np.empty(0, COLUMNS["hashes"]))

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


def map_index(folder: Path) -> ManifestIndex | None:
    """The index in this folder; None when it is missing or incomplete, so that it has to be made again. Raises
    OSError.
    """
    try:
        info = json_record.read(folder / _INFO, dict[str, Any])
        digests = np.fromfile(folder / _CHUNKS, "<u8")
        if info.get("format") != _FORMAT or info.pop("checksum", "") != _checksum(info, digests):
            return None
        arrays = _map_columns(folder)
    except (FileNotFoundError, UserError, ValueError):  # ValueError: a part of a row.
        return None
    if {column: array.nbytes for column, array in arrays.items()} != info["bytes"]:
        return None
    of_columns = np.split(digests, np.cumsum([-(-len(array) // ROWS) for array in arrays.values()])[:-1])
    columns: dict[str, Any] = {
        column: CheckedArray(folder / column, array, own)
        for (column, array), own in zip(arrays.items(), of_columns, strict=True)
    }
    return ManifestIndex(max_labels=info["max_labels"], **columns)


def is_intact(folder: Path) -> bool:
    """Whether the index in this folder is what was written. Reads all of it. Raises OSError."""
    index = map_index(folder)
    return index is not None and all(getattr(index, column).is_intact() for column in COLUMNS)


def _map_columns(folder: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for column, dtype in COLUMNS.items():
        file = folder / column
        # An empty file cannot be mapped. A plain array costs less to index than np.memmap's own type.
        arrays[column] = np.asarray(np.memmap(file, dtype, "r")) if file.stat().st_size else np.empty(0, dtype)
    n, values = len(arrays["offsets"]), arrays["targets"]
    arrays["targets"] = values.reshape(n, len(values) // n if n else 0)
    return arrays


def _digests(array: np.ndarray) -> list[int]:
    return [_digest(array, chunk) for chunk in range(-(-len(array) // ROWS))]


def _digest(array: np.ndarray, chunk: int) -> int:
    return xxhash.xxh3_64_intdigest(array[chunk * ROWS : (chunk + 1) * ROWS].data)


def _checksum(info: dict[str, Any], digests: np.ndarray) -> str:
    """Hex XXH3-128 of index.json without its checksum, and of the checksums of all chunks."""
    return xxhash.xxh3_128_hexdigest(json.dumps(info, sort_keys=True).encode() + digests.tobytes())


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
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    describe_index(folder, max_labels)


def describe_index(folder: Path, max_labels: int) -> None:
    """Write the checksums of columns that are there, and index.json."""
    arrays = _map_columns(folder)
    digests = np.array([digest for array in arrays.values() for digest in _digests(array)], "<u8")
    digests.tofile(folder / _CHUNKS)
    sizes = {column: array.nbytes for column, array in arrays.items()}
    info = {"format": _FORMAT, "max_labels": max_labels, "bytes": sizes}
    info["checksum"] = _checksum(info, digests)
    (folder / _INFO).write_text(json.dumps(info))


def hash_column(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) V16 of the manifest's column xxh128."""
    column = column.combine_chunks()
    data = np.frombuffer(column.buffers()[1], COLUMNS["hashes"])
    return data[column.offset : column.offset + len(column)]
