"""What a data set on disk is: a folder of tars that plain webdataset reads, and a manifest that makes them addressable.

    train-000000.tar ...   `<key>.jpg` and `<key>.cls` of each sample
    samples.parquet        one row per sample, in the order split, shard, offset (SAMPLES)
    shards.parquet         one row per tar (SHARDS)
    dataset.json           classes, counts, where it came from, settings, fingerprint; written last

Whoever makes shards (or scans someone else's) calls `write_dataset`; whoever reads them calls `open_dataset`. Needs
pyarrow and numpy only.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.errors import UserError

FORMAT = "vit-dataset/1"
INFO, SAMPLES_FILE, SHARDS_FILE = "dataset.json", "samples.parquet", "shards.parquet"

_NAME = pa.dictionary(pa.int32(), pa.string())

# What a maker of shards knows of each sample. offset and size: of the image's bytes inside the tar. width and height:
# as stored, before any EXIF rotation. sha256: of the image's bytes.
ROWS = pa.schema(
    [
        ("key", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("ext", _NAME),
        ("labels", pa.list_(pa.int32())),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("sha256", pa.binary(32)),
    ]
)
# shard: row number in shards.parquet.
SAMPLES = pa.schema([*ROWS, ("split", _NAME), ("shard", pa.int32())])
SHARDS = pa.schema(
    [
        ("name", pa.string()),
        ("split", pa.string()),
        ("samples", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
    ]
)
# Large enough to be read fast, small enough that `keys` of a few samples touches few megabytes.
_ROWS_PER_GROUP = 2**18
_REMEDY = "Copy it again, or run the same launch/shard.py again to re-make it."


@dataclass(frozen=True)
class Shard:
    """A row of shards.parquet: file name, split, number of samples, bytes of the tar, sha256 of the tar (hex)."""

    name: str
    split: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """The samples of one split, as arrays of n samples in S shards; sample i of shard s is row shard_starts[s] + i.

    shard_paths: S file names. shard_sizes: (S,) int64, samples of each. shard_starts: (S + 1,) int64, cumulative.
    offsets, sizes: (n,) int64, where the image's bytes are inside its tar. label_values: int32, the labels of all
    samples, one after another; sample i has those from label_offsets[i] up to label_offsets[i + 1] ((n + 1,) int64).
    """

    name: str
    shard_paths: list[str]
    shard_sizes: np.ndarray
    shard_starts: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    label_values: np.ndarray
    label_offsets: np.ndarray
    _file: pq.ParquetFile
    _groups: range

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def max_labels(self) -> int:
        """The largest number of labels that one sample has."""
        return int(np.diff(self.label_offsets).max(initial=0))

    def labels_of(self, row: int) -> np.ndarray:
        """(labels,) int32 of one sample."""
        return self.label_values[self.label_offsets[row] : self.label_offsets[row + 1]]

    def shard_of(self, rows: np.ndarray) -> np.ndarray:
        """Index into shard_paths of each sample, int64, the shape of rows."""
        return np.searchsorted(self.shard_starts, rows, side="right") - 1

    def keys(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Keys of samples, read from disk when asked for (errors, tables, tests; not the training loop)."""
        rows = np.asarray(rows, np.int64)
        metadata = self._file.metadata
        starts = np.cumsum([0] + [metadata.row_group(group).num_rows for group in self._groups])
        groups = np.searchsorted(starts, rows, side="right") - 1
        keys = np.empty(len(rows), object)
        for group in np.unique(groups):
            column = self._file.read_row_group(self._groups[group], columns=["key"]).column("key")
            chosen = groups == group
            keys[chosen] = column.take(pa.array(rows[chosen] - starts[group])).to_pylist()
        return keys.tolist()


@dataclass(frozen=True)
class Dataset:
    """An open data set. info: dataset.json as it is."""

    path: Path
    info: dict[str, Any]

    @property
    def classes(self) -> list[str]:
        return self.info["classes"]

    @property
    def num_classes(self) -> int:
        return len(self.info["classes"])

    @property
    def fingerprint(self) -> str:
        """16 hex characters that stand for the content: the same bytes and classes, wherever and whenever written."""
        return self.info["fingerprint"]

    @property
    def splits(self) -> list[str]:
        return list(self.info["samples"])

    def shards(self) -> list[Shard]:
        """Every row of shards.parquet."""
        return [Shard(**row) for row in _open(self.path / SHARDS_FILE).read().to_pylist()]

    def is_whole(self) -> bool:
        """Whether the two tables are there, to the byte. (The tars are not read.)"""
        try:
            return all(file_sha256(self.path / name) == sha256 for name, sha256 in self.info["files"].items())
        except FileNotFoundError:
            return False

    def split(self, name: str) -> Split:
        """Read what training needs of one split (offsets, sizes, labels) and look whether its tars are there.

        Raises UserError for an unknown split, a missing tar, one of another size, and a damaged manifest.
        """
        if name not in self.splits:
            raise UserError(f"{self.path} has no split {name!r}. It has: {', '.join(self.splits)}.")
        shards = [shard for shard in self.shards() if shard.split == name]
        for shard in shards:
            _check_size(self.path / shard.name, shard.bytes)
        shard_sizes = np.array([shard.samples for shard in shards], np.int64)
        file = _open(self.path / SAMPLES_FILE)
        groups = self._row_groups(file, name)
        table = file.read_row_groups(list(groups), columns=["offset", "size", "labels"]).combine_chunks()
        if not len(table) == shard_sizes.sum() == self.info["samples"][name]:
            raise UserError(
                f"{self.path}: split {name!r} has {len(table)} rows in {SAMPLES_FILE}, {shard_sizes.sum()} in "
                f"{SHARDS_FILE} and {self.info['samples'][name]} in {INFO}. {_REMEDY}"
            )
        labels = table.column("labels").chunk(0)
        return Split(
            name=name,
            shard_paths=[str(self.path / shard.name) for shard in shards],
            shard_sizes=shard_sizes,
            shard_starts=np.concatenate([[0], np.cumsum(shard_sizes)]),
            offsets=table.column("offset").to_numpy(),
            sizes=table.column("size").to_numpy(),
            label_values=labels.values.to_numpy(),
            label_offsets=labels.offsets.to_numpy().astype(np.int64),
            _file=file,
            _groups=groups,
        )

    def _row_groups(self, file: pq.ParquetFile, name: str) -> range:
        """Splits follow one another, and each begins a row group (see `write_dataset`)."""
        before = 0
        for other in self.splits:
            if other == name:
                break
            before += self.info["samples"][other]
        ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
        first = int(np.searchsorted(ends, before, side="right"))
        last = int(np.searchsorted(ends, before + self.info["samples"][name], side="left"))
        return range(first, min(last + 1, file.num_row_groups))


def open_dataset(path: str | Path) -> Dataset:
    """Open a data set; reads dataset.json only. Raises UserError when there is none."""
    path = Path(path)
    remedy = f"Shard it first: python launch/shard.py source=... out={path}"
    if not path.exists():
        raise UserError(f"{path}: no such data set. {remedy}")
    try:
        info = json.loads((path / INFO).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is no finished data set (it has no {INFO}). {remedy}") from None
    except ValueError:
        raise UserError(f"{path / INFO} is damaged. Remove the folder, and shard again.") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        found = info.get("format") if isinstance(info, dict) else info
        raise UserError(f"{path / INFO} has format {found!r}, but this code reads {FORMAT!r}.")
    return Dataset(path, info)


def write_dataset(
    path: Path,
    shards: Sequence[Shard],
    tables: Iterable[pa.Table],
    classes: Sequence[str],
    source: dict[str, Any],
    settings: dict[str, Any],
) -> Dataset:
    """Write the manifest of shards that are on disk already; dataset.json, which makes it a data set, comes last.

    shards: in the order of their rows, one split after another. tables: the samples of each shard (schema ROWS), in the
    same order; they are taken one by one, so that all of them need not fit in memory. Raises UserError for a label that
    is no class; then the old manifest, if there was one, stays.
    """
    splits = list(dict.fromkeys(shard.split for shard in shards))
    assert [s.split for s in shards] == sorted((s.split for s in shards), key=splits.index), "splits are interleaved"
    with replacing(path / SAMPLES_FILE) as file, pq.ParquetWriter(file, SAMPLES, **_storage()) as writer:
        waiting: list[pa.Table] = []
        num_waiting = 0
        for number, (shard, rows) in enumerate(zip(shards, tables, strict=True)):
            assert len(rows) == shard.samples, f"{shard.name}: {len(rows)} rows for {shard.samples} samples"
            _check_labels(rows, shard.name, len(classes))
            waiting.append(_with_shard(rows, shard.split, number))
            num_waiting += len(rows)
            ends_split = number + 1 == len(shards) or shards[number + 1].split != shard.split
            if ends_split or num_waiting >= _ROWS_PER_GROUP:
                writer.write_table(pa.concat_tables(waiting), row_group_size=max(num_waiting, 1))
                waiting, num_waiting = [], 0
    with replacing(path / SHARDS_FILE) as file:
        pq.write_table(pa.Table.from_pylist([asdict(shard) for shard in shards], SHARDS), file)
    info = {
        "format": FORMAT,
        "fingerprint": fingerprint(shards, classes),
        "samples": {split: sum(s.samples for s in shards if s.split == split) for split in splits},
        "shards": {split: sum(s.split == split for s in shards) for split in splits},
        "files": {name: file_sha256(path / name) for name in (SAMPLES_FILE, SHARDS_FILE)},
        "num_classes": len(classes),
        "source": source,
        "settings": settings,
        "classes": list(classes),
    }
    with replacing(path / INFO) as file:
        file.write((json.dumps(info, indent=1, ensure_ascii=False) + "\n").encode())
    return Dataset(path, info)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves nothing behind when it does not.

    Written under another name, synced, renamed. The name is unique, so that two writers (a task and its retry, a
    killed run's last worker) cannot mix their bytes.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A failed write() does not know its file, and "no space left" is of little use without.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _check_labels(rows: pa.Table, shard_name: str, num_classes: int) -> None:
    labels = rows.column("labels").combine_chunks()
    values = pc.list_flatten(labels).to_numpy()
    if len(values) and not 0 <= values.min() <= values.max() < num_classes:
        wrong = np.flatnonzero((values < 0) | (values >= num_classes))
        row = pc.list_parent_indices(labels)[int(wrong[0])].as_py()
        raise UserError(
            f"{shard_name}: {rows.column('key')[row].as_py()} has label {values[wrong[0]]}, but there are {num_classes} "
            f"classes (0 to {num_classes - 1}); {len(wrong)} of the shard's labels are out of range. Mend the labels or "
            "the list of classes in the source, and shard again."
        )


def _with_shard(rows: pa.Table, split: str, number: int) -> pa.Table:
    indices = pa.array(np.zeros(len(rows), np.int32))
    rows = rows.append_column("split", pa.DictionaryArray.from_arrays(indices, pa.array([split], pa.string())))
    return rows.append_column("shard", pa.array(np.full(len(rows), number, np.int32))).cast(SAMPLES)


def _storage() -> dict[str, Any]:
    return {"compression": "zstd", "use_dictionary": ["split", "ext", "shard"]}


def fingerprint(shards: Sequence[Shard], classes: Sequence[str]) -> str:
    """16 hex characters that stand for these shards (names and bytes) and classes; see `Dataset.fingerprint`."""
    content = [sorted((shard.name, shard.sha256) for shard in shards), list(classes)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Hex, as dataset.json has it of the two tables."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {_REMEDY}") from None
    except pa.ArrowInvalid:
        raise UserError(f"{path} is damaged. {_REMEDY}") from None


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {_REMEDY}") from None
    if size != expected:
        raise UserError(f"{path} has {size} bytes, but {expected} in the manifest. {_REMEDY}")
