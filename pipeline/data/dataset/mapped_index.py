"""The columns of a split that training reads, memory-mapped: opening them takes no time, whatever their length.

    index/<split>-<hash of samples.parquet>/             in the data set's folder
        offsets, sizes, label_starts, labels, hashes     plain little-endian arrays (COLUMNS)
        index.json                                       their lengths and checksums, and its own checksum (Info)

The index is derived from samples.parquet, by one process for all, when it is missing or does not match its checksums.
It goes into a cache folder when the data set's folder cannot be written.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
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
from pipeline.data.storage.checksum_cache import checksum_of
from pipeline.data.storage.content import HASH_BYTES

INDEX_FOLDER = "index"
COLUMNS = {"offsets": "<i8", "sizes": "<i8", "label_starts": "<i8", "labels": "<i4", "hashes": f"V{HASH_BYTES}"}
_FORMAT, _INFO = "vit-index/2", "index.json"
_PARQUET_COLUMNS = ["offset", "size", "labels", "xxh128"]

# Reads these columns of a split's rows in samples.parquet, part by part.
Read = Callable[[list[str]], Iterable[pa.Table]]


@dataclass(frozen=True)
class ManifestIndex:
    """Columns of n samples, in the order of the manifest.

    offsets, sizes: (n,) int64, of the image's bytes inside its tar. labels: int32, of all samples, one after another;
    sample i has labels[label_starts[i] : label_starts[i + 1]] (label_starts: (n + 1,) int64). max_labels: the largest
    number of labels of a sample. note: a line to print when the split is opened, else empty. hashes: (n,) V16, XXH3-128
    of each image's bytes; empty for images without a manifest.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    label_starts: np.ndarray
    labels: np.ndarray
    max_labels: int
    note: str = ""
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, COLUMNS["hashes"]))

    def __len__(self) -> int:
        return len(self.offsets)

    def hash_of(self, row: int) -> bytes | None:
        """XXH3-128 of the bytes of an image; None if there are no hashes."""
        return self.hashes[row].tobytes() if len(self.hashes) else None


@dataclass(frozen=True)
class IndexInfo:
    """The content of index.json. lengths: of the columns. xxh128: hex, of their files. check: checksum of the other
    fields.
    """

    format: str
    lengths: dict[str, int]
    max_labels: int
    max_label: int
    xxh128: dict[str, str]
    check: str


def open_index(name: str, places: Sequence[Path], read: Read) -> ManifestIndex:
    """Map the index `name` from the first of these folders that has it or can store it. Raises UserError if none
    can.
    """
    reasons = []
    for place in places:
        try:
            index = _map_valid(place / name)
            return _build_once(place / name, read) if index is None else index
        except OSError as error:  # Read-only, full, or without locks: try the next folder.
            reasons.append(f"{place}: {error.strerror or error}")
    raise UserError(
        f"the index of {name} cannot be stored ({'; '.join(reasons)}). Set XDG_CACHE_HOME to a folder that can be"
        " written."
    )


def damage(place: Path, name: str, read: Read) -> str | None:
    """What is wrong with the index `name` in this folder; None when it is correct or missing. Reads everything.

    Its files are compared with their checksums, and these with those of an index made anew.
    """
    try:
        if _map(place / name, remember=False) is None:
            return None
    except (_DamagedError, OSError) as error:
        return str(error)
    with tempfile.TemporaryDirectory() as made:
        _write(Path(made), read)
        is_same = (Path(made) / _INFO).read_bytes() == (place / name / _INFO).read_bytes()
    return None if is_same else "it does not match samples.parquet"


class _DamagedError(ValueError):
    """An index that exists but is not as it was written."""


def _check(info: dict) -> str:
    """A checksum of the content of index.json."""
    text = json.dumps({key: value for key, value in info.items() if key != "check"}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _map_valid(folder: Path) -> ManifestIndex | None:
    """The index in this folder; None when it is missing or damaged, so that it has to be made again."""
    try:
        return _map(folder)
    except _DamagedError:
        return None


def _map(folder: Path, remember: bool = True) -> ManifestIndex | None:
    """The index in this folder; None when it is missing. Raises _DamagedError.

    remember: skip files that were verified before and have not been written since.
    """
    try:
        info = json_record.read(folder / _INFO, IndexInfo)
        if info.format != _FORMAT or info.check != _check(dataclasses.asdict(info)):
            raise _DamagedError(f"{_INFO} does not match its checksum")
        columns: dict[str, Any] = {column: _map_column(folder / column, info, remember) for column in COLUMNS}
    except FileNotFoundError:
        return None
    except UserError as error:
        raise _DamagedError(str(error)) from None
    return ManifestIndex(**columns, max_labels=info.max_labels)


def _map_column(file: Path, info: IndexInfo, remember: bool) -> np.ndarray:
    dtype, length = np.dtype(COLUMNS[file.name]), info.lengths[file.name]
    if file.stat().st_size != length * dtype.itemsize:
        raise _DamagedError(f"{file} is truncated")
    if checksum_of(file, info.xxh128[file.name], xxhash.xxh3_128, remember) != info.xxh128[file.name]:
        raise _DamagedError(f"{file} does not match its checksum")
    # An empty file cannot be mapped. A plain array costs less to index than np.memmap's own type.
    return np.asarray(np.memmap(file, dtype, "r")) if length else np.empty(0, dtype)


def _build_once(folder: Path, read: Read) -> ManifestIndex:
    """Make and map the index; other processes wait, and map it. A failure leaves nothing behind. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp")
    with locked(folder.with_name(f".{folder.name}.lock")):
        if (index := _map_valid(folder)) is not None:
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
    index = _map_valid(folder)
    if index is None:
        raise OSError(f"{folder} does not hold what was just written to it")
    return index


def _write(folder: Path, read: Read) -> None:
    lengths = dict.fromkeys(COLUMNS, 0)
    digests = {column: xxhash.xxh3_128() for column in COLUMNS}
    num_labels = max_labels = 0
    max_label = -1
    with contextlib.ExitStack() as stack:
        files = {column: stack.enter_context(open(folder / column, "wb")) for column in COLUMNS}

        def append(column: str, values: np.ndarray) -> None:
            values = np.ascontiguousarray(values, COLUMNS[column])
            values.tofile(files[column])
            digests[column].update(values.view(np.uint8).data)
            lengths[column] += len(values)

        append("label_starts", np.zeros(1))
        for table in read(_PARQUET_COLUMNS):
            labels = pc.list_flatten(table["labels"]).to_numpy()
            counts = pc.list_value_length(table["labels"]).to_numpy()
            append("offsets", table["offset"].to_numpy())
            append("sizes", table["size"].to_numpy())
            append("labels", labels)
            append("label_starts", num_labels + np.cumsum(counts, dtype=np.int64))
            append("hashes", hash_column(table["xxh128"]))
            num_labels += len(labels)
            max_labels = max(max_labels, int(counts.max(initial=0)))
            max_label = max(max_label, int(labels.max(initial=-1)))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    checksums = {column: digest.hexdigest() for column, digest in digests.items()}
    info = dataclasses.asdict(IndexInfo(_FORMAT, lengths, max_labels, max_label, checksums, ""))
    (folder / _INFO).write_text(json.dumps({**info, "check": _check(info)}))


def hash_column(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) V16 of the manifest's column xxh128."""
    column = column.combine_chunks()
    data = np.frombuffer(column.buffers()[1], COLUMNS["hashes"])
    return data[column.offset : column.offset + len(column)]
