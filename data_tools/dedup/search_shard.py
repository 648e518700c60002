"""Ray tasks that search for copies and write the pairs: in one shard of others' images, and in a block of images of
each other.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
import pyarrow as pa

from data_tools.dedup.near_copies import ImageIndex, Likely
from data_tools.dedup.thumbnails import ARRAYS, FINE, ThumbnailJob, load, read_arrays, read_image
from data_tools.dedup.verify_pair import distance, reduced
from pipeline.architecture.pixels import Pixels
from pipeline.base import json_record
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, to_path

# Pairs up to this distance are written, so that another max_distance needs no new search.
KEPT_DISTANCE = 0.5
# Format of the results, part of their path. Increase it when the search would find other pairs in the same thumbnails.
FORMAT = 2


@dataclass(frozen=True)
class SearchJob:
    """shard: with thumbnails. tests: path of the file of `write_images`. out: path of the pairs.

    chosen: (k,) int64, the shard's images that are searched; None is all of them.
    """

    shard: ThumbnailJob
    tests: str
    out: str
    chosen: np.ndarray | None = None

    @property
    def amount(self) -> tuple[int, int]:
        """Images and their bytes."""
        sizes = self.shard.sizes if self.chosen is None else self.shard.sizes[self.chosen]
        return len(sizes), int(sizes.sum())


@dataclass(frozen=True)
class BlockJob:
    """images: path of the file of `write_images`. max_distance: of a copy. out: path of the pairs."""

    images: str
    max_distance: float
    out: str


@dataclass(frozen=True)
class Pairs:
    """Copies found, each pair once. rows: of the searched split. others: rows of the file of `write_images`."""

    rows: np.ndarray
    others: np.ndarray
    distances: np.ndarray

    def within(self, max_distance: float) -> "Pairs":
        """The pairs up to this distance."""
        return self.take(self.distances <= max_distance)

    def take(self, chosen: np.ndarray) -> "Pairs":
        """Some of the pairs, by their places or a mask."""
        return Pairs(self.rows[chosen], self.others[chosen], self.distances[chosen])

    def nearest(self) -> "Pairs":
        """The nearest other of each row, by row."""
        order = np.lexsort((self.others, self.distances, self.rows))
        _, first = np.unique(self.rows[order], return_index=True)
        return self.take(order[first])


def write_images(jobs: Sequence[ThumbnailJob], path: AnyPath, chosen: np.ndarray | None = None) -> None:
    """Write everything the search needs about images to one file: 1.1 KB per image.

    jobs: their shards; the images are counted in this order. chosen: (k,) int64, which of them, in the order of the
    file; None is all.
    """
    starts = np.cumsum([0] + [len(job.offsets) for job in jobs])
    chosen = np.arange(starts[-1]) if chosen is None else chosen
    of_job = np.searchsorted(starts, chosen, side="right") - 1
    columns: dict[str, np.ndarray] = {}
    for number, job in enumerate(jobs):
        places = np.flatnonzero(of_job == number)
        if not len(places):
            continue
        rows, there = chosen[places] - starts[number], load(job, *ARRAYS)
        of_shard = {**there, "offsets": job.offsets, "sizes": job.sizes, "tar": np.full(len(job.offsets), number)}
        for name, column in of_shard.items():
            into = columns.setdefault(name, np.empty((len(chosen), *column.shape[1:]), column.dtype))
            into[places] = column[rows]
    with replacing(path) as file:
        of_jobs = {
            "tars": np.array([job.tar for job in jobs]),
            "pixels": np.array([json.dumps(job.pixels.to_dict()) for job in jobs]),
        }
        np.savez(file, **of_jobs, **columns)  # type: ignore[arg-type]


def search_shard(job: SearchJob) -> None:
    """Write the pairs of one shard. Raises UserError for a damaged shard or file of thumbnails."""
    cv2.setNumThreads(1)
    tests = _SearchedFor(job.tests)
    own = load(job.shard, *ARRAYS)
    chosen = np.arange(len(own["states"])) if job.chosen is None else job.chosen
    usable = chosen[own["states"][chosen] == FINE]
    likely = tests.index.find(own["thumbs"][usable])
    rows, others = usable[likely.query], likely.test
    images = (
        _read_reduced(job.shard.tar, offset, size, job.shard.pixels)
        for offset, size in zip(job.shard.offsets[rows].tolist(), job.shard.sizes[rows].tolist(), strict=True)
    )
    distances = _distances(tests.images, likely, images)
    near = distances <= KEPT_DISTANCE
    same, same_others = _equal_files(own["hashes"][chosen], tests.by_digest)
    same = chosen[same]
    pairs = _each_once(
        np.concatenate([rows[near], same]),
        np.concatenate([others[near], same_others]),
        np.concatenate([distances[near], np.zeros(len(same), np.float32)]),
    )
    with replacing(to_path(job.out)) as out:
        np.savez(out, rows=pairs.rows, tests=pairs.others, distances=pairs.distances)


def compare_block(job: BlockJob) -> None:
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
    with replacing(to_path(job.out)) as out:
        np.savez(out, rows=rows.astype(int), tests=others.astype(int), distances=distances.astype(np.float32))


def read_pairs(path: str, first_row: int = 0) -> Pairs:
    """Read the output of a task. first_row: of the searched shard in its split. Raises UserError for a damaged file."""
    rows, tests, distances = read_arrays(path, "rows", "tests", "distances")
    return Pairs(first_row + rows, tests, distances)


class _StoredImages:
    """The images of a file of `write_images`, in a worker's memory; their pixels are read from their shards."""

    def __init__(self, path: str) -> None:
        names = ("states", "thumbs", "hashes", "tar", "offsets", "sizes", "tars", "pixels")
        self.states, self.thumbs, self.hashes, self._tar, self._offsets, self._sizes, tars, pixels = read_arrays(
            path, *names
        )
        self._tars, self._pixels = tars.tolist(), [json_record.parse(text, Pixels, path) for text in pixels.tolist()]

    def read_reduced(self, row: int) -> np.ndarray:
        tar = self._tar[row]
        return _read_reduced(self._tars[tar], int(self._offsets[row]), int(self._sizes[row]), self._pixels[tar])


@lru_cache(maxsize=1)  # Per worker: building the index of 100,000 images takes half a minute.
class _SearchedFor:
    """The images whose copies are searched for, and their index."""

    def __init__(self, path: str) -> None:
        self.images = _StoredImages(path)
        self.index = ImageIndex(self.images.thumbs, rows=np.flatnonzero(self.images.states == FINE))
        self.by_digest = _by_digest(self.images.hashes)


def _distances(tests: _StoredImages, likely: Likely, images: Iterable[np.ndarray]) -> np.ndarray:
    """Distances of likely pairs, float32. images: that of each pair, from `reduced`, which shows a part of the test
    image.
    """
    pairs = zip(likely.test.tolist(), images, likely.crop, likely.mirrored.tolist(), strict=True)
    return np.array([distance(tests.read_reduced(test), *others) for test, *others in pairs], np.float32)


@lru_cache(maxsize=4096)
def _read_reduced(tar: str, offset: int, size: int, pixels: Pixels) -> np.ndarray:
    return reduced(read_image(tar, offset, size, pixels))


def _equal_files(hashes: np.ndarray, tests: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows of hashes, rows of test images) of equal files. tests: of `_by_digest`."""
    found = _by_digest(hashes).join(tests, "digest", join_type="inner", right_suffix="_of_test", use_threads=False)
    return found["row"].to_numpy(), found["row_of_test"].to_numpy()


def _by_digest(hashes: np.ndarray) -> pa.Table:
    """Rows by the first 8 bytes of their hashes (no chance match is expected in 1e12 pairs)."""
    digests = np.ascontiguousarray(hashes[:, :8]).view(np.uint64)[:, 0]
    return pa.table({"digest": digests, "row": np.arange(len(digests))})


def _each_once(rows: np.ndarray, others: np.ndarray, distances: np.ndarray) -> Pairs:
    """Keep each pair once, at its smallest distance: equal files are also found by their pixels, at about 0."""
    order = np.lexsort((distances, others, rows))
    _, first = np.unique(np.stack([rows, others])[:, order], axis=1, return_index=True)
    return Pairs(rows, others, np.maximum(distances, 0)).take(order[first])
