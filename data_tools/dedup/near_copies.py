"""Which pairs of images may be copies: re-compressed, resized, cropped a little, mirrored, lighter, of other colours.

Every image is a grey thumbnail (32 x 32). Its DCT coefficients serve twice: the signs of the 64 lowest are a hash, by
which a faiss index finds candidates, and 255 of them, weighted by frequency so that fine detail counts as much as the
broad layout that unrelated photographs share, are correlated to sort out most candidates, and to tell which crop it is.
What is left is judged by a second look at the images themselves (verify_pair.py).

A cropped copy has another hash. So a test image, of which there are few, is in the index with the hashes of 36 crops of
it and of their mirror images; an image to be looked up has one.
"""

from dataclasses import dataclass

import cv2
import faiss
import numpy as np

SIDE = 32
_FREQUENCIES = 16
# Of a hash of 64 bits, most copies' differ in at most 7: with four tables of 16 bits one table then has at most one
# wrong. Of those that differ in 8 or 9 the tables come across many, too.
_MAX_BITS = 9
_TABLES, _TABLE_BITS, _TABLE_FLIPS = 4, 16, 1
# What is left of a side, as shares of it: crops of up to 10 %, coarse for the hash and fine for the judgement.
_HASH_STEP, _FINE_STEP = 0.05, 0.02
_MAX_CROP = 0.1
# A candidate as its hash found it, before the crop is known to a pixel, and then; 99 % of copies are below 0.4 and 0.2.
_MAX_COARSE_DISTANCE = 0.7
_MAX_FINE_DISTANCE = 0.3
# Coefficients that carry the picture (participation ratio of their energy): a gradient has 1.5, a photograph 65 (median).
_MIN_DETAIL = 10
# Of the 64 blocks of a thumbnail, as many as show something: a variance well above that of compression, in grey levels
# squared. A corner of something before a plain ground has 1 to 8, one straight edge up to 14, a photograph 50 (median).
_BLOCK, _BLOCK_NOISE, _MIN_BLOCKS = 4, 25.0, 16.0
_MIN_SIDE_PIXELS = 16
_BATCH = 1024


def _intervals(step: float) -> np.ndarray:
    """(n, 2): every (begin, end) within [0, 1] that leaves away at most _MAX_CROP, in steps."""
    num = round(_MAX_CROP / step)
    return np.array([(left * step, 1 - right * step) for left in range(num + 1) for right in range(num + 1 - left)])


def _dct() -> np.ndarray:
    """(frequencies, SIDE) float32, orthogonal rows of equal length."""
    rows = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * (np.arange(SIDE) + 0.5) / SIDE)
    rows[0] *= np.sqrt(0.5)
    return rows.astype(np.float32)


def _dct_of_interval(begin: float, end: float) -> np.ndarray:
    """(frequencies, SIDE): the DCT of the part [begin, end] of a side, stretched to the whole by the area method."""
    edges = np.linspace(begin, end, SIDE + 1) * SIDE
    pixel = np.arange(SIDE)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    stretch = overlap.clip(0)
    return (_dct() @ (stretch / stretch.sum(1, keepdims=True))).astype(np.float32)


def _hash_bits() -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the 64 lowest frequencies, dealt out so that each of the four tables has low and high ones."""
    lowest = sorted(
        ((v, u) for v in range(_FREQUENCIES) for u in range(_FREQUENCIES) if u or v),
        key=lambda place: (place[0] ** 2 + place[1] ** 2, place),
    )[:64]
    dealt = [lowest[i] for table in range(_TABLES) for i in range(table, 64, _TABLES)]
    return np.array([v for v, _ in dealt]), np.array([u for _, u in dealt])


_V, _U = _hash_bits()
# Mirroring an image changes the sign of its odd horizontal frequencies.
_MIRROR = np.where(np.arange(_FREQUENCIES) % 2, -1, 1).astype(np.float32)
_WEIGHTS = np.hypot(*np.mgrid[:_FREQUENCIES, :_FREQUENCIES]).astype(np.float32)
_COARSE = np.stack([_dct_of_interval(*interval) for interval in _intervals(_HASH_STEP)])
_FINE_INTERVALS = _intervals(_FINE_STEP)
_FINE = np.concatenate([_dct_of_interval(*interval) for interval in _FINE_INTERVALS])
NUM_CROPS = 2 * len(_COARSE) ** 2


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """(SIDE, SIDE) uint8 grey of (H, W, 3) uint8 RGB, by the area method; a side that is shorter is enlarged."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    height, width = grey.shape
    grey = cv2.resize(grey, (min(width, SIDE), min(height, SIDE)), interpolation=cv2.INTER_AREA)
    return cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)


def is_plain(pixels: np.ndarray, thumb: np.ndarray) -> bool:
    """Whether an image shows too little to tell it from others: mostly uniform, a gradient, or a few pixels in all."""
    if min(pixels.shape[:2]) < _MIN_SIDE_PIXELS:
        return True
    num = SIDE // _BLOCK
    variance = thumb.reshape(num, _BLOCK, num, _BLOCK).astype(np.float32).var((1, 3))
    energy = _weighted(_coefficients(thumb[None])[0]) ** 2
    return float((variance / (variance + _BLOCK_NOISE)).sum()) < _MIN_BLOCKS or float(
        energy.sum() ** 2
    ) < _MIN_DETAIL * float((energy**2).sum())


@dataclass(frozen=True)
class Candidates:
    """Pairs that may be copies: rows of the queries, of the test images, and the crop whose hash was nearest."""

    query: np.ndarray
    test: np.ndarray
    crop: np.ndarray


@dataclass(frozen=True)
class Likely:
    """Candidates whose thumbnails correlate. query, test: (n,) int64, rows of the queries and of the test images.

    crop: (n, 4) float32, top, bottom, left, right of the part of the test image that the query shows, within [0, 1].
    mirrored: (n,) bool.
    """

    query: np.ndarray
    test: np.ndarray
    crop: np.ndarray
    mirrored: np.ndarray


class TestImages:
    """Test images to search for copies of. thumbs: (n, SIDE, SIDE) uint8; test images are known by their row."""

    __test__ = False  # Not one of pytest's.

    def __init__(self, thumbs: np.ndarray) -> None:
        self._thumbs = thumbs
        self._tables = []
        parts = [_crop_hashes(thumbs[i : i + _BATCH]) for i in range(0, len(thumbs), _BATCH)]
        codes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        for table in range(_TABLES):
            index = faiss.IndexBinaryHash(64, _TABLE_BITS)
            index.nflip = _TABLE_FLIPS
            index.add(_rotated(codes, table))
            self._tables.append(index)

    def find(self, thumbs: np.ndarray) -> Likely:
        """Pairs of thumbs ((n, SIDE, SIDE) uint8) and test images that are worth a second look; by row of thumbs."""
        coefficients = _coefficients(thumbs)
        found = self.candidates(_hashes(coefficients))
        mirrored = found.crop >= NUM_CROPS // 2
        near = np.flatnonzero(self._coarse_distances(coefficients, found) <= _MAX_COARSE_DISTANCE)
        kept, crops = [], []
        for i in near.tolist():
            query = coefficients[found.query[i]] * (_MIRROR if mirrored[i] else 1)
            distance, crop = _best_crop(query, self._thumbs[found.test[i]])
            if distance <= _MAX_FINE_DISTANCE:
                kept.append(i)
                crops.append(crop)
        rows = np.array(kept, np.int64)
        return Likely(found.query[rows], found.test[rows], np.array(crops, np.float32).reshape(-1, 4), mirrored[rows])

    def candidates(self, hashes: np.ndarray) -> Candidates:
        """All pairs whose hashes ((queries,) uint64) differ in at most 7 bits, and some of up to 9; each pair once."""
        # (query, test image, bits, crop), so that the nearest crop of a pair comes first.
        parts = []
        for table, index in enumerate(self._tables):
            limits, bits, ids = index.range_search(_rotated(hashes, table), _MAX_BITS + 1)
            starts = limits.astype(np.int64)
            query = np.repeat(np.arange(len(hashes)), starts[1:] - starts[:-1])
            parts.append(np.stack([query, ids // NUM_CROPS, bits.astype(np.int64), ids % NUM_CROPS]))
        rows = np.concatenate(parts, axis=1)
        rows = rows[:, np.lexsort(rows[::-1])]
        is_first = np.ones(rows.shape[1], bool)
        is_first[1:] = (rows[:2, 1:] != rows[:2, :-1]).any(0)
        query, test, _, crop = rows[:, is_first]
        return Candidates(query, test, crop)

    def _coarse_distances(self, coefficients: np.ndarray, found: Candidates) -> np.ndarray:
        distances = np.empty(len(found.query), np.float32)
        for start in range(0, len(found.query), _BATCH):
            part = slice(start, start + _BATCH)
            mirrored, down, across = np.unravel_index(found.crop[part], (2, len(_COARSE), len(_COARSE)))
            crops = _COARSE[down] @ self._thumbs[found.test[part]].astype(np.float32) @ _COARSE[across].swapaxes(1, 2)
            queries = coefficients[found.query[part]] * np.where(mirrored[:, None, None], _MIRROR, 1)
            distances[part] = 1 - (_unit(crops) * _unit(queries)).sum(1)
        return distances


def _best_crop(query: np.ndarray, thumb: np.ndarray) -> tuple[float, np.ndarray]:
    """1 - the correlation at the best of the fine crops of a test image, and that crop as `Likely` has it."""
    correlations = _unit(_crops(thumb[None], _FINE)[0]) @ _unit(query[None])[0]
    best = int(correlations.argmax())
    down, across = divmod(best, len(_FINE_INTERVALS))
    return float(1 - correlations[best]), np.concatenate([_FINE_INTERVALS[down], _FINE_INTERVALS[across]])


def _coefficients(thumbs: np.ndarray) -> np.ndarray:
    """(n, frequencies down, frequencies across) float32 of (n, SIDE, SIDE)."""
    return _dct() @ thumbs.astype(np.float32) @ _dct().T


def _crops(thumbs: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """(n, crops, frequencies, frequencies): coefficients of every crop, intervals down x intervals across.

    intervals: (k * frequencies, SIDE), the DCTs of k intervals, one below another.
    """
    k, f = len(intervals) // _FREQUENCIES, _FREQUENCIES
    grid = (intervals @ thumbs.astype(np.float32) @ intervals.T).reshape(-1, k, f, k, f)
    return grid.transpose(0, 1, 3, 2, 4).reshape(len(thumbs), k * k, f, f)


def _hashes(coefficients: np.ndarray) -> np.ndarray:
    """uint64 of (..., frequencies, frequencies)."""
    signs = np.ascontiguousarray(coefficients[..., _V, _U] > 0)
    return np.packbits(signs, axis=-1).view(np.uint64)[..., 0]


def _crop_hashes(thumbs: np.ndarray) -> np.ndarray:
    """(n * NUM_CROPS,) uint64: of each thumbnail's crops, then of their mirror images."""
    crops = _crops(thumbs, _COARSE.reshape(-1, SIDE))
    return np.stack([_hashes(crops), _hashes(crops * _MIRROR)], axis=1).reshape(-1)


def _rotated(hashes: np.ndarray, table: int) -> np.ndarray:
    """(n, 8) uint8, the bits of this table first: faiss's IndexBinaryHash has one table, of the first bits."""
    return np.roll(hashes.view(np.uint8).reshape(-1, 8), -2 * table, axis=1)


def _weighted(coefficients: np.ndarray) -> np.ndarray:
    """Coefficients by frequency; natural images' fall with it. The mean, of frequency 0, is gone."""
    return coefficients * _WEIGHTS


def _unit(coefficients: np.ndarray) -> np.ndarray:
    """(n, frequencies squared): weighted, of length 1."""
    flat = _weighted(coefficients).reshape(len(coefficients), -1)
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6)
