"""Ray task that reads the images of a shard once and writes a thumbnail of each (1 KB), for all later comparisons."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import cv2
import numpy as np
import pyarrow as pa

from data_tools.dedup.near_copies import SIDE, is_plain, thumbnail
from pipeline.base import npz
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset, Shard
from pipeline.data.loading.decode import DecodeError, decode
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, fetched, to_path
from pipeline.data.storage.content import HASH_BYTES, content_hash
from pipeline.data.storage.parquet import open_parquet
from pipeline.data.storage.retry import StorageError

FINE, PLAIN, BAD = range(3)
# Format of the files, part of their name. Increase it when the rule of plain images or the hash changes.
_FORMAT = 3


@dataclass(frozen=True)
class ThumbnailJob:
    """A shard to read. tar: its path. out: path of the thumbnails. offsets, sizes: (n,) int64.

    first_row: row of the shard's first sample in its split.
    """

    tar: str
    out: str
    first_row: int
    offsets: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True)
class Thumbnails:
    """Thumbnails of n images. thumbs: (n, SIDE, SIDE) uint8. states: (n,) uint8, FINE, PLAIN or BAD.

    hashes: (n, 16) uint8, `content_hash` of the files.
    """

    thumbs: np.ndarray
    states: np.ndarray
    hashes: np.ndarray


def jobs(dataset: Dataset, split: str, folder: AnyPath) -> Iterator[ThumbnailJob]:
    """Yields one job per shard of a split. Excluded samples are included."""
    rows = _rows_of_shards(dataset)
    first_row = 0
    for shard, table in rows:
        if shard.split != split:
            continue
        yield ThumbnailJob(
            tar=str(dataset.shard_path(shard.name)),
            out=str(folder / f"{shard.sha256 or f'{dataset.fingerprint}-{shard.name}'}.{_FORMAT}.npz"),
            first_row=first_row,
            offsets=table.column("offset").to_numpy(),
            sizes=table.column("size").to_numpy(),
        )
        first_row += shard.samples


def make_thumbnails(job: ThumbnailJob) -> int:
    """Read one shard and write its thumbnails; returns the number of bytes read.

    Raises UserError for a missing or truncated shard, and StorageError when the object store cannot be reached.
    """
    cv2.setNumThreads(1)
    thumbs = np.zeros((len(job.offsets), SIDE, SIDE), np.uint8)
    states = np.full(len(job.offsets), BAD, np.uint8)
    hashes = np.zeros((len(job.offsets), HASH_BYTES), np.uint8)
    try:
        with fetched(to_path(job.tar)) as file:
            for i, (offset, size) in enumerate(zip(job.offsets.tolist(), job.sizes.tolist(), strict=True)):
                data = _read(file, job.tar, offset, size)
                hashes[i] = np.frombuffer(content_hash(data), np.uint8)
                try:
                    pixels = decode(data)
                except DecodeError:
                    continue
                thumbs[i] = thumbnail(pixels)
                states[i] = PLAIN if is_plain(pixels, thumbs[i]) else FINE
    except FileNotFoundError:
        raise _unseen(job.tar) from None
    with replacing(to_path(job.out)) as out:
        np.savez(out, thumbs=thumbs, states=states, hashes=hashes)
    return int(job.sizes.sum())


def read_thumbnails(job: ThumbnailJob) -> Thumbnails:
    """Read the output of `make_thumbnails`. Raises UserError for a damaged file."""
    return Thumbnails(*_load(job, "thumbs", "states", "hashes"))


def read_states(job: ThumbnailJob) -> np.ndarray:
    """Read only the states, (n,) uint8, from the output of `make_thumbnails`. Raises UserError for a damaged file."""
    return _load(job, "states")[0]


def read_image(tar: str, offset: int, size: int) -> np.ndarray:
    """Decode an image that has a thumbnail, to (H, W, 3) uint8 RGB. Raises UserError for a missing, damaged or changed shard."""
    try:
        with to_path(tar).open("rb", buffering=0) as file:
            return decode(_read(file, tar, offset, size))
    except FileNotFoundError:
        raise _unseen(tar) from None
    except DecodeError as error:
        raise UserError(f"{tar} was changed while its images were compared: {error}. Shard again.") from None


def _unseen(tar: str) -> UserError:
    return UserError(f"A worker cannot access {tar}: data sets must be on storage shared by all nodes.")


def _read(file: BinaryIO, tar: str, offset: int, size: int) -> bytes:
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise UserError(f"{tar} ends before byte {offset + size}. Copy it again, or shard again.")
    return data


def read_arrays(path: str, *names: str) -> list[np.ndarray]:
    """Read arrays of an .npz file that a task wrote. Raises UserError for a damaged file."""
    try:
        return list(npz.read_arrays(to_path(path).read_bytes(), path, names).values())
    except StorageError:
        raise
    except (UserError, OSError):
        raise UserError(f"{path} is damaged. Remove it, and run the same command again.") from None


def _load(job: ThumbnailJob, *names: str) -> list[np.ndarray]:
    found = read_arrays(job.out, *names)
    if any(len(array) != len(job.offsets) for array in found):
        raise UserError(
            f"{job.out} belongs to another shard than {job.tar}. Remove it, and run the same command again."
        )
    return found


def _rows_of_shards(dataset: Dataset) -> Iterator[tuple[Shard, pa.Table]]:
    """Yields every shard with its rows of the manifest, in bounded memory."""
    batches = open_parquet(dataset.path / SAMPLES_FILE).iter_batches(columns=["offset", "size"])
    schema = pa.schema([("offset", pa.int64()), ("size", pa.int64())])
    waiting = pa.Table.from_batches([], schema)
    for shard in dataset.shards():
        while len(waiting) < shard.samples:
            waiting = pa.concat_tables([waiting, pa.Table.from_batches([next(batches)], schema)])
        yield shard, waiting.slice(0, shard.samples).combine_chunks()
        waiting = waiting.slice(shard.samples)
