"""Ray task that reads the images of a shard once and writes a thumbnail of each (1 KB), for all later comparisons.

Images of any channels and type are compared as the picture that is shown of them (`picture`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import cv2
import numpy as np
import pyarrow as pa

from data_tools.dedup.near_copies import SIDE, is_plain, thumbnail
from data_tools.sources.reader import lost_if_unreadable
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import npz
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.mapped_index import hash_column
from pipeline.data.loading.decode import DecodeError
from pipeline.data.loading.values import picture
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, fetched, to_path
from pipeline.data.storage.content import HASH_BYTES, content_hash
from pipeline.data.storage.retry import StorageError

FINE, PLAIN, BAD = range(3)
# For n images: (n, SIDE, SIDE) uint8; (n,) uint8, one of the above; (n, 16) uint8, `content_hash` of the files.
ARRAYS = ("thumbs", "states", "hashes")
# Format of the files, part of their name. Increase it when the rule of plain images or the hash changes.
_FORMAT = 3
_NO_HASH = bytes(HASH_BYTES)


@dataclass(frozen=True)
class ThumbnailJob:
    """A shard to read. tar: its path. out: path of the thumbnails. offsets, sizes: (n,) int64.

    first_row: row of the shard's first sample in its split. hashes: (n,) V16, of the images by the manifest, zeros
    where it has none.
    pixels: what the values of the images mean.
    """

    tar: str
    out: str
    first_row: int
    offsets: np.ndarray
    sizes: np.ndarray
    hashes: np.ndarray
    pixels: Pixels = RGB8

    @property
    def amount(self) -> tuple[int, int]:
        """Images and their bytes."""
        return len(self.sizes), int(self.sizes.sum())


def jobs(dataset: Dataset, split: str, folder: AnyPath) -> Iterator[ThumbnailJob]:
    """Yields one job per shard of a split. Excluded samples are included."""
    table = pa.concat_tables(dataset.table(split, verify=False).read(["offset", "size", "xxh128"]))
    offsets, sizes = (table[name].to_numpy() for name in ("offset", "size"))
    hashes = hash_column(table["xxh128"])
    # Another range is another picture of the same shard.
    shown = "" if dataset.pixels == RGB8 else f"-{content_hash(repr(dataset.pixels).encode()).hex()[:8]}"
    first_row = 0
    for shard in dataset.shards():
        if shard.split != split:
            continue
        end = first_row + shard.samples
        # A tar that is indexed again may have other rows; a tar of launch/shard.py has the same for good.
        is_indexed = dataset.info["source"].get("indexed")
        rows = f"-{content_hash(offsets[first_row:end].tobytes()).hex()[:8]}" if is_indexed else ""
        yield ThumbnailJob(
            tar=str(dataset.shard_path(shard.name)),
            out=str(folder / f"{shard.sha256 or f'{dataset.fingerprint}-{shard.name}'}{rows}{shown}.{_FORMAT}.npz"),
            first_row=first_row,
            offsets=offsets[first_row:end],
            sizes=sizes[first_row:end],
            hashes=hashes[first_row:end],
            pixels=dataset.pixels,
        )
        first_row = end


def make_thumbnails(job: ThumbnailJob) -> None:
    """Read one shard and write its thumbnails.

    Raises UserError for a missing or changed shard, StorageError when the object store cannot be reached, and LostError
    when reading fails because of the node or its storage.
    """
    cv2.setNumThreads(1)
    thumbs = np.zeros((len(job.offsets), SIDE, SIDE), np.uint8)
    states = np.full(len(job.offsets), BAD, np.uint8)
    hashes = np.zeros((len(job.offsets), HASH_BYTES), np.uint8)
    try:
        with lost_if_unreadable(job.tar), fetched(to_path(job.tar)) as file:
            for i, (offset, size) in enumerate(zip(job.offsets.tolist(), job.sizes.tolist(), strict=True)):
                data = _read(file, job.tar, offset, size)
                digest = content_hash(data)
                hashes[i] = np.frombuffer(digest, np.uint8)
                if job.hashes[i].tobytes() not in (digest, _NO_HASH):
                    raise UserError(
                        f"{job.tar} has other bytes at {offset:,} than in the manifest. Repair it (launch/verify.py"
                        " says how), and run the same command again."
                    )
                try:
                    pixels = picture(data, job.pixels)
                except DecodeError:
                    continue
                thumbs[i] = thumbnail(pixels)
                states[i] = PLAIN if is_plain(pixels, thumbs[i]) else FINE
    except FileNotFoundError:
        raise _unseen(job.tar) from None
    with replacing(to_path(job.out)) as out:
        np.savez(out, thumbs=thumbs, states=states, hashes=hashes)


def read_image(tar: str, offset: int, size: int, pixels: Pixels) -> np.ndarray:
    """The picture of an image that has a thumbnail, uint8 (H, W, 3). Raises UserError for a missing, damaged or changed
    shard.
    """
    try:
        with lost_if_unreadable(tar), to_path(tar).open("rb", buffering=0) as file:
            return picture(_read(file, tar, offset, size), pixels)
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


def read_arrays(path: str, *names: str) -> dict[str, np.ndarray]:
    """Read arrays of an .npz file that a task wrote. Raises UserError for a damaged file."""
    try:
        return npz.read_arrays(to_path(path).read_bytes(), path, names)
    except StorageError:
        raise
    except (UserError, OSError):
        raise UserError(f"{path} is damaged. Remove it, and run the same command again.") from None
