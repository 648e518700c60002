"""Balanced epochs: classes drawn with probability proportional to (their number of samples) ** power, by a sample's
first label.

An epoch keeps its length, the N samples of the split. Of them, class c with m_c samples gets n_c = N * m_c**power /
sum(m**power), rounded down or up. Numbers of an epoch are rounded together, by one offset u in [0, 1): with C_c the sum
of the exact numbers of the classes up to c, class c gets floor(C_c + u) - floor(C_(c-1) + u). So they sum to N, and
each has exactly its expectation, because u is uniform over the seeds. Over epochs u moves by the golden ratio, which
keeps sums over many epochs within a few samples of their expectation, too.

The samples of a class are in one shuffled order, through which its places run in a circle, from one epoch to the next.
So in any epoch the samples of a class are used equally often, or one more time, and the same holds from the start to
the end of any epoch.

Samples without a label are a class of their own.
"""

import decimal
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.split import Split
from pipeline.data.storage.host_arrays import HostArrays, new_array
from pipeline.process.waits import Work

_ORDER, _ROUNDING = Purpose.named("order within a class"), Purpose.named("rounding of classes")
# 2**64 / golden ratio: multiples of it, modulo 2**64, are spread evenly.
_GOLDEN = 0x9E3779B97F4A7C15
# decimal rounds exp and log correctly. The last bit of numpy's power, and so orders, differ between processors.
_DECIMAL = decimal.Context(prec=40)
# Numbers compared at a time.
_BLOCK = 2**22
# Samples looked at in one call: their numbers stay in the processor's cache.
_SAMPLES = 2**16
# Samples that are sorted together, which takes 20 bytes each.
_SORTED = 2**26
_SHUFFLED, _CONTENTS = "the order within classes (data.balance)", "an epoch's contents (data.balance)"


class FirstLabels:
    """The first label of each sample of a split, -1 without any: int32 arrays, by slices."""

    def __init__(self, split: Split) -> None:
        self.split = split
        index = split.index
        self.has_one_each = index.max_labels == 1 and len(index.labels) == len(index)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, end, _ = rows.indices(len(self))
        index, at = self.split.index, self.split.manifest_range(first, end)
        if self.has_one_each:
            return index.labels[at]
        starts, ends = (index.label_starts[at + more] for more in (0, 1))
        labels = np.full(end - first, -1, np.int32)
        labels[ends > starts] = index.labels[starts[ends > starts]]
        return labels


class EpochContents:
    """The uses of samples in an epoch, in blocks: all first uses of the samples of a shard, all second ones, and so on.

    rows: int32 or int64 (N,), rows of the split, all first uses before all others. starts: int64 (blocks + 1,), where
    each block begins in `rows`. copies: int64 (blocks,), number of a block's uses in this epoch, from 0.
    blocks, ends: int64 (blocks,), the blocks in the epoch's order, and where each ends.
    """

    def __init__(self, arrays: HostArrays, shuffled: HostArrays, done: np.ndarray, first: np.ndarray) -> None:
        """done, first: int64 (classes,), how often all samples of a class were used before, and how many of them, in
        the shuffled order, once more.
        """
        self.rows, self.starts, self.copies = (arrays[name] for name in ("rows", "starts", "copies"))
        self.blocks, self.ends = arrays["blocks"], arrays["ends"]
        self._arrays, self._shuffled, self._done, self._first = arrays, shuffled, done, first

    def used(self, rows: np.ndarray) -> np.ndarray:
        """int64, how often each of these samples was used before this epoch."""
        of_class = self._shuffled["class"][rows]
        return self._done[of_class] + (self._shuffled["place"][rows] < self._first[of_class])

    @property
    def num_first(self) -> int:
        """How many uses are the first ones of their samples in this epoch."""
        return int(self.starts[np.searchsorted(self.copies, 1)])

    def unmerge(self, place: np.ndarray) -> np.ndarray:
        """Places of an epoch in which first uses and others take turns, to places where all first uses come first.

        So every window has the same share of both. Without that, the small blocks of later uses, of rare classes alone,
        would lie in heaps between the large ones.
        """
        num, later = len(self.rows), len(self.rows) - self.num_first
        before = place * later // num
        return np.where((place + 1) * later // num > before, self.num_first + before, place - before)


class ClassBalance:
    """Which samples each epoch uses and how often; a pure function of (seed, epoch).

    What grows with the number of samples is computed by one process of a host, when it is first needed, and mapped by
    all (`HostArrays`).
    """

    def __init__(self, labels: np.ndarray | FirstLabels, shard_starts: np.ndarray, power: float, seed: int) -> None:
        """labels: (N,), the first label of each sample, -1 without any. shard_starts: int64 (shards + 1,). power: 0 to
        1.
        """
        self.labels, self.shard_starts, self.seed, self.num_samples = labels, shard_starts, seed, len(labels)
        self.dtype = np.dtype(np.int32 if len(labels) < 2**31 else np.int64)
        sizes, digest = _count(labels)
        starts = xxhash.xxh3_128_hexdigest(np.asarray(shard_starts, "<i8").tobytes())
        self._key = f"{digest} {starts} {power} {seed}"
        self.classes = np.flatnonzero(sizes) - 1
        self.sizes = sizes[self.classes + 1]
        self.wholes, self._fractions = _exact_places(self.sizes, power)
        self._offset = random_numbers.bits(seed, _ROUNDING)

    @cached_property
    def _shuffled(self) -> HostArrays:
        """class: of each sample, an index into `classes`. place: in the shuffled order of its class."""
        return HostArrays(_SHUFFLED, self._key, self._shuffle)

    def places(self, epoch: int) -> np.ndarray:
        """int64 (classes,): how many places of an epoch each class gets, in the order of `classes`."""
        return self.wholes + np.diff(self._is_rounded_up(np.array([epoch]))[0].astype(np.int64))

    def places_before(self, epoch: int) -> np.ndarray:
        """int64 (classes,): the sum of `places` of all earlier epochs."""
        ups = np.zeros(len(self._fractions), np.int64)
        at_once = max(1, _BLOCK // len(ups))
        for first in range(0, epoch, at_once):
            ups += self._is_rounded_up(np.arange(first, min(first + at_once, epoch))).sum(0)
        return epoch * self.wholes + np.diff(ups)

    def contents(self, epoch: int) -> EpochContents:
        """The uses of an epoch. The first process of a host takes time in proportion to the number of samples."""
        before, places = self.places_before(epoch), self.places(epoch)
        done, first = np.divmod(before, self.sizes)
        write = partial(self._write_contents, epoch, first, places)
        return EpochContents(HostArrays(_CONTENTS, f"{self._key} {epoch}", write), self._shuffled, done, first)

    def _shuffle(self, folder: Path) -> None:
        """Write the class of each sample, and its place in the shuffled order of its class."""
        num, num_classes = self.num_samples, len(self.classes)
        of_class = new_array(folder, "class", np.min_scalar_type(num_classes), num)
        place = new_array(folder, "place", self.dtype, num)
        number = np.zeros(int(self.classes.max()) + 2, of_class.dtype)
        number[self.classes + 1] = np.arange(num_classes)
        for block in _blocks(num):
            of_class[block] = number[self.labels[block] + 1]
        # The bits of a hash that class and row leave of 64. Samples are sorted by class, hash and row, some at a time:
        # those whose place in the order of all is estimated, from class and hash, to be between two numbers.
        num_bits = 64 - int(self.classes.max() + 1).bit_length() - num.bit_length()
        known = min(num_bits, 24)
        ends = np.cumsum(self.sizes)
        starts, done, parts = ends - self.sizes, 0, -(-num // _SORTED)
        rows_of_part = np.empty(min(num, 2 * _SORTED + _SAMPLES), self.dtype)  # Some parts are larger than others.
        keys_of_part = np.empty(len(rows_of_part), np.uint64)
        with Work(f"computing {_SHUFFLED}", num, "sample") as work:
            for part in range(parts):
                low, high = num * part // parts, num * (part + 1) // parts
                has_some = (ends > low) & (starts < high)
                size = 0
                for block in _blocks(num):
                    rows = block.start + np.flatnonzero(has_some[of_class[block]])
                    classes = of_class[rows]
                    key = random_numbers.bits(self.seed, _ORDER, rows) >> np.uint64(64 - num_bits)
                    share = (key >> np.uint64(num_bits - known)).astype(np.int64)
                    estimate = starts[classes] + (self.sizes[classes] * share >> known)
                    is_in = (estimate >= low) & (estimate < high)
                    key |= classes.astype(np.uint64) << np.uint64(num_bits)
                    added = slice(size, size + int(is_in.sum()))
                    rows_of_part[added], keys_of_part[added] = rows[is_in], key[is_in]
                    size = added.stop
                rows = rows_of_part[:size]
                order = _places_in_order(keys_of_part[:size])
                places = np.empty(size, self.dtype)
                places[order] = np.arange(done, done + size, dtype=self.dtype)
                for block in _blocks(size):
                    place[rows[block]] = places[block] - starts[of_class[rows[block]]]
                done += size
                work.advance(size)

    def _write_contents(self, epoch: int, first: np.ndarray, places: np.ndarray, folder: Path) -> None:
        """Write the arrays of `EpochContents`. first: int64 (classes,), where the places of an epoch begin in the order
        of the class.
        """
        often, more = np.divmod(places, self.sizes)
        # (copies + 1,): where the first uses begin in `rows`, the second ones, and so on.
        with_more = np.bincount(often, self.sizes)[::-1].cumsum()[::-1]
        num_uses = np.bincount(often, more) + np.append(with_more[1:], 0)
        copy_starts = np.concatenate([[0], np.cumsum(num_uses[num_uses > 0].astype(np.int64))])
        rows, end = new_array(folder, "rows", self.dtype, self.num_samples), copy_starts[:-1].copy()
        local_bits = np.uint64(_SAMPLES.bit_length())
        found, last_shard = [], np.full(len(end), -1)  # Of each copy.
        with Work(f"computing {_CONTENTS}", self.num_samples, "sample") as work:
            for block in _blocks(self.num_samples):
                of_class = self._shuffled["class"][block]
                turn = self._shuffled["place"][block] - first[of_class]
                turn += (turn < 0) * self.sizes[of_class]
                uses = often[of_class] + (turn < more[of_class])
                # By number of the use, then by row. Both are packed into one integer, because values sort faster than
                # indices.
                packed = np.arange(uses.sum(), dtype=np.uint64)
                packed -= np.repeat((np.cumsum(uses) - uses).astype(np.uint64), uses)
                packed <<= local_bits
                packed |= np.repeat(np.arange(len(uses), dtype=np.uint64), uses)
                packed.sort()
                copies = (packed >> local_bits).astype(np.int64)
                local = (packed & ((np.uint64(1) << local_bits) - np.uint64(1))).astype(np.int64)
                begin = np.flatnonzero(np.diff(copies, prepend=-1))
                copy, length = copies[begin], np.diff(begin, append=len(copies))
                at = np.repeat(end[copy] - begin, length) + np.arange(len(copies))
                rows[at] = local + block.start
                end[copy] += length
                shard = self._shards(block)[local]
                is_start = np.diff(shard, prepend=-1) != 0
                is_start[begin] = shard[begin] != last_shard[copy]
                last_shard[copy] = shard[begin + length - 1]
                found.append(at[is_start])
                work.advance(len(uses))
        starts = np.sort(np.concatenate([*found, [self.num_samples]]))
        copies = np.searchsorted(copy_starts, starts[:-1], side="right") - 1
        blocks = random_numbers.permutation(len(copies), self.seed, Purpose.SHARD_ORDER, epoch)
        is_later = copies[blocks] > 0
        blocks = np.concatenate([blocks[~is_later], blocks[is_later]])
        ends = np.cumsum(np.diff(starts)[blocks])
        for name, values in {"starts": starts, "copies": copies, "blocks": blocks, "ends": ends}.items():
            new_array(folder, name, np.int64, len(values))[:] = values

    def _shards(self, rows: slice) -> np.ndarray:
        """The shard of each of these samples."""
        first, last = np.searchsorted(self.shard_starts, (rows.start, rows.stop - 1), side="right")
        bounds = self.shard_starts[first - 1 : last + 1].clip(rows.start, rows.stop)
        return np.repeat(np.arange(first, last + 1), np.diff(bounds))

    def _is_rounded_up(self, epochs: np.ndarray) -> np.ndarray:
        """bool (epochs, classes + 1): whether fraction + u >= 1 for the sum of the classes before each, and for all."""
        with np.errstate(over="ignore"):
            offsets = self._offset + epochs.astype(np.uint64) * np.uint64(_GOLDEN)
            return self._fractions + offsets[:, None] < offsets[:, None]


def _exact_places(sizes: np.ndarray, power: float) -> tuple[np.ndarray, np.ndarray]:
    """(wholes, fractions) of the sums of exact places: int64 (classes,), differences of their floors; uint64 (classes +
    1,), in 2**-64.
    """
    exponent, weights = decimal.Decimal(power), {}
    for size in np.unique(sizes).tolist():
        logarithm = _DECIMAL.multiply(_DECIMAL.ln(decimal.Decimal(size)), exponent)
        weights[size] = int(_DECIMAL.scaleb(_DECIMAL.exp(logarithm), 20))
    sums = [0, *accumulate(weights[size] for size in sizes.tolist())]
    num_samples = int(sizes.sum())
    floors, rests = zip(*(divmod(num_samples * upto, sums[-1]) for upto in sums), strict=True)
    return np.diff(np.array(floors, np.int64)), np.array([(rest << 64) // sums[-1] for rest in rests], np.uint64)


def _blocks(num_samples: int) -> Iterator[slice]:
    return (slice(first, min(first + _SAMPLES, num_samples)) for first in range(0, num_samples, _SAMPLES))


def _count(labels: np.ndarray | FirstLabels) -> tuple[np.ndarray, str]:
    """(number of samples without a label, and of each label, int64; checksum of the labels)."""
    sizes, digest = np.zeros(1, np.int64), xxhash.xxh3_128()
    for rows in _blocks(len(labels)):
        of_rows = labels[rows].astype("<i4")
        digest.update(of_rows.tobytes())
        counts = np.bincount(of_rows + 1, minlength=len(sizes))
        counts[: len(sizes)] += sizes
        sizes = counts
    return sizes, digest.hexdigest()


def _places_in_order(keys: np.ndarray) -> np.ndarray:
    """Places ordered by key, then by place, uint64. Overwrites the keys, which have as many free bits as a place."""
    bits = np.uint64(len(keys).bit_length())
    keys <<= bits
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return keys
