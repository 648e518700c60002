"""A data set on disk: a folder of tars that plain webdataset reads, and a manifest that makes their samples
addressable.

    train-000000.tar ...   `<key>.jpg` and `<key>.cls` of each sample
    samples.parquet        one row per sample, in the order split, shard, offset (SAMPLES)
    samples.chunks         XXH3-64 of each 64 KiB of samples.parquet, of which only parts are read
    shards.parquet         one row per tar (SHARDS); a name is relative to the folder, or the URL of a tar elsewhere
    dataset.json           classes, counts, where it came from, settings, fingerprint; written last
    index/                 what training maps into memory (`mapped_index.py`)
    exclude/               lists of excluded samples (`exclusion.py`)

Jobs that make shards or index existing ones call `write_dataset`, all others `open_dataset`. The folder is local or in
a bucket (`pipeline/data/storage/bucket.py`). Needs pyarrow and numpy only.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import command_line, missing
from pipeline.data.dataset.exclusion import excluded_rows, rows_beyond_limit
from pipeline.data.dataset.mapped_index import INDEX_FOLDER, TARGETS, ManifestIndex, open_index
from pipeline.data.dataset.split import GROUP, SAMPLES_FILE, SampleTable, Split
from pipeline.data.storage.atomic import replacing, write_files
from pipeline.data.storage.bucket import AnyPath, locate, to_path
from pipeline.data.storage.cache import Storage
from pipeline.data.storage.checksums import CheckedFile, cache_home, chunk_digests, digest_of
from pipeline.data.storage.parquet import REMEDY, SingleThreaded, open_parquet, reading
from pipeline.data.storage.tars import TarsToCheck, refuse_problems
from pipeline.settings.quantities import Limit

FORMAT = "vit-dataset/3"
INFO, SHARDS_FILE, CHUNKS_FILE = "dataset.json", "shards.parquet", "samples.chunks"
CHECKSUM = "checksum"

_NAME = pa.dictionary(pa.int32(), pa.string())
# The columns of a sample that are known before its shard has a number. offset and size: of the image's bytes inside the
# tar. width and height: as stored, before any EXIF rotation (of a HEIC: after its own). xxh128: of the image's bytes
# (`data/storage/content.py`).
ROWS = pa.schema(
    {
        "key": "string",
        "offset": "int64",
        "size": "int64",
        "ext": _NAME,
        "labels": pa.list_(pa.int32()),
        "width": "int32",
        "height": "int32",
        "xxh128": pa.binary(16),
    }
)
# shard: row number in shards.parquet. Data sets whose samples have groups have the column GROUP, too; those with
# numbers to predict, `targets_field`.
SAMPLES = ROWS.append(pa.field("split", _NAME)).append(pa.field("shard", "int32"))
SHARDS = pa.schema({"name": "string", "split": "string", "samples": "int64", "bytes": "int64", "sha256": "string"})

WHOLE = Limit.parse("100%")
# Large enough to be read fast, small enough that reading the keys of a few samples takes few megabytes.
_ROWS_PER_GROUP = 2**18


def targets_field(num_targets: int) -> pa.Field:
    """The column of samples.parquet with the numbers to predict, in the order of `Dataset.targets`; null for a missing
    one.
    """
    return pa.field(TARGETS, pa.list_(pa.float32(), num_targets))


@dataclass(frozen=True)
class Shard:
    """A row of shards.parquet: file name, split, number of samples, bytes of the tar, sha256 of the tar (hex)."""

    name: str
    split: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """An open data set. path: its folder. info: dataset.json. storage: how its files are read."""

    path: AnyPath
    info: dict[str, Any]
    storage: Storage = field(default_factory=Storage)

    @property
    def classes(self) -> list[str]:
        return self.info["classes"]

    @property
    def class_names(self) -> list[str]:
        """Readable names of the classes (of WordNet's ids, say); the classes themselves where none were given.

        WordNet has "crane" twice: such names are followed by the class.
        """
        names = self.info.get("class_names", self.classes)
        counts = Counter(names)
        return [name if counts[name] == 1 else f"{name} ({of})" for name, of in zip(names, self.classes, strict=True)]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def targets(self) -> list[str]:
        """Names of the numbers to predict, such as age; [] if its samples have none."""
        return self.info.get("targets", [])

    @property
    def pixels(self) -> Pixels:
        """Channels, type and range of its images."""
        saved = self.info.get("pixels")
        return RGB8 if saved is None else json_record.convert(saved, Pixels, f"{self.path / INFO}")

    @property
    def left_out(self) -> dict[str, int]:
        """Number of images of which decoding leaves something out, by names of `stored.LEFT_OUT`, as sharding counted
        them.
        """
        return self.info.get("left_out", {})

    @property
    def fingerprint(self) -> str:
        """16 hex characters that identify the content: the same bytes and classes, wherever and whenever written."""
        return self.info["fingerprint"]

    @property
    def splits(self) -> list[str]:
        return list(self.info["samples"])

    def shards(self, verify: bool = True) -> list[Shard]:
        """Every row of shards.parquet. verify: compare its checksum with dataset.json. Raises UserError."""
        table = self._read_shards(verify)
        with reading(self.path / SHARDS_FILE):
            return [Shard(**row) for row in table.to_pylist()]

    def shard_path(self, name: str) -> AnyPath:
        """The path of a tar, by its name in shards.parquet."""
        return locate(self.path, name)

    def damaged_tables(self) -> list[str]:
        """Names of the tables that are missing, or not the files that dataset.json was written with. Reads both."""
        paths = {self.path / name: sha256 for name, sha256 in self.info["files"].items()}
        return [path.name for path, sha256 in paths.items() if not path.exists() or digest_of(path) != sha256]

    def table(self, split: str) -> SampleTable:
        """All rows of one split. Raises UserError for an unknown split; reading the table does for a damaged one."""
        if split not in self.splits:
            raise UserError(self.without_split(split))

        def open_table() -> tuple[pq.ParquetFile, list[int]]:
            path, counts = self.path / SAMPLES_FILE, self.info["samples"]
            self._verify(CHUNKS_FILE)
            with reading(path):
                digests = np.frombuffer((self.path / CHUNKS_FILE).read_bytes(), "<u8")
                file = SingleThreaded(CheckedFile(path, digests, REMEDY))
            # Splits follow one another, and each begins a row group (see `write_dataset`).
            before = sum(list(counts.values())[: self.splits.index(split)])
            ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
            return file, np.flatnonzero((ends > before) & (ends <= before + counts[split])).tolist()

        return SampleTable(open_table)

    def _read_shards(self, verify: bool = True) -> pa.Table:
        if verify:
            self._verify(SHARDS_FILE)
        with reading(self.path / SHARDS_FILE):
            return open_parquet(self.path / SHARDS_FILE).read(SHARDS.names).select(SHARDS.names).cast(SHARDS)

    def _verify(self, name: str) -> None:
        """Compare the checksum of a table with dataset.json. Raises UserError."""
        expected, path = self.info["files"][name], self.path / name
        with reading(path):
            if digest_of(path) != expected:
                raise UserError(f"{path} is damaged: it is not the file that {INFO} was written with. {REMEDY}")

    def split(self, name: str, exclude: str = "all", limit: Limit = WHOLE, seed: int = 0) -> Split:
        """Open one split: map what training needs of it (offsets, sizes, labels), and check that its tars exist, unless
        `Storage.unchecked` collects them.

        exclude: the lists of samples to exclude ("all", "none", or names with commas between). limit: how many of the
        others to keep, chosen at random by `seed`. Raises UserError for an unknown split, values that were not
        measured, a missing tar or one of another size, a damaged manifest, an unusable list, and a limit above the
        number of samples.
        """
        self.refuse_unmeasured()
        table = self.table(name)
        shards = self._read_shards()
        shards = shards.filter(pc.equal(shards["split"], name))
        # Not to_numpy(), which imports pandas: half of the start-up.
        samples, num_bytes = (np.from_dlpack(shards[column].combine_chunks()) for column in ("samples", "bytes"))
        starts = np.concatenate([[0], np.cumsum(samples)])
        index = self.index(name)
        excluded, excluded_by = excluded_rows(self, name, exclude)
        if limit != WHOLE:
            beyond = rows_beyond_limit(len(index), excluded, limit, seed)
            excluded = np.sort(np.concatenate([excluded, beyond]))
            excluded_by["data.limit"] = len(beyond)
        kept = samples - np.diff(np.searchsorted(excluded, starts))
        if len(excluded) and not kept.any():
            raise UserError(f"every sample of {self.path}, split {name!r}, is excluded: by {', '.join(excluded_by)}.")
        paths = [str(self.shard_path(shard)) for shard in shards["name"].to_pylist()]
        used = [
            (path, size, left == all_of)
            for path, size, left, all_of in zip(paths, num_bytes.tolist(), kept, samples, strict=True)
            if left
        ]
        tars = TarsToCheck(self.path / INFO, used, self.storage.retry)
        if self.storage.unchecked is None:
            problems = tars.problems()
            refuse_problems(problems, len(problems))
        else:
            self.storage.unchecked.append(tars)
        return Split(
            name=name,
            shard_paths=paths,
            shard_sizes=kept,
            shard_bytes=num_bytes,
            shard_sha256=shards["sha256"],
            storage=self.storage,
            index=index,
            excluded_rows=excluded,
            excluded_by=excluded_by,
            table=table,
            pixels=self.pixels,
            left_out=self.left_out,
        )

    def without_split(self, name: str) -> str:
        """What is said of a split that the data set does not have: those that it has, or how to make one."""
        there = [split for split, count in self.info["samples"].items() if count]
        has = f"{self.path} has no split {name!r}. It has: {', '.join(there)}."
        if there != ["train"]:
            return has
        return f"{has} launch/shard.py holds out images as val with val_share=0.1 and another out=..."

    def refuse_unmeasured(self) -> None:
        """Raise UserError if the range of the values of its images is not known."""
        if not self.pixels.is_measured:
            raise UserError(
                f"{self.path}: the range of the values of its images is not known ({self.pixels.describe()}). Measure"
                f" it: {command_line('stats', f'data={self.path}', 'values=percentiles')}"
            )

    def refuse_without_labels(self, setting: str, way_out: str) -> None:
        """Raise UserError if its images have no labels. setting: with which it was named. way_out: what to do
        instead.
        """
        if not self.classes:
            raise UserError(f"{setting} = {self.path}: the images of this data set have no labels. {way_out}")

    def index(self, split: str) -> ManifestIndex:
        """The memory-mapped columns of a split, made on the first call."""
        with reading(self.path / SAMPLES_FILE):
            return open_index(self.index_folders(split), self.table(split).read)

    def index_folders(self, split: str) -> list[Path]:
        """Where the index of a split may be, in the order of preference."""
        name = f"{split}-{self.info['files'][SAMPLES_FILE][:16]}"
        return [home / INDEX_FOLDER / name for home in (self.path, cache_home()) if isinstance(home, Path)]


def open_dataset(path: str | AnyPath, storage: Storage | None = None) -> Dataset:
    """Open a data set by its folder or URL, or by the folder of the images that `shards_beside` was made of; reads
    dataset.json only. Raises UserError for a missing or damaged one.
    """
    storage = storage or Storage()
    path, remedy = to_path(path, storage.retry), "If sharding was interrupted, run its command again."
    if isinstance(path, Path) and not (path / INFO).exists():
        beside = shards_beside(path)
        path = beside if (beside / INFO).exists() else path
        command = command_line("shard", f"source={path}", f"out={beside}")
        remedy = f"If {path} holds images, shard them: {command} . {remedy}"
    if not path.exists():
        way_out = f"Shard it first: python launch/shard.py source=... out={path}"
        raise UserError(missing(str(path), "data set", way_out))
    with reading(path / INFO, remedy):
        text = (path / INFO).read_bytes()
    return Dataset(path, parse_info(text, f"{path / INFO}"), storage)


def shards_beside(images: Path) -> Path:
    """The folder of the data set that a run makes of a folder of images (`data_tools/sharding/shard_once.py`)."""
    whole = images if images.name not in ("", "..") else images.resolve()
    return whole.parent / f"{whole.name}_shards"


def location_and_split(entry: str) -> tuple[str, str]:
    """(folder or URL, split) of 'folder:split', 's3://bucket/set:split?region=...' or a folder alone, whose split is
    "".

    The name of a folder may itself have a colon: if there is a data set of the whole name, it is meant.
    """
    location, mark, options = entry.partition("?") if "://" in entry else (entry, "", "")
    folder, slash, name = location.rpartition("/")
    if ":" not in name or (to_path(entry) / INFO).is_file():
        return entry, ""
    name, _, split = name.rpartition(":")
    return folder + slash + name + mark + options, split


def write_dataset(
    path: AnyPath,
    shards: Sequence[Shard],
    tables: Iterable[pa.Table],
    classes: Sequence[str],
    source: dict[str, Any],
    settings: dict[str, Any],
    class_names: Sequence[str] | None = None,
    pixels: Pixels = RGB8,
    left_out: Mapping[str, int] | None = None,
    targets: Sequence[str] = (),
) -> Dataset:
    """Write the manifest of shards that are already in the folder; dataset.json, which makes it a data set, comes last.

    shards: in the order of their rows, one split after another. tables: the samples of each shard (schema ROWS, GROUP
    if they have groups, and `targets_field` if they have targets), in the same order; they are read one by one, since
    together they may not fit in memory.
    class_names: readable names of classes, where they have others. pixels: what the values of images mean. left_out:
    see `Dataset.left_out`. targets: see `Dataset.targets`.
    """
    splits = list(dict.fromkeys(shard.split for shard in shards))
    with replacing(path / SAMPLES_FILE) as file:
        _write_samples(file, shards, tables)
    with replacing(path / SHARDS_FILE) as file:
        pq.write_table(pa.Table.from_pylist([asdict(shard) for shard in shards], SHARDS), file)
    info = {
        "format": FORMAT,
        "fingerprint": fingerprint(shards, classes, pixels),
        "samples": {split: sum(s.samples for s in shards if s.split == split) for split in splits},
        "shards": {split: sum(s.split == split for s in shards) for split in splits},
        "files": sign_tables(path),
        "num_classes": len(classes),
        "source": source,
        "settings": settings,
        "classes": list(classes),
    }
    if pixels != RGB8:
        info["pixels"] = pixels.to_dict()
    if left_out:
        info["left_out"] = dict(left_out)
    if class_names is not None:
        info["class_names"] = list(class_names)
    if targets:
        info["targets"] = list(targets)
    dataset = Dataset(path, info)
    if isinstance(path, Path):
        for split in splits:
            dataset.index(split)  # Now, so that the first run need not wait for it.
    _write_info(dataset)
    return dataset


def sign_tables(path: AnyPath) -> dict[str, str]:
    """Write samples.chunks. Returns the name and SHA-256 of each file of the manifest, for dataset.json."""
    write_files(path, {CHUNKS_FILE: chunk_digests(path / SAMPLES_FILE).tobytes()})
    return {name: digest_of(path / name) for name in (SAMPLES_FILE, CHUNKS_FILE, SHARDS_FILE)}


def record_pixels(dataset: Dataset, pixels: Pixels) -> Dataset:
    """Write into dataset.json what the values of the images mean, which changes the fingerprint. Returns the changed
    data set.
    """
    changes = {"fingerprint": fingerprint(dataset.shards(), dataset.classes, pixels), "pixels": pixels.to_dict()}
    changed = replace(dataset, info=dataset.info | changes)
    _write_info(changed)
    return changed


def _write_info(dataset: Dataset) -> None:
    dataset.info[CHECKSUM] = info_checksum(dataset.info)
    write_files(dataset.path, {INFO: json.dumps(dataset.info, indent=1, ensure_ascii=False) + "\n"})


def _write_samples(file: BinaryIO, shards: Sequence[Shard], tables: Iterable[pa.Table]) -> None:
    """Write samples.parquet. Each split begins a row group."""
    tables = iter(tables)
    first = list(itertools.islice(tables, 1))
    names = first[0].column_names if first else []
    schema = SAMPLES.append(GROUP) if GROUP.name in names else SAMPLES
    schema = schema.append(targets_field(first[0].field(TARGETS).type.list_size)) if TARGETS in names else schema
    dictionaries = ["split", "ext", "shard", GROUP.name]
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionaries) as writer:
        waiting: list[pa.Table] = []
        for number, (shard, rows) in enumerate(zip(shards, itertools.chain(first, tables), strict=True)):
            assert len(rows) == shard.samples, shard
            split, numbers = pa.repeat(shard.split, len(rows)), pa.repeat(number, len(rows))
            waiting.append(
                rows.append_column("split", split).append_column("shard", numbers).select(schema.names).cast(schema)
            )
            ends_split = number + 1 == len(shards) or shards[number + 1].split != shard.split
            if ends_split or sum(map(len, waiting)) >= _ROWS_PER_GROUP:
                group = pa.concat_tables(waiting)
                writer.write_table(group, row_group_size=max(len(group), 1))
                waiting = []


def parse_info(text: bytes, where: str) -> dict[str, Any]:
    """The content of dataset.json. Raises UserError."""
    info = json_record.parse(text, dict[str, Any], where)
    if info.get("format") != FORMAT:
        raise UserError(
            f"{where} has format {json_record.quoted(info.get('format'))}, but this code reads {FORMAT!r}. Make the"
            " data set again."
        )
    if info.get(CHECKSUM) not in (None, info_checksum(info)):
        raise UserError(
            f"{where} is damaged: its content does not match its checksum. Copy it again, or remove the folder and"
            f" shard again. If it was changed on purpose, remove its field {CHECKSUM!r}."
        )
    return info


def info_checksum(info: dict[str, Any]) -> str:
    """Hex SHA-256 of the content of dataset.json without its own checksum, whatever its formatting."""
    rest = {key: value for key, value in info.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def fingerprint(shards: Sequence[Shard], classes: Sequence[str], pixels: Pixels = RGB8) -> str:
    """16 hex characters that identify these shards (names and bytes), classes, and what values mean if not 8-bit
    RGB.
    """
    # The last part of the name: the location of tars that were indexed in place does not count.
    content: list[Any] = [sorted((locate(Path(), shard.name).name, shard.sha256) for shard in shards), list(classes)]
    if pixels != RGB8:
        content.append(pixels.to_dict())
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
