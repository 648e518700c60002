"""A data set on disk: a folder of tars that plain webdataset reads, and a manifest that makes their samples
addressable.

    train-000000.tar ...   `<key>.jpg` and `<key>.cls` of each sample
    samples.parquet, shards.parquet, dataset.json   the manifest (`tables.py`)
    index/                 what training maps into memory (`mapped_index.py`)
    exclude/               lists of excluded samples (`exclusion.py`)

Jobs that make shards or index existing ones call `write_dataset`, all others `open_dataset`. The folder is local or in
a bucket (`pipeline/data/storage/bucket.py`). Needs pyarrow and numpy only.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.exclusion import excluded_rows, rows_beyond_limit
from pipeline.data.dataset.groups import GROUP
from pipeline.data.dataset.mapped_index import INDEX_FOLDER, ManifestIndex, open_index
from pipeline.data.dataset.split import Split
from pipeline.data.dataset.tables import (
    CHECKSUM,
    FORMAT,
    INFO,
    REMEDY,
    ROWS,
    SAMPLES,
    SAMPLES_FILE,
    SHARDS,
    SHARDS_FILE,
    ManifestTables,
    Shard,
    file_sha256,
    fingerprint,
    info_checksum,
    parse_info,
    reading,
)
from pipeline.data.storage.atomic import read_bytes, replacing, write_files
from pipeline.data.storage.bucket import AnyPath, BucketPath, locate, to_path
from pipeline.data.storage.cache import Storage
from pipeline.data.storage.checksum_cache import cache_home
from pipeline.data.storage.retry import Retry
from pipeline.settings.quantities import Limit

__all__ = [
    "FORMAT",
    "INFO",
    "ROWS",
    "SAMPLES",
    "SAMPLES_FILE",
    "SHARDS",
    "SHARDS_FILE",
    "Dataset",
    "Shard",
    "Split",
    "file_sha256",
    "fingerprint",
    "location_and_split",
    "open_dataset",
    "record_pixels",
    "write_dataset",
]

WHOLE = Limit.parse("100%")
# Large enough to be read fast, small enough that reading the keys of a few samples takes few megabytes.
_ROWS_PER_GROUP = 2**18


@dataclass(frozen=True)
class Dataset(ManifestTables):
    """An open data set."""

    def split(self, name: str, exclude: str = "all", limit: Limit = WHOLE, seed: int = 0) -> Split:
        """Open one split: map what training needs of it (offsets, sizes, labels), and check that its tars exist.

        exclude: the lists of samples to exclude ("all", "none", or names with commas between). limit: how many of the
        others to keep, chosen at random by `seed`. Raises UserError for an unknown split, values that were not
        measured, a missing tar or one of another
        size, a damaged manifest, an unusable list, and a limit above the number of samples.
        """
        self.refuse_unmeasured()
        table = self.table(name)
        names, samples, num_bytes, sha256 = self.shards_of(name)
        starts = np.concatenate([[0], np.cumsum(samples)])
        index = self.index(name)
        excluded, excluded_by = excluded_rows(self, name, exclude)
        if limit != WHOLE:
            beyond = rows_beyond_limit(len(index), excluded, limit, seed)
            excluded = np.sort(np.concatenate([excluded, beyond]))
            excluded_by = {**excluded_by, "data.limit": len(beyond)}
        kept = samples - np.bincount(np.searchsorted(starts, excluded, side="right") - 1, minlength=len(samples))
        if len(excluded) and not kept.any():
            raise UserError(f"every sample of {self.path}, split {name!r}, is excluded: by {', '.join(excluded_by)}.")
        paths = _shard_paths(self.path, names)
        _check_shards(paths, num_bytes, np.flatnonzero(kept), kept == samples, self.storage.retry)
        return Split(
            name=name,
            shard_paths=paths,
            shard_sizes=kept,
            shard_bytes=num_bytes,
            shard_sha256=sha256,
            storage=self.storage,
            index=index,
            excluded_rows=excluded,
            excluded_by=excluded_by,
            table=table,
            pixels=self.pixels,
            left_out=self.left_out,
        )

    def refuse_unmeasured(self) -> None:
        """Raise UserError if the range of the values of its images is not known."""
        if not self.pixels.is_measured:
            raise UserError(
                f"{self.path}: the range of the values of its images is not known ({self.pixels.describe()}). Measure"
                f" it: python launch/stats.py data={self.path} values=percentiles"
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
            return open_index(self.index_name(split), self.index_places(), self.table(split).read)

    def index_name(self, split: str) -> str:
        """The name of the folder with the index of a split."""
        return f"{split}-{self.info['files'][SAMPLES_FILE][:16]}"

    def index_places(self) -> list[Path]:
        """Folders where an index may be, in the order of preference."""
        beside = [self.path / INDEX_FOLDER] if isinstance(self.path, Path) else []
        return [*beside, cache_home() / INDEX_FOLDER]


def open_dataset(path: str | AnyPath, storage: Storage | None = None) -> Dataset:
    """Open a data set by its folder or URL; reads dataset.json only. Raises UserError for a missing or damaged one."""
    storage = storage or Storage()
    path = to_path(path, storage.retry)
    if not path.exists():
        raise UserError(f"{path}: no such data set. Shard it first: python launch/shard.py source=... out={path}")
    remedy = (
        f"If {path} holds images, shard them: python launch/shard.py source={path} out=... . If sharding was"
        " interrupted, run its command again."
    )
    with reading(path / INFO, remedy):
        text = read_bytes(path / INFO)
    return Dataset(path, parse_info(text, f"{path / INFO}"), storage)


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
) -> Dataset:
    """Write the manifest of shards that are already in the folder; dataset.json, which makes it a data set, comes last.

    shards: in the order of their rows, one split after another. tables: the samples of each shard (schema ROWS, and
    GROUP if they have groups), in the same order; they are read one by one, since together they may not fit in memory.
    class_names: readable names of classes, where they have others. pixels: what the values of images mean. left_out:
    see `ManifestTables.left_out`.
    """
    splits = list(dict.fromkeys(shard.split for shard in shards))
    assert [s.split for s in shards] == sorted((s.split for s in shards), key=splits.index), "splits are interleaved"
    with replacing(path / SAMPLES_FILE) as file:
        _write_samples(file, shards, tables)
    with replacing(path / SHARDS_FILE) as file:
        pq.write_table(pa.Table.from_pylist([asdict(shard) for shard in shards], SHARDS), file)
    info = {
        "format": FORMAT,
        "fingerprint": fingerprint(shards, classes, pixels),
        "samples": {split: sum(s.samples for s in shards if s.split == split) for split in splits},
        "shards": {split: sum(s.split == split for s in shards) for split in splits},
        "files": {name: file_sha256(path / name) for name in (SAMPLES_FILE, SHARDS_FILE)},
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
    dataset = Dataset(path, info)
    if isinstance(path, Path):
        for split in splits:
            dataset.index(split)  # Now, so that the first run need not wait for it.
    _write_info(dataset)
    return dataset


def record_pixels(dataset: Dataset, pixels: Pixels) -> Dataset:
    """Write into dataset.json what the values of the images mean, which changes the fingerprint. Returns the changed
    data set.
    """
    info = {**dataset.info, "fingerprint": fingerprint(dataset.shards(), dataset.classes, pixels)}
    info["pixels"] = pixels.to_dict()
    changed = Dataset(dataset.path, info, dataset.storage)
    _write_info(changed)
    return changed


def _write_info(dataset: Dataset) -> None:
    dataset.info[CHECKSUM] = info_checksum(dataset.info)
    write_files(dataset.path, {INFO: json.dumps(dataset.info, indent=1, ensure_ascii=False) + "\n"})


def _write_samples(file: BinaryIO, shards: Sequence[Shard], tables: Iterable[pa.Table]) -> None:
    """Write samples.parquet. Each split begins a row group."""
    tables = iter(tables)
    first = list(itertools.islice(tables, 1))
    schema = SAMPLES.append(GROUP) if first and GROUP.name in first[0].column_names else SAMPLES
    dictionaries = ["split", "ext", "shard", GROUP.name]
    with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionaries) as writer:
        waiting: list[pa.Table] = []
        num_waiting = 0
        for number, (shard, rows) in enumerate(zip(shards, itertools.chain(first, tables), strict=True)):
            assert len(rows) == shard.samples, shard
            zeros = pa.array(np.zeros(len(rows), np.int32))
            split = pa.DictionaryArray.from_arrays(zeros, pa.array([shard.split], pa.string()))
            numbers = pa.array(np.full(len(rows), number, np.int32))
            waiting.append(
                rows.append_column("split", split).append_column("shard", numbers).select(schema.names).cast(schema)
            )
            num_waiting += len(rows)
            ends_split = number + 1 == len(shards) or shards[number + 1].split != shard.split
            if ends_split or num_waiting >= _ROWS_PER_GROUP:
                writer.write_table(pa.concat_tables(waiting), row_group_size=max(num_waiting, 1))
                waiting, num_waiting = [], 0


def _shard_paths(folder: AnyPath, names: list[str]) -> list[str]:
    if isinstance(folder, BucketPath):
        return [str(locate(folder, name)) for name in names]
    start = str(folder)
    return [name if "://" in name else f"{start}/{name}" for name in names]  # Path would take seconds for a million.


def _check_shards(
    paths: list[str], num_bytes: np.ndarray, used: np.ndarray, is_complete: np.ndarray, retry: Retry
) -> None:
    """Raise UserError for a shard that is missing or has another size. used: numbers of those of which samples are
    used.

    A shard whose samples are all excluded may be missing. A local one of which some are excluded may be cut; in a
    bucket it must not, since its readers compare its size or checksum.
    """
    # From one listing of each folder: 4,000 single requests would take minutes.
    sizes: dict[str, int] = {}
    for folder in {to_path(path, retry).parent for path in paths if "://" in path}:
        assert isinstance(folder, BucketPath)
        sizes |= {str(folder / name): size for name, size in folder.sizes().items()}
    for number in used.tolist():
        path, expected = paths[number], num_bytes[number]
        try:
            size = sizes.get(path) if "://" in path else os.stat(path).st_size
        except FileNotFoundError:
            size = None
        if size is None:
            raise UserError(f"{path} is missing. {REMEDY}")
        if size != expected and (is_complete[number] or "://" in path):
            raise UserError(f"{path} has {counted(size, 'byte')}, but {expected:,} in the manifest. {REMEDY}")
