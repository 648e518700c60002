"""Ray tasks that search for copies and write the pairs: in one shard of others' images, and in a block of images of
each other.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import cv2
import numpy as np
import pyarrow as pa

from data_tools.dedup.near_copies import ImageIndex, Likely
from data_tools.dedup.thumbnails import (
    ARRAYS,
    FINE,
    FOLDER,
    SEARCH,
    ComparedSplit,
    ThumbnailJob,
    located,
    read_arrays,
    read_image,
)
from data_tools.dedup.verify_pair import distance, reduced
from data_tools.sharding.copies import first_halves
from pipeline.architecture.pixels import Pixels
from pipeline.base import json_record
from pipeline.base.files import hidden_folder
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, make_folder, remove_tree, to_path

# Pairs up to this distance are written, so that another max_distance needs no new search.
KEPT_DISTANCE = 0.5
# Format of the results, part of their path. Increase it when the search would find other pairs in the same thumbnails.
FORMAT = 3
_MAPPED_THUMBS = "thumbs.npy"


@dataclass(frozen=True)
class SearchJob:
    """shard: with thumbnails. tests: path of the file of `write_images`. out: path of the pairs.

    chosen: (k,) int64, the shard's images that are searched; ... is all of them.
    """

    shard: ThumbnailJob
    tests: str
    out: str
    chosen: np.ndarray | EllipsisType = ...

    @property
    def amount(self) -> tuple[int, int]:
        """Images and their bytes."""
        sizes = self.shard.sizes[self.chosen]
        return len(sizes), int(sizes.sum())


@dataclass(frozen=True)
class ImagesJob:
    """images: path of the file of `write_images`. out: path of their pairs, or of the folder of their index. amount: as
    of `SearchJob`. max_distance: of a copy.
    """

    images: str
    out: str
    amount: Sequence[int]
    max_distance: float = 0.0


class Pairs(NamedTuple):
    """Copies found, each pair once. rows: of the searched split. others: rows of the file of `write_images`."""

    rows: np.ndarray
    others: np.ndarray
    distances: np.ndarray

    def within(self, max_distance: float) -> "Pairs":
        """The pairs up to this distance."""
        return self.take(self.distances <= max_distance)

    def take(self, chosen: np.ndarray) -> "Pairs":
        """Some of the pairs, by their places or a mask."""
        return Pairs(*(column[chosen] for column in self))

    def nearest(self) -> "Pairs":
        """The nearest other of each row, by row."""
        order = np.lexsort((self.others, self.distances, self.rows))
        _, first = np.unique(self.rows[order], return_index=True)
        return self.take(order[first])


def results_folder(searched: ComparedSplit, prefix: str, choice: Iterable[object], rows: bytes = b"") -> AnyPath:
    """The folder of the pairs of one choice of images, which is made."""
    facts = "\n".join(map(str, [FORMAT, *choice])).encode()
    folder = searched.dataset.path / FOLDER / SEARCH / f"{prefix}{hashlib.sha256(facts + rows).hexdigest()[:16]}"
    make_folder(folder)
    return folder


def write_images(jobs: Sequence[ThumbnailJob], path: AnyPath, chosen: np.ndarray) -> None:
    """Write everything the search needs about images to one file: 1.1 KB per image.

    jobs: their shards; the images are counted in this order. chosen: (k,) int64, which of them, in the order of the
    file.
    """
    of_job, rows = located((len(job.offsets) for job in jobs), chosen)
    columns: dict[str, np.ndarray] = {}
    for number, job in enumerate(jobs):
        places = np.flatnonzero(of_job == number)
        if not len(places):
            continue
        of_shard = {**read_arrays(job.out, *ARRAYS), "offsets": job.offsets, "sizes": job.sizes}
        for name, column in of_shard.items():
            into = columns.setdefault(name, np.empty((len(chosen), *column.shape[1:]), column.dtype))
            into[places] = column[rows[places]]
    with replacing(path) as file:
        tars = np.array([job.tar for job in jobs])
        pixels = np.array([json.dumps(job.pixels.to_dict()) for job in jobs])
        np.savez(file, tars=tars, pixels=pixels, tar=of_job, **columns)  # type: ignore[arg-type]


def write_index(job: ImagesJob) -> None:
    """Write the thumbnails and the index of images, from which all workers of a host map them into shared memory."""
    cv2.setNumThreads(1)
    out = Path(job.out)
    for leftover in out, *out.parent.glob(f".{out.name}.*"):  # Of a killed run.
        remove_tree(leftover)
    images = _StoredImages(job.images)
    with hidden_folder(out) as folder:
        np.save(folder / _MAPPED_THUMBS, images.thumbs)
        ImageIndex.write(images.thumbs, images.comparable, folder)
        folder.rename(out)


def index_folder(images: AnyPath) -> AnyPath:
    """The folder of the index of a file of `write_images`, if there is one."""
    return images.parent / f"{images.name}.index"


def search_shard(job: SearchJob) -> None:
    """Write the pairs of one shard. Raises UserError for a damaged shard or file of thumbnails."""
    cv2.setNumThreads(1)
    tests, index = _searched_for(job.tests)
    own = read_arrays(job.shard.out, *ARRAYS)
    chosen = np.arange(len(own["states"]))[job.chosen]
    usable = chosen[own["states"][chosen] == FINE]
    likely = index.find(own["thumbs"][usable])
    rows = usable[likely.query]
    images = (
        _read_reduced(job.shard.tar, offset, size, job.shard.pixels)
        for offset, size in zip(job.shard.offsets[rows].tolist(), job.shard.sizes[rows].tolist(), strict=True)
    )
    distances = np.maximum(_distances(tests, likely, images), 0)
    # Equal files are also found by their pixels, at about 0: each pair is kept once, at its smallest distance.
    same = _by_digest(own["hashes"][chosen], chosen).join(
        tests.by_digest, "digest", join_type="inner", use_threads=False
    )
    pairs = Pairs(
        np.concatenate([rows, same["row"]]),
        np.concatenate([likely.test, same["test"]]),
        np.concatenate([distances, np.zeros(len(same), np.float32)]),
    ).within(KEPT_DISTANCE)
    order = np.lexsort((pairs.distances, pairs.others, pairs.rows))
    _, first = np.unique(np.stack(pairs[:2])[:, order], axis=1, return_index=True)
    _write_pairs(job.out, pairs.take(order[first]))


def compare_block(job: ImagesJob) -> None:
    """Compare the images of a block in their order, each with those before it that are copies of none: write the
    nearest of these.

    All of them must have thumbnails to compare (FINE). Raises UserError for a damaged shard or file.
    """
    cv2.setNumThreads(1)
    images = _StoredImages(job.images)
    index = ImageIndex(images.thumbs, rows=np.empty(0, np.int64))
    found = []
    for row in range(len(images.thumbs)):
        likely = index.find(images.thumbs[row : row + 1])
        distances = _distances(images, likely, (images.read_reduced(row) for _ in likely.test))
        if len(distances) and distances.min() <= job.max_distance:
            found.append((row, likely.test[distances.argmin()], max(distances.min(), 0)))
        else:
            index.add(np.array([row]))
    rows, others, distances = np.array(found).reshape(-1, 3).T
    _write_pairs(job.out, Pairs(rows.astype(int), others.astype(int), distances.astype(np.float32)))


def _write_pairs(path: str, pairs: Pairs) -> None:
    with replacing(to_path(path)) as out:
        np.savez(out, **pairs._asdict())


def read_pairs(path: str, first_row: int = 0) -> Pairs:
    """Read the output of a task. first_row: of the searched shard in its split. Raises UserError for a damaged file."""
    pairs = Pairs(**read_arrays(path, *Pairs._fields))
    return pairs._replace(rows=first_row + pairs.rows)


class _StoredImages:
    """The images of a file of `write_images`, in a worker's memory; their pixels are read from their shards."""

    def __init__(self, path: str, thumbs: np.ndarray | None = None) -> None:
        found = read_arrays(path, "states", "hashes", "tar", "offsets", "sizes", "tars", "pixels")
        self.thumbs = read_arrays(path, "thumbs")["thumbs"] if thumbs is None else thumbs
        self.comparable = np.flatnonzero(found["states"] == FINE)
        self.by_digest = _by_digest(found["hashes"], np.arange(len(self.thumbs)), "test")
        pixels = [json_record.parse(text, Pixels, path) for text in found["pixels"].tolist()]
        self._shards = list(zip(found["tars"].tolist(), pixels, strict=True))
        self._places = np.stack([found[name] for name in ("tar", "offsets", "sizes")], axis=1)

    def read_reduced(self, row: int) -> np.ndarray:
        number, offset, size = self._places[row].tolist()
        tar, pixels = self._shards[number]
        return _read_reduced(tar, offset, size, pixels)


@lru_cache(maxsize=1)  # Per worker: building an index that is not stored takes half a minute for 100,000 images.
def _searched_for(path: str) -> tuple[_StoredImages, ImageIndex]:
    """The images whose copies are searched for, and their index."""
    folder = index_folder(to_path(path))
    if isinstance(folder, Path) and folder.exists():
        thumbs = np.load(folder / _MAPPED_THUMBS, mmap_mode="r")
        return _StoredImages(path, thumbs), ImageIndex.mapped(thumbs, folder)
    images = _StoredImages(path)
    return images, ImageIndex(images.thumbs, images.comparable)


def _distances(tests: _StoredImages, likely: Likely, images: Iterable[np.ndarray]) -> np.ndarray:
    """Distances of likely pairs, float32. images: that of each pair, from `reduced`, which shows a part of the test
    image.
    """
    pairs = zip(likely.test.tolist(), images, likely.crop, likely.mirrored.tolist(), strict=True)
    return np.array([distance(tests.read_reduced(test), *others) for test, *others in pairs], np.float32)


@lru_cache(maxsize=4096)
def _read_reduced(tar: str, offset: int, size: int, pixels: Pixels) -> np.ndarray:
    return reduced(read_image(tar, offset, size, pixels))


def _by_digest(hashes: np.ndarray, rows: np.ndarray, name: str = "row") -> pa.Table:
    return pa.table({"digest": first_halves(hashes), name: rows})
