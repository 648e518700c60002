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
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted
from pipeline.data.dataset.split import Split

_ORDER, _ROUNDING = Purpose.named("order within a class"), Purpose.named("rounding of classes")
# 2**64 / golden ratio: multiples of it, modulo 2**64, are spread evenly.
_GOLDEN = 0x9E3779B97F4A7C15
# decimal rounds exp and log correctly. The last bit of numpy's power, and so orders, differ between processors.
_DECIMAL = decimal.Context(prec=40)
# Numbers compared at a time.
_BLOCK = 2**22


@dataclass(frozen=True)
class EpochContents:
    """The uses of samples in an epoch, in blocks: all first uses of the samples of a shard, all second ones, and so on.

    rows: int32 or int64 (N,), rows of the split, all first uses before all others. starts: int64 (blocks + 1,), where
    each block begins in `rows`. copies: int64 (blocks,), number of a block's uses in this epoch, from 0. used: int32
    (N,), how often each sample was used before.
    """

    rows: np.ndarray
    starts: np.ndarray
    copies: np.ndarray
    used: np.ndarray

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
    """Which samples each epoch uses and how often; a pure function of (seed, epoch)."""

    def __init__(self, labels: np.ndarray, shard_starts: np.ndarray, power: float, seed: int) -> None:
        """labels: (N,), the first label of each sample, -1 without any. shard_starts: int64 (shards + 1,). power: 0 to
        1.
        """
        self.shard_starts = shard_starts
        sizes = np.bincount(labels + 1)
        self.classes = np.flatnonzero(sizes) - 1
        self.sizes = sizes[self.classes + 1]
        self.wholes, self._fractions = _exact_places(self.sizes, power)
        self._offset = random_numbers.bits(seed, _ROUNDING)
        self._by_class = _sorted_by(labels + 1, random_numbers.bits(seed, _ORDER, np.arange(len(labels))))

    @property
    def num_samples(self) -> int:
        return len(self._by_class)

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
        """The uses of an epoch. Takes memory and time in proportion to the number of samples."""
        dtype = self._by_class.dtype
        done, first = np.divmod(self.places_before(epoch), self.sizes)
        often, more = np.divmod(self.places(epoch), self.sizes)

        def of_samples(of_classes: np.ndarray) -> np.ndarray:
            return np.repeat(of_classes.astype(dtype), self.sizes)

        place = np.arange(self.num_samples, dtype=dtype) - of_samples(np.cumsum(self.sizes) - self.sizes)
        turn = place - of_samples(first)
        is_over = turn < 0
        turn += is_over * of_samples(self.sizes)
        uses = of_samples(often) + (turn < of_samples(more))
        used = np.empty(self.num_samples, np.int32)
        used[self._by_class] = of_samples(done) + is_over
        del place, turn, is_over

        # By number of the use, then by row. Both are packed into one integer, because values sort faster than indices.
        bits, unsigned = np.uint64(self.num_samples.bit_length()), np.dtype(f"u{dtype.itemsize}")
        packed = np.arange(self.num_samples, dtype=np.uint64)
        packed -= np.repeat((np.cumsum(uses, dtype=dtype) - uses).view(unsigned), uses)
        packed <<= bits
        packed |= np.repeat(self._by_class.view(unsigned), uses)
        del uses
        packed.sort()
        rows = (packed & ((np.uint64(1) << bits) - np.uint64(1))).astype(dtype)
        packed >>= bits
        shard_of = np.repeat(np.arange(len(self.shard_starts) - 1, dtype=np.int32), np.diff(self.shard_starts))
        shard = shard_of[rows]
        starts = np.flatnonzero(np.append(True, (shard[1:] != shard[:-1]) | (packed[1:] != packed[:-1])))
        return EpochContents(rows, np.append(starts, self.num_samples), packed[starts].astype(np.int64), used)

    def _is_rounded_up(self, epochs: np.ndarray) -> np.ndarray:
        """bool (epochs, classes + 1): whether fraction + u >= 1 for the sum of the classes before each, and for all."""
        with np.errstate(over="ignore"):
            offsets = self._offset + epochs.astype(np.uint64) * np.uint64(_GOLDEN)
            return self._fractions + offsets[:, None] < offsets[:, None]


def balance_of(split: Split, power: float, seed: int) -> ClassBalance | None:
    """The balance of a split; None if power is 1 or no sample has a label: it would change nothing."""
    if power == 1 or not split.max_labels:
        return None
    return ClassBalance(first_labels(split), split.shard_starts, power, seed)


def describe_balance(split: Split, names: list[str], power: float) -> str:
    """How often an epoch uses samples of the rarest and of the most common class; "" if power is 1. names: of all
    labels.
    """
    if power == 1:
        return ""
    sizes = np.bincount(first_labels(split) + 1)
    present = np.flatnonzero(sizes)
    sizes = sizes[present]
    wholes, fractions = _exact_places(sizes, power)
    uses = (wholes + np.diff(fractions.astype(float)) / 2**64) / sizes

    def of_class(at: int) -> str:
        name = repr(names[present[at] - 1]) if present[at] else "no label"
        return f"{uses[at]:.3g} times ({name}, {counted(int(sizes[at]), 'sample')})"

    return (
        f"data.balance = {power:g}: on average, an epoch uses each sample of the rarest class"
        f" {of_class(int(np.argmin(sizes)))}, of the most common one {of_class(int(np.argmax(sizes)))}"
    )


def first_labels(split: Split) -> np.ndarray:
    """int32 (n,), the first label of each sample, -1 without any. Copies nothing if each sample has one label."""
    values, offsets = split.label_values, split.label_offsets
    if split.max_labels == 1 and len(values) == len(split):
        return values
    first = np.full(len(split), -1, np.int32)
    has_any = np.diff(offsets) > 0
    first[has_any] = values[offsets[:-1][has_any]]
    return first


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


def _sorted_by(groups: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Places ordered by group, then by hash: int32 or int64. Overwrites hashes, of which it uses the bits that group
    and place leave of 64.
    """
    num_bits = np.uint64(len(groups).bit_length())
    free = np.uint64(64 - int(groups.max()).bit_length())
    hashes >>= np.uint64(64) - free + num_bits
    hashes <<= num_bits
    packed = groups.astype(np.uint64)
    packed <<= free
    packed |= hashes
    packed |= np.arange(len(groups), dtype=np.uint64)
    packed.sort()
    packed &= (np.uint64(1) << num_bits) - np.uint64(1)
    return packed.astype(np.int32 if len(groups) < 2**31 else np.int64)
