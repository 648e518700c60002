"""What a data set on disk is: a folder of tars that plain webdataset reads, and a manifest that makes them addressable.

    train-000000.tar ...   `<key>.jpg` and `<key>.cls` of each sample
    samples.parquet        one row per sample, in the order split, shard, offset (SAMPLES)
    shards.parquet         one row per tar (SHARDS); a name is relative to the folder, or the URL of a tar elsewhere
    dataset.json           classes, counts, where it came from, settings, fingerprint; written last

Whoever makes shards (or scans someone else's) calls `write_dataset`; whoever reads them calls `open_dataset`. The folder
is local or in a bucket (`pipeline/data/storage/bucket.py`). Needs pyarrow and numpy only.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import json_record
from pipeline.data.dataset.mapped_index import INDEX_FOLDER, Index, cache_folder, open_index
from pipeline.data.dataset.split import SampleTable, Split
from pipeline.data.dataset.subset import beyond_limit
from pipeline.data.storage.bucket import AnyPath, BucketPath, locate, to_path
from pipeline.data.storage.cache import Storage
from pipeline.data.storage.proof import proven_sha256
from pipeline.data.storage.retry import Retry
from pipeline.data.storage.whole import replacing
from pipeline.errors import UserError
from pipeline.settings.quantities import Limit

FORMAT = "vit-dataset/2"
# Differs in ROWS alone: the hash of an image was `sha256`. Such data sets are read as they are.
_FIRST_FORMAT = "vit-dataset/1"
WHOLE = Limit.parse("100%")
INFO, SAMPLES_FILE, SHARDS_FILE = "dataset.json", "samples.parquet", "shards.parquet"

_NAME = pa.dictionary(pa.int32(), pa.string())

# What a maker of shards knows of each sample. offset and size: of the image's bytes inside the tar. width and height:
# as stored, before any EXIF rotation. xxh128: of the image's bytes (`pipeline/data/storage/content.py`).
ROWS = pa.schema(
    [
        ("key", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("ext", _NAME),
        ("labels", pa.list_(pa.int32())),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("xxh128", pa.binary(16)),
    ]
)
_FIRST_ROWS = pa.schema([*list(ROWS)[:-1], ("sha256", pa.binary(32))])
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
_CHECKSUM = "checksum"
_QUOTED = 200  # Characters of what another library says.


@dataclass(frozen=True)
class Shard:
    """A row of shards.parquet: file name, split, number of samples, bytes of the tar, sha256 of the tar (hex)."""

    name: str
    split: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Info:
    """The fields of dataset.json that are used here, and their types. Data sets made earlier lack those with a default.

    files: SHA-256 (hex) of the two tables. checksum: of all other fields (`_checksum_of`).
    """

    format: str
    fingerprint: str
    samples: dict[str, int]
    shards: dict[str, int]
    classes: list[str]
    files: dict[str, str] = field(default_factory=dict)
    num_classes: int | None = None
    class_names: list[str] | None = None
    source: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    checksum: str | None = None


@dataclass(frozen=True)
class Dataset:
    """An open data set. path: its folder. info: dataset.json as it is. storage: how its files are reached."""

    path: AnyPath
    info: dict[str, Any]
    storage: Storage = field(default_factory=Storage)

    @property
    def classes(self) -> list[str]:
        return self.info["classes"]

    @property
    def class_names(self) -> list[str]:
        """Readable names of the classes (of WordNet's ids, say); the classes themselves where none were given."""
        return self.info.get("class_names", self.classes)

    @property
    def num_classes(self) -> int:
        return len(self.info["classes"])

    @property
    def fingerprint(self) -> str:
        """16 hex characters that stand for the content: the same bytes and classes, wherever and whenever written."""
        return self.info["fingerprint"]

    @property
    def rows_schema(self) -> pa.Schema:
        """Of its samples, without split and shard; the last column is the hash of the image's bytes."""
        return _FIRST_ROWS if self.info["format"] == _FIRST_FORMAT else ROWS

    @property
    def splits(self) -> list[str]:
        return list(self.info["samples"])

    def shards(self, prove: bool = True) -> list[Shard]:
        """Every row of shards.parquet. prove: compare the file with dataset.json first. Raises UserError."""
        if prove:
            self._prove(SHARDS_FILE)
        with _one_line_of(self.path / SHARDS_FILE):
            return [Shard(**row) for row in _open(self.path / SHARDS_FILE).read(columns=SHARDS.names).to_pylist()]

    def shard_path(self, name: str) -> AnyPath:
        """Where a tar lies, by its name in shards.parquet."""
        return locate(self.path, name)

    def is_whole(self) -> bool:
        """Whether the two tables are there, to the byte. (The tars are not read.)"""
        try:
            return all(file_sha256(self.path / name) == sha256 for name, sha256 in self.info["files"].items())
        except FileNotFoundError:
            return False

    def table(self, name: str, prove: bool = True) -> SampleTable:
        """All rows of one split. prove: compare samples.parquet with dataset.json first.

        Raises UserError for an unknown split and a damaged manifest.
        """
        if name not in self.splits:
            raise UserError(f"{self.path} has no split {name!r}. It has: {', '.join(self.splits)}.")
        if prove:
            self._prove(SAMPLES_FILE)
        file = _open(self.path / SAMPLES_FILE)
        return SampleTable(file, self._row_groups(file, name))

    def split(self, name: str, exclude: str = "all", limit: Limit = WHOLE, seed: int = 0) -> Split:
        """Open one split: map what training needs of it (offsets, sizes, labels), and look whether its tars are there.

        exclude: which lists of samples to leave out ("all", "none", or names with commas between). limit: of the others,
        a random part that `seed` decides. Raises UserError for an unknown split, a missing tar, one of another size, a
        damaged manifest, a list that is not to be used, and a limit of more samples than there are.
        """
        from pipeline.data.dataset.exclusion import excluded_rows  # Late: it builds on this file.

        table = self.table(name)
        names, samples, num_bytes, sha256 = self._shards_of(name)
        starts = np.concatenate([[0], np.cumsum(samples)])
        index = self.index(name)
        if not len(index) == starts[-1] == self.info["samples"][name]:
            raise UserError(
                f"{self.path}: split {name!r} has {len(index)} rows in {SAMPLES_FILE}, {starts[-1]} in "
                f"{SHARDS_FILE} and {self.info['samples'][name]} in {INFO}. {_REMEDY}"
            )
        if index.max_label >= self.num_classes:
            raise UserError(
                f"{self.path / INFO} has {self.num_classes} classes, but split {name!r} has label {index.max_label}. {_REMEDY}"
            )
        left_out, left_out_by = excluded_rows(self, name, exclude)
        if limit != WHOLE:
            beyond = beyond_limit(len(index), left_out, limit, seed)
            left_out, left_out_by = np.union1d(left_out, beyond), {**left_out_by, "data.limit": len(beyond)}
        kept = samples - np.bincount(np.searchsorted(starts, left_out, side="right") - 1, minlength=len(samples))
        if len(left_out) and not kept.any():
            raise UserError(
                f"every sample of {self.path}, split {name!r}, is left out by its lists: {', '.join(left_out_by)}."
            )
        paths = _shard_paths(self.path, names)
        self._check_shards(paths, num_bytes, kept > 0, kept == samples)
        return Split(
            name=name,
            shard_paths=paths,
            shard_sizes=kept,
            shard_starts=np.concatenate([[0], np.cumsum(kept)]),
            shard_bytes=num_bytes,
            shard_sha256=sha256,
            storage=self.storage,
            index=index,
            left_out=left_out,
            left_out_by=left_out_by,
            table=table,
        )

    def index(self, name: str) -> Index:
        """The mapped columns of one split, made of samples.parquet when they are not there yet; on a local disk."""
        with _one_line_of(self.path / SAMPLES_FILE):
            return open_index(self.index_name(name), self.index_places(), self.table(name).read)

    def index_name(self, split: str) -> str:
        """Of the folder that has the index of a split."""
        digest = self.info["files"].get(SAMPLES_FILE) or file_sha256(self.path / SAMPLES_FILE)
        return f"{split}-{digest[:16]}"

    def index_places(self) -> list[Path]:
        """Folders where an index may be, the best first."""
        beside = [self.path / INDEX_FOLDER] if isinstance(self.path, Path) else []
        return [*beside, cache_folder()]

    def _prove(self, name: str) -> None:
        """Compare one of the two tables with its hash in dataset.json, where that has one; once (`pipeline/data/storage/proof.py`)."""
        expected, path = self.info["files"].get(name), self.path / name
        if expected is None:
            return
        with _one_line_of(path):
            if proven_sha256(path, expected) != expected:
                raise UserError(f"{path} is damaged: it is not the file that {INFO} was written with. {_REMEDY}")

    def _check_shards(self, paths: list[str], num_bytes: np.ndarray, is_used: np.ndarray, is_whole: np.ndarray) -> None:
        """Look whether each shard is there that has a sample of use, and has its size.

        Samples may have been left out because their shard is cut, or gone. In a bucket even those must be whole of which
        some samples stay: who reads one compares its size, or its checksum.
        """
        sizes = _sizes(paths, self.storage.retry)
        for path, expected, used, whole in zip(
            paths, num_bytes.tolist(), is_used.tolist(), is_whole.tolist(), strict=True
        ):
            if used:
                size = sizes.get(path) if "://" in path else _local_size(path)
                _check_size(path, size, expected if whole or "://" in path else None)

    def _shards_of(self, name: str) -> tuple[list[str], np.ndarray, np.ndarray, pa.ChunkedArray]:
        """File names, samples, bytes and sha256 (hex) of a split's shards; a million of them in a second."""
        counts = [self.info["shards"][split] for split in self.splits]
        place = self.splits.index(name)
        self._prove(SHARDS_FILE)
        with _one_line_of(self.path / SHARDS_FILE):
            table = _open(self.path / SHARDS_FILE).read(columns=SHARDS.names)
            table = table.select(SHARDS.names).slice(sum(counts[:place]), counts[place]).cast(SHARDS)
        if table["split"].unique().to_pylist() not in ([name], []):
            raise UserError(f"{self.path / SHARDS_FILE} is not the one that {INFO} was written with. {_REMEDY}")
        # Not to_numpy(), which imports pandas: half of the start-up.
        samples, num_bytes = (np.from_dlpack(table[column].combine_chunks()) for column in ("samples", "bytes"))
        return table["name"].to_pylist(), samples, num_bytes, table["sha256"]

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


def open_dataset(path: str | AnyPath, storage: Storage | None = None) -> Dataset:
    """Open a data set by its folder or URL; reads dataset.json only. Raises UserError when there is none, or a damaged one."""
    storage = storage or Storage()
    path = to_path(path, storage.retry)
    remedy = f"Shard it first: python launch/shard.py source=... out={path}"
    if not path.exists():
        raise UserError(f"{path}: no such data set. {remedy}")
    try:
        with (path / INFO).open("rb") as file:
            text = file.read()
    except UserError:  # A bucket out of reach.
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is no finished data set (it has no {INFO}). {remedy}") from None
    except OSError as error:
        raise UserError(f"{path / INFO} cannot be read ({error.strerror or error}).") from None
    return Dataset(path, _parse_info(text, f"{path / INFO}"), storage)


def _parse_info(text: bytes, where: str) -> dict[str, Any]:
    """The content of dataset.json, checked. Raises UserError."""
    remedy = f"Copy {INFO} again, or remove the folder and shard again."
    try:
        info = json_record.parse(text, Any, where)
    except UserError as error:
        raise UserError(f"{where} is damaged ({str(error).removeprefix(f'{where} ')}). {remedy}") from None
    if not isinstance(info, dict) or info.get("format") not in (FORMAT, _FIRST_FORMAT):
        found = info.get("format") if isinstance(info, dict) else info
        raise UserError(f"{where} has format {json_record.quoted(found)}, but this code reads {FORMAT!r}.")
    record = json_record.convert(info, _Info, where)
    if record.checksum not in (None, _checksum_of(info)):
        raise UserError(
            f"{where} is damaged: its content does not fit its checksum. {remedy} If it was changed on purpose, remove "
            f"its field {_CHECKSUM!r}."
        )
    twice = [name for name, count in Counter(record.classes).items() if count > 1]
    if twice:
        raise UserError(f"{where}: classes has {json_record.quoted(twice[0])} more than once. {remedy}")
    for name, number in (("num_classes", record.num_classes), ("class_names", record.class_names)):
        count = len(number) if isinstance(number, list) else number
        if count not in (None, len(record.classes)):
            raise UserError(f"{where}: classes has {len(record.classes)} names, but {name} says {count}. {remedy}")
    if (
        list(record.samples) != list(record.shards)
        or min([*record.samples.values(), *record.shards.values()], default=0) < 0
    ):
        raise UserError(f"{where}: samples = {record.samples} and shards = {record.shards} do not fit. {remedy}")
    # As a data set has them that was made now, except where it says by its absence when it was made.
    given = {key: value for key, value in info.items() if value is not None}
    return {**given, "files": record.files, "source": record.source, "settings": record.settings}


def _checksum_of(info: dict[str, Any]) -> str:
    """Hex SHA-256 of the content of dataset.json without its own checksum, however it is written down."""
    rest = {key: value for key, value in info.items() if key != _CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_dataset(
    path: AnyPath,
    shards: Sequence[Shard],
    tables: Iterable[pa.Table],
    classes: Sequence[str],
    source: dict[str, Any],
    settings: dict[str, Any],
    class_names: Sequence[str] | None = None,
) -> Dataset:
    """Write the manifest of shards that are in the folder already; dataset.json, which makes it a data set, comes last.

    shards: in the order of their rows, one split after another. tables: the samples of each shard (schema ROWS), in the
    same order; they are taken one by one, so that all of them need not fit in memory. class_names: readable names of
    classes, where they have others. Raises UserError for a label that is no class; then the old manifest, if there was
    one, stays.
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
    if class_names is not None:
        info["class_names"] = list(class_names)
    info[_CHECKSUM] = _checksum_of(info)
    with replacing(path / INFO) as file:
        file.write((json.dumps(info, indent=1, ensure_ascii=False) + "\n").encode())
    dataset = Dataset(path, info)
    if isinstance(path, Path):
        for split in splits:
            dataset.index(split)  # Now, so that the first run need not wait for it.
    return dataset


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
    # The last part of the name: where tars that were indexed lie is not what they are.
    content = [sorted((locate(Path(), shard.name).name, shard.sha256) for shard in shards), list(classes)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def file_sha256(path: AnyPath) -> str:
    """Hex, as dataset.json has it of the two tables."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class _FromPython(pq.ParquetFile):
    """Reads through a Python file without Arrow's threads: one of them aborts the process, now and then, when it ends
    (apache/arrow issues 34314 and 50482)."""

    def read(self, columns: Any = None, use_threads: bool = False, **options: Any) -> pa.Table:
        return super().read(columns, use_threads=use_threads, **options)

    def iter_batches(self, *arguments: Any, use_threads: bool = False, **options: Any) -> Iterator[pa.RecordBatch]:
        return super().iter_batches(*arguments, use_threads=use_threads, **options)


def open_parquet(path: AnyPath, memory_map: bool = True, **options: Any) -> pq.ParquetFile:
    """A Parquet file wherever it lies. Raises FileNotFoundError, and pa.ArrowException or OSError for a damaged one."""
    if isinstance(path, Path):
        return pq.ParquetFile(path, memory_map=memory_map, **options)
    return _FromPython(path.open(), **options)


def _open(path: AnyPath) -> pq.ParquetFile:
    with _one_line_of(path):
        return open_parquet(path)


@contextlib.contextmanager
def _one_line_of(path: AnyPath) -> Iterator[None]:
    """Make one line of whatever reading a damaged table raises."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {_REMEDY}") from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        said = " ".join(str(error).split())[:_QUOTED]
        raise UserError(f"{path} is damaged ({said}). {_REMEDY}") from None


def _shard_paths(folder: AnyPath, names: list[str]) -> list[str]:
    if isinstance(folder, BucketPath):
        return [str(locate(folder, name)) for name in names]
    start = str(folder)
    return [name if "://" in name else f"{start}/{name}" for name in names]  # Of a million, Path would take seconds.


def _sizes(paths: list[str], retry: Retry) -> dict[str, int]:
    """URL -> bytes of those shards in buckets that are there: asking for each of 4,000 objects would take minutes.

    One listing of each folder that holds some, which is one.
    """
    folders = set()
    for path in paths:
        if "://" in path:
            location, mark, options = path.partition("?")
            folders.add(location.rpartition("/")[0] + mark + options)
    found: dict[str, int] = {}
    for folder in (to_path(location, retry) for location in folders):
        assert isinstance(folder, BucketPath)
        found |= {str(folder / name): size for name, size in folder.sizes().items()}
    return found


def _local_size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _check_size(path: str, size: int | None, expected: int | None) -> None:
    if size is None:
        raise UserError(f"{path} is missing. {_REMEDY}")
    if expected is not None and size != expected:
        raise UserError(f"{path} has {size} bytes, but {expected} in the manifest. {_REMEDY}")
