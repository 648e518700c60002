"""The files of a manifest: their names, columns and checksums, and how they are read.

samples.parquet   one row per sample, in the order split, shard, offset (SAMPLES)
shards.parquet    one row per tar (SHARDS); a name is relative to the folder, or the URL of a tar elsewhere
dataset.json      classes, counts, where it came from, settings, fingerprint; written last
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError, raise_outage
from pipeline.base.words import on_one_line
from pipeline.data.dataset.split import SampleTable
from pipeline.data.storage.bucket import AnyPath, locate
from pipeline.data.storage.cache import Storage
from pipeline.data.storage.checksum_cache import checksum_of
from pipeline.data.storage.parquet import open_parquet

FORMAT = "vit-dataset/2"
INFO, SAMPLES_FILE, SHARDS_FILE = "dataset.json", "samples.parquet", "shards.parquet"
CHECKSUM = "checksum"
REMEDY = "Copy it again, or run the same launch/shard.py again to re-make it."

_NAME = pa.dictionary(pa.int32(), pa.string())
# The columns of a sample that are known before its shard has a number. offset and size: of the image's bytes inside the
# tar. width and height: as stored, before any EXIF rotation (of a HEIC: after its own). xxh128: of the image's bytes
# (`data/storage/content.py`).
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
# shard: row number in shards.parquet. Data sets whose samples have groups have the column GROUP, too.
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


@dataclass(frozen=True)
class Shard:
    """A row of shards.parquet: file name, split, number of samples, bytes of the tar, sha256 of the tar (hex)."""

    name: str
    split: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ManifestTables:
    """The manifest of an open data set. path: its folder. info: dataset.json. storage: how its files are read."""

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
        return len(self.info["classes"])

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

    def is_intact(self) -> bool:
        """Whether both tables exist with the right checksums. (The tars are not read.)"""
        try:
            return all(file_sha256(self.path / name) == sha256 for name, sha256 in self.info["files"].items())
        except FileNotFoundError:
            return False

    def table(self, split: str, verify: bool = True) -> SampleTable:
        """All rows of one split. verify: compare the checksum of samples.parquet with dataset.json.

        Raises UserError for an unknown split and a damaged manifest.
        """
        if split not in self.splits:
            raise UserError(f"{self.path} has no split {split!r}. It has: {', '.join(self.splits)}.")
        if verify:
            self._verify(SAMPLES_FILE)
        path = self.path / SAMPLES_FILE
        with reading(path):
            file = open_parquet(path)
        return SampleTable(file, self._row_groups(file, split))

    def shards_of(self, split: str) -> tuple[list[str], np.ndarray, np.ndarray, pa.ChunkedArray]:
        """(file names, samples, bytes, sha256 in hex) of a split's shards; takes a second for a million of them."""
        counts, place = list(self.info["shards"].values()), self.splits.index(split)
        table = self._read_shards()
        with reading(self.path / SHARDS_FILE):
            table = table.slice(sum(counts[:place]), counts[place]).cast(SHARDS)
        # Not to_numpy(), which imports pandas: half of the start-up.
        samples, num_bytes = (np.from_dlpack(table[column].combine_chunks()) for column in ("samples", "bytes"))
        return table["name"].to_pylist(), samples, num_bytes, table["sha256"]

    def _read_shards(self, verify: bool = True) -> pa.Table:
        if verify:
            self._verify(SHARDS_FILE)
        with reading(self.path / SHARDS_FILE):
            return open_parquet(self.path / SHARDS_FILE).read(columns=SHARDS.names).select(SHARDS.names)

    def _verify(self, name: str) -> None:
        """Compare the checksum of a table with dataset.json. Raises UserError."""
        expected, path = self.info["files"][name], self.path / name
        with reading(path):
            if checksum_of(path, expected) != expected:
                raise UserError(f"{path} is damaged: it is not the file that {INFO} was written with. {REMEDY}")

    def _row_groups(self, file: pq.ParquetFile, split: str) -> list[int]:
        """The row groups of a split: splits follow one another, and each begins a row group (see `write_dataset`)."""
        before = sum(list(self.info["samples"].values())[: self.splits.index(split)])
        ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
        return np.flatnonzero((ends > before) & (ends <= before + self.info["samples"][split])).tolist()


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


def file_sha256(path: AnyPath) -> str:
    """Hex SHA-256 of a file."""
    return checksum_of(path, "", remember=False)


@contextlib.contextmanager
def reading(path: AnyPath, remedy: str = REMEDY) -> Iterator[None]:
    """Turn every exception that reading a missing or damaged table may raise into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {remedy}") from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise_outage(error, path)
        message = on_one_line(error)[:200]
        raise UserError(f"{path} is damaged ({message}). {remedy}") from None
