"""What training reads of a split's samples, as memory-mapped columns: opening them costs nothing, however many there are.

    index/<split>-<hash of samples.parquet>/     in the data set's folder
        offsets, sizes, label_starts, labels     plain little-endian arrays (COLUMNS)
        index.json                               what they are; without it, or with files of other sizes, it is no index

All of it follows from samples.parquet, and is made of it when it is not there, once for all processes that ask. Where
the data set's folder is not to be written, it goes into a cache folder, and where that fails, into memory.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

INDEX_FOLDER = "index"
COLUMNS = {"offsets": "<i8", "sizes": "<i8", "label_starts": "<i8", "labels": "<i4"}
_FORMAT, _INFO = "vit-index/1", "index.json"
_PARQUET_COLUMNS = ["offset", "size", "labels"]

# Reads these columns of a split's rows in samples.parquet, part by part.
Read = Callable[[list[str]], Iterable[pa.Table]]


@dataclass(frozen=True)
class Index:
    """Columns of n samples, in the order of the manifest.

    offsets, sizes: (n,) int64, where the image's bytes are inside its tar. labels: int32, of all samples, one after
    another; sample i has those from label_starts[i] up to label_starts[i + 1] ((n + 1,) int64). max_labels: the most
    that one sample has. note: a line for people when the index could be kept nowhere, else empty.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    label_starts: np.ndarray
    labels: np.ndarray
    max_labels: int
    note: str = ""

    def __len__(self) -> int:
        return len(self.offsets)


def open_index(name: str, places: Sequence[Path], read: Read) -> Index:
    """Map the index `name` from the first of these folders that has it or can be given it; else keep it in memory."""
    reasons = []
    for place in places:
        folder = place / name
        try:
            return _map(folder) or _build_once(folder, read)
        except OSError as error:  # Read-only, full, or a file system without locks: the next may be better.
            reasons.append(f"{place}: {error.strerror or error}")
    columns: dict[str, list[np.ndarray]] = {column: [] for column in COLUMNS}
    max_labels = _derive(read, lambda column, values: columns[column].append(values))
    note = f"the index of {name} is in this process's memory, because it cannot be kept ({'; '.join(reasons)})"
    return _of({column: np.concatenate(parts) for column, parts in columns.items()}, max_labels, note)


def cache_folder() -> Path:
    """Where indexes go that cannot stand beside their data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit-pipeline" / "index"


def _of(columns: dict[str, np.ndarray], max_labels: int, note: str = "") -> Index:
    return Index(
        columns["offsets"],
        columns["sizes"],
        columns["label_starts"],
        columns["labels"],
        max_labels=max_labels,
        note=note,
    )


def _map(folder: Path) -> Index | None:
    """The index in this folder, or None when there is no whole one."""
    try:
        info = json.loads((folder / _INFO).read_text())
        if info["format"] != _FORMAT:
            return None
        return _of(
            {column: _map_column(folder / column, info["lengths"][column]) for column in COLUMNS}, info["max_labels"]
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _map_column(file: Path, length: int) -> np.ndarray:
    dtype = np.dtype(COLUMNS[file.name])
    if file.stat().st_size != length * dtype.itemsize:
        raise ValueError(f"{file} is cut")
    # An empty file cannot be mapped. A plain array costs less to index than np.memmap's own type.
    return np.asarray(np.memmap(file, dtype, "r")) if length else np.empty(0, dtype)


def _build_once(folder: Path, read: Read) -> Index:
    """Make the index, whole or not at all; whoever comes while it is made waits, and maps it. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp")
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if index := _map(folder):
            return index
        # Under the lock, so these are of a process that was killed, or damaged.
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.mkdir()
            _write(temporary, read)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    index = _map(folder)
    assert index is not None, f"{folder} was written just now"
    return index


def _write(folder: Path, read: Read) -> None:
    lengths = dict.fromkeys(COLUMNS, 0)
    with contextlib.ExitStack() as stack:
        files = {column: stack.enter_context(open(folder / column, "wb")) for column in COLUMNS}

        def append(column: str, values: np.ndarray) -> None:
            values.tofile(files[column])
            lengths[column] += len(values)

        max_labels = _derive(read, append)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    info: dict[str, Any] = {"format": _FORMAT, "lengths": lengths, "max_labels": max_labels}
    (folder / _INFO).write_text(json.dumps(info))


def _derive(read: Read, append: Callable[[str, np.ndarray], None]) -> int:
    """Hand over every column of the index, part by part; returns max_labels."""
    append("label_starts", np.zeros(1, COLUMNS["label_starts"]))
    num_labels = max_labels = 0
    for table in read(_PARQUET_COLUMNS):
        counts = pc.list_value_length(table["labels"]).fill_null(0).to_numpy().astype(np.int64)
        ends = num_labels + np.cumsum(counts)
        num_labels, max_labels = int(ends[-1]) if len(ends) else num_labels, max(max_labels, int(counts.max(initial=0)))
        values = {"offsets": table["offset"], "sizes": table["size"], "labels": pc.list_flatten(table["labels"])}
        for column, of_part in values.items():
            append(column, of_part.to_numpy().astype(COLUMNS[column], copy=False))
        append("label_starts", ends.astype(COLUMNS["label_starts"], copy=False))
    return max_labels


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Alone among all processes that name this file, until the block ends or the process does."""
    with open(file, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
