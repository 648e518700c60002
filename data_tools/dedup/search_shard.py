"""Ray task that searches the images of one shard for copies of test images, and writes the pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
import pyarrow as pa

from data_tools.dedup.near_copies import TestImages
from data_tools.dedup.thumbnails import FINE, ThumbnailJob, read_arrays, read_image, read_thumbnails
from data_tools.dedup.verify_pair import distance, reduced
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, to_path

# Pairs up to this distance are written, so that another max_distance needs no new search.
KEPT_DISTANCE = 0.5
# Format of the results, part of their path. Increase it when the search would find other pairs in the same thumbnails.
FORMAT = 2


@dataclass(frozen=True)
class SearchJob:
    """shard: with thumbnails. tests: path of the file of `write_tests`. out: path of the pairs."""

    shard: ThumbnailJob
    tests: str
    out: str


@dataclass(frozen=True)
class Pairs:
    """Copies found, each pair once. rows: of the searched split. tests: rows of all test images, in the order of their shards."""

    rows: np.ndarray
    tests: np.ndarray
    distances: np.ndarray


def write_tests(jobs: Sequence[ThumbnailJob], path: AnyPath) -> None:
    """Write everything the search needs about the test images to one file: 1.1 KB per image."""
    kept = [read_thumbnails(job) for job in jobs]
    with replacing(path) as file:
        np.savez(
            file,
            thumbs=np.concatenate([k.thumbs for k in kept]),
            states=np.concatenate([k.states for k in kept]),
            hashes=np.concatenate([k.hashes for k in kept]),
            tars=np.array([job.tar for job in jobs]),
            tar=np.repeat(np.arange(len(jobs)), [len(job.offsets) for job in jobs]),
            offsets=np.concatenate([job.offsets for job in jobs]),
            sizes=np.concatenate([job.sizes for job in jobs]),
        )


def search_shard(job: SearchJob) -> None:
    """Write the pairs of one shard. Raises UserError for a damaged shard or file of thumbnails."""
    cv2.setNumThreads(1)
    tests = _Tests(job.tests)
    own = read_thumbnails(job.shard)
    usable = np.flatnonzero(own.states == FINE)
    likely = tests.index.find(own.thumbs[usable])
    rows, others = usable[likely.query], tests.fine[likely.test]
    distances = np.array(
        [
            distance(tests.read_reduced(other), _read_reduced(job.shard.tar, offset, size), crop, mirrored)
            for other, offset, size, crop, mirrored in zip(
                others.tolist(),
                job.shard.offsets[rows].tolist(),
                job.shard.sizes[rows].tolist(),
                likely.crop,
                likely.mirrored.tolist(),
                strict=True,
            )
        ],
        np.float32,
    )
    near = distances <= KEPT_DISTANCE
    same, same_others = _equal_files(own.hashes, tests.by_digest)
    pairs = _each_once(
        np.concatenate([rows[near], same]),
        np.concatenate([others[near], same_others]),
        np.concatenate([distances[near], np.zeros(len(same), np.float32)]),
    )
    with replacing(to_path(job.out)) as out:
        np.savez(out, rows=pairs.rows, tests=pairs.tests, distances=pairs.distances)


def read_pairs(job: SearchJob) -> Pairs:
    """Read the output of `search_shard`, with rows of the split. Raises UserError for a damaged file."""
    rows, tests, distances = read_arrays(job.out, "rows", "tests", "distances")
    return Pairs(job.shard.first_row + rows, tests, distances)


@lru_cache(maxsize=1)  # Per worker: building the index of 100,000 images takes half a minute.
class _Tests:
    """Test images in a worker's memory. fine: the indexed rows."""

    def __init__(self, path: str) -> None:
        names = ("states", "thumbs", "hashes", "tars", "tar", "offsets", "sizes")
        states, thumbs, hashes, tars, self._tar, self._offsets, self._sizes = read_arrays(path, *names)
        self.fine = np.flatnonzero(states == FINE)
        self.index = TestImages(thumbs[self.fine])
        self.by_digest, self._tars = _by_digest(hashes), tars.tolist()

    def read_reduced(self, row: int) -> np.ndarray:
        return _read_reduced(self._tars[self._tar[row]], int(self._offsets[row]), int(self._sizes[row]))


@lru_cache(maxsize=4096)
def _read_reduced(tar: str, offset: int, size: int) -> np.ndarray:
    return reduced(read_image(tar, offset, size))


def _equal_files(hashes: np.ndarray, tests: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rows of hashes, rows of test images) of equal files. tests: of `_by_digest`."""
    found = _by_digest(hashes).join(tests, "digest", join_type="inner", right_suffix="_of_test", use_threads=False)
    return found["row"].to_numpy(), found["row_of_test"].to_numpy()


def _by_digest(hashes: np.ndarray) -> pa.Table:
    """Rows by the first 8 bytes of their hashes (no chance match is expected in 1e12 pairs)."""
    digests = np.ascontiguousarray(hashes[:, :8]).view(np.uint64)[:, 0]
    return pa.table({"digest": digests, "row": np.arange(len(digests))})


def _each_once(rows: np.ndarray, tests: np.ndarray, distances: np.ndarray) -> Pairs:
    """Keep each pair once, at its smallest distance: equal files are also found by their pixels, at about 0."""
    order = np.lexsort((distances, tests, rows))
    rows, tests, distances = rows[order], tests[order], distances[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (tests[1:] != tests[:-1])
    return Pairs(rows[is_first], tests[is_first], np.maximum(distances[is_first], 0))
