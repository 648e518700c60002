"""Finds pairs of images that may be copies: recompressed, resized, slightly cropped, mirrored, with other brightness or
colours.

Each image is reduced to a grey thumbnail (32 x 32). Its DCT coefficients are used twice: the signs of the 64 lowest
form a hash, by which a faiss index finds candidates; 255 of them are correlated, to reject most candidates and to
estimate the crop. They are weighted by frequency, so that fine detail counts as much as the coarse layout that
unrelated photographs share. The remaining pairs are verified on the images themselves (verify_pair.py).

A cropped copy has another hash. Therefore each indexed image has the hashes of 36 crops and of their mirror images, and
each image that is searched for, of which there are many more, has one hash.
"""

from dataclasses import dataclass
from pathlib import Path

import cv2
import faiss
import numpy as np

SIDE = 32
_FREQUENCIES = 16
# The hashes (64 bits) of most copies differ in at most 7 bits, so that at least one of four tables of 16 bits has at
# most one wrong bit. Many copies with 8 or 9 wrong bits are found as well.
_MAX_BITS = 9
_TABLES, _TABLE_BITS = 4, 16
# XORed with the number of a list: itself, and those with one other bit.
_NEAR_LISTS = np.array([0, *(1 << bit for bit in range(_TABLE_BITS))])
# Crops remove up to 10 % of each side, in coarse steps for hashing and in fine steps for correlation (shares of a
# side).
_HASH_STEP, _FINE_STEP = 0.05, 0.02
_MAX_CROP = 0.1
# Limits of 1 - correlation for the crop of the hash and for the best fine crop; 99 % of copies are below 0.4 and 0.2.
_MAX_COARSE_DISTANCE = 0.7
_MAX_FINE_DISTANCE = 0.3
# Effective number of coefficients (participation ratio of their energy): 1.5 for a gradient, 65 for photographs
# (median).
_MIN_DETAIL = 10
# Effective number of a thumbnail's 64 blocks whose variance (grey levels squared) is well above compression noise: 1 to
# 8 for an object's corner on a uniform background, up to 14 for one straight edge, 50 for photographs (median).
_BLOCK, _BLOCK_NOISE, _MIN_BLOCKS = 4, 25.0, 16.0
_MIN_SIDE_PIXELS = 16
_BATCH = 1024


def _intervals(step: float) -> np.ndarray:
    """Returns (n, 2): every (begin, end) within [0, 1] that removes at most _MAX_CROP, in multiples of step."""
    num = round(_MAX_CROP / step)
    return np.array([(left * step, 1 - right * step) for left in range(num + 1) for right in range(num + 1 - left)])


def _dct_of_interval(begin: float, end: float) -> np.ndarray:
    """Returns (frequencies, SIDE): the DCT of the interval [begin, end] of a side, resized to the whole side by
    area.
    """
    edges = np.linspace(begin, end, SIDE + 1) * SIDE
    pixel = np.arange(SIDE)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    stretch = overlap.clip(0)
    return (_DCT @ (stretch / stretch.sum(1, keepdims=True))).astype(np.float32)


# The DCT matrix, (frequencies, SIDE), with orthogonal rows of equal length.
_DCT = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * (np.arange(SIDE) + 0.5) / SIDE)
_DCT[0] *= np.sqrt(0.5)
_DCT = _DCT.astype(np.float32)
# Rows and columns of the 64 lowest frequencies but 0, ordered so that each table has low and high ones.
_LOWEST = sorted(np.ndindex(_FREQUENCIES, _FREQUENCIES), key=lambda place: place[0] ** 2 + place[1] ** 2)[1:65]
_V, _U = np.concatenate([_LOWEST[table::_TABLES] for table in range(_TABLES)]).T
# Mirroring an image inverts the sign of its odd horizontal frequencies.
_MIRROR = np.where(np.arange(_FREQUENCIES) % 2, -1, 1).astype(np.float32)
# Coefficients are multiplied by their frequency, because those of natural images fall with it. The mean (frequency 0)
# becomes 0.
_WEIGHTS = np.hypot(*np.mgrid[:_FREQUENCIES, :_FREQUENCIES]).astype(np.float32)
_COARSE = np.stack([_dct_of_interval(*interval) for interval in _intervals(_HASH_STEP)])
_FINE_INTERVALS = _intervals(_FINE_STEP)
_FINE = np.concatenate([_dct_of_interval(*interval) for interval in _FINE_INTERVALS])
NUM_CROPS = 2 * len(_COARSE) ** 2


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Resize (H, W, 3) uint8 RGB to (SIDE, SIDE) uint8 grey: by area, or bilinearly where a side is shorter than
    SIDE.
    """
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    height, width = grey.shape
    grey = cv2.resize(grey, (min(width, SIDE), min(height, SIDE)), interpolation=cv2.INTER_AREA)
    return cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)


def is_plain(pixels: np.ndarray, thumb: np.ndarray) -> bool:
    """Returns whether an image has too little detail to compare: mostly uniform, a gradient, or very small."""
    if min(pixels.shape[:2]) < _MIN_SIDE_PIXELS:
        return True
    num = SIDE // _BLOCK
    variance = thumb.reshape(num, _BLOCK, num, _BLOCK).astype(np.float32).var((1, 3))
    energy = (_coefficients(thumb[None])[0] * _WEIGHTS) ** 2
    return float((variance / (variance + _BLOCK_NOISE)).sum()) < _MIN_BLOCKS or float(
        energy.sum() ** 2
    ) < _MIN_DETAIL * float((energy**2).sum())


@dataclass(frozen=True)
class Likely:
    """Candidates with correlated thumbnails. query, test: (n,) int64, rows of the queries and of the test images.

    crop: (n, 4) float32, top, bottom, left, right of the part of the test image that the query shows, within [0, 1].
    mirrored: (n,) bool.
    """

    query: np.ndarray
    test: np.ndarray
    crop: np.ndarray
    mirrored: np.ndarray


class ImageIndex:
    """Index of images, which are identified by their row. thumbs: (n, SIDE, SIDE) uint8. rows: those that are found;
    None is all.

    Each table is a faiss index with a list of hashes for each value of their first bits in it: unlike faiss's index of
    hashes, it can be mapped from a file.
    """

    def __init__(self, thumbs: np.ndarray, rows: np.ndarray | None = None) -> None:
        self._thumbs = thumbs
        self._tables = [_empty_table() for _ in range(_TABLES)]
        self.add(np.arange(len(thumbs)) if rows is None else rows)

    @classmethod
    def mapped(cls, thumbs: np.ndarray, folder: Path) -> "ImageIndex":
        """The index that `write` wrote of these thumbnails. The processes of a host share its memory."""
        index = cls(thumbs, np.empty(0, np.int64))
        paths = [folder / f"{table}.ivf" for table in range(_TABLES)]
        index._tables = [faiss.read_index_binary(str(path), faiss.IO_FLAG_MMAP) for path in paths]
        return index

    @staticmethod
    def write(thumbs: np.ndarray, rows: np.ndarray, folder: Path) -> None:
        """Write the index of these images into a folder, for `mapped`. One table is in memory at a time."""
        starts = range(0, len(rows), _BATCH)
        hashes = [_crop_hashes(thumbs[rows[start : start + _BATCH]]) for start in starts]
        for table in range(_TABLES):
            index = _empty_table()
            for start, codes in zip(starts, hashes, strict=True):
                _add(index, table, codes, rows[start : start + _BATCH])
            faiss.write_index_binary(index, str(folder / f"{table}.ivf"))

    def add(self, rows: np.ndarray) -> None:
        """Find these images too. rows: (k,) int64, of thumbs."""
        for start in range(0, len(rows), _BATCH):
            some = rows[start : start + _BATCH]
            codes = _crop_hashes(self._thumbs[some])
            for table, index in enumerate(self._tables):
                _add(index, table, codes, some)

    def find(self, thumbs: np.ndarray) -> Likely:
        """Returns the pairs of thumbs ((n, SIDE, SIDE) uint8) and indexed images to verify, ordered by row of
        thumbs.
        """
        coefficients = _coefficients(thumbs)
        queries, tests, places = self.candidates(_hashes(coefficients))
        mirrored = places >= NUM_CROPS // 2
        near = np.flatnonzero(self._coarse_distances(coefficients, queries, tests, places) <= _MAX_COARSE_DISTANCE)
        kept, crops = [], []
        for i in near.tolist():
            query = coefficients[queries[i]] * (_MIRROR if mirrored[i] else 1)
            distance, crop = _best_crop(query, self._thumbs[tests[i]])
            if distance <= _MAX_FINE_DISTANCE:
                kept.append(i)
                crops.append(crop)
        rows = np.array(kept, np.int64)
        return Likely(queries[rows], tests[rows], np.array(crops, np.float32).reshape(-1, 4), mirrored[rows])

    def candidates(self, hashes: np.ndarray) -> np.ndarray:
        """Returns every pair whose hashes ((queries,) uint64) differ in at most 7 bits, and some of up to 9; each pair
        once.

        (3, pairs) int64: row of the query, row of the test image, index of its nearest crop hash.
        """
        # (query, test image, bits, crop), so that the nearest crop of a pair comes first.
        parts = []
        for table, index in enumerate(self._tables):
            rotated = _rotated(hashes, table)
            lists = _first_bits(rotated)[:, None] ^ _NEAR_LISTS
            index.nprobe = len(_NEAR_LISTS)
            unused = np.zeros(lists.shape, np.int32)
            limits, bits, ids = index.range_search_preassigned(rotated, _MAX_BITS + 1, lists, unused)
            starts = limits.astype(np.int64)
            query = np.repeat(np.arange(len(hashes)), starts[1:] - starts[:-1])
            parts.append(np.stack([query, ids // NUM_CROPS, bits.astype(np.int64), ids % NUM_CROPS]))
        rows = np.concatenate(parts, axis=1)
        rows = rows[:, np.lexsort(rows[::-1])]
        _, first = np.unique(rows[0] << 32 | rows[1], return_index=True)
        return rows[:, first][[0, 1, 3]]

    def _coarse_distances(self, coefficients: np.ndarray, *found: np.ndarray) -> np.ndarray:
        distances = np.empty(len(found[0]), np.float32)
        for start in range(0, len(distances), _BATCH):
            query, test, crop = (column[start : start + _BATCH] for column in found)
            mirrored, down, across = np.unravel_index(crop, (2, len(_COARSE), len(_COARSE)))
            crops = _COARSE[down] @ self._thumbs[test].astype(np.float32) @ _COARSE[across].swapaxes(1, 2)
            queries = coefficients[query] * np.where(mirrored[:, None, None], _MIRROR, 1)
            distances[start : start + _BATCH] = 1 - (_unit(crops) * _unit(queries)).sum(1)
        return distances


def _best_crop(query: np.ndarray, thumb: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns (1 - correlation, crop as in `Likely`) of the best fine crop of a test image."""
    correlations = _unit(_crops(thumb[None], _FINE)[0]) @ _unit(query[None])[0]
    best = int(correlations.argmax())
    down, across = divmod(best, len(_FINE_INTERVALS))
    return float(1 - correlations[best]), np.concatenate([_FINE_INTERVALS[down], _FINE_INTERVALS[across]])


def _coefficients(thumbs: np.ndarray) -> np.ndarray:
    """DCT of (n, SIDE, SIDE) thumbnails: (n, vertical frequencies, horizontal frequencies) float32."""
    return _DCT @ thumbs.astype(np.float32) @ _DCT.T


def _crops(thumbs: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """DCT of every crop, vertical x horizontal intervals: (n, crops, frequencies, frequencies).

    intervals: (k * frequencies, SIDE), the stacked DCT matrices of k intervals.
    """
    k, f = len(intervals) // _FREQUENCIES, _FREQUENCIES
    grid = (intervals @ thumbs.astype(np.float32) @ intervals.T).reshape(-1, k, f, k, f)
    return grid.transpose(0, 1, 3, 2, 4).reshape(len(thumbs), k * k, f, f)


def _hashes(coefficients: np.ndarray) -> np.ndarray:
    """Hashes of (..., frequencies, frequencies) coefficients: (...) uint64."""
    signs = np.ascontiguousarray(coefficients[..., _V, _U] > 0)
    return np.packbits(signs, axis=-1).view(np.uint64)[..., 0]


def _crop_hashes(thumbs: np.ndarray) -> np.ndarray:
    """Hashes of each thumbnail's crops, then of their mirror images: (n * NUM_CROPS,) uint64."""
    crops = _crops(thumbs, _COARSE.reshape(-1, SIDE))
    return np.stack([_hashes(crops), _hashes(crops * _MIRROR)], axis=1).reshape(-1)


def _rotated(hashes: np.ndarray, table: int) -> np.ndarray:
    """Hashes as (n, 8) uint8 with the bits of one table first."""
    return np.roll(hashes.view(np.uint8).reshape(-1, 8), -2 * table, axis=1)


def _first_bits(rotated: np.ndarray) -> np.ndarray:
    """(n,) int64: the bits of the table, which are the number of the list."""
    return rotated.view(f"<u{_TABLE_BITS // 8}")[:, 0].astype(np.int64)


def _empty_table() -> faiss.IndexBinaryIVF:
    index = faiss.IndexBinaryIVF(faiss.IndexBinaryFlat(64), 64, 2**_TABLE_BITS)
    index.is_trained = True
    return index


def _add(index: faiss.IndexBinaryIVF, table: int, codes: np.ndarray, rows: np.ndarray) -> None:
    """Add the crops of images to a table. codes: from `_crop_hashes`. rows: of the images."""
    rotated = _rotated(codes, table)
    ids, lists = (rows[:, None] * NUM_CROPS + np.arange(NUM_CROPS)).ravel(), _first_bits(rotated)
    index.add_core(len(ids), faiss.swig_ptr(rotated), faiss.swig_ptr(ids), faiss.swig_ptr(lists))


def _unit(coefficients: np.ndarray) -> np.ndarray:
    """Weighted coefficients as unit vectors: (n, frequencies squared)."""
    flat = (coefficients * _WEIGHTS).reshape(len(coefficients), -1)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6)
