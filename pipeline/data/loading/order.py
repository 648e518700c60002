"""The order of samples in training: a pure function of (seed, epoch, position).

In each epoch the shards are permuted, concatenated and cut into a fixed number of equal *streams*, and each stream is
shuffled in windows. A round of `global_batch` positions takes `global_batch / streams` samples from every stream, one
stream after another. So

- the order does not depend on ranks: any world size that divides the batch reads contiguous slices of the same batches;
- a slice covers few streams, so a rank reads few shards at a time;
- every sample occurs exactly once per epoch; a batch across two epochs takes the rest of one, then the start of the
  next;
- resuming needs only the number of samples seen.

With a balance of classes (`balance.py`) an epoch has as many places, but uses some samples several times and others
not. Its first uses of the samples of a shard are then a block that is permuted like a shard, and so are its second
ones, and so on: the uses of a sample are spread over the epoch, and a shard is read once for each of its blocks.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.data.dataset.split import Split
from pipeline.data.loading.balance import ClassBalance, EpochContents, FirstLabels
from pipeline.settings.run import DataConfig


def order_of_split(split: Split, config: DataConfig, seed: int, global_batch: int) -> "SampleOrder":
    """The order in which a run reads one split."""
    balance = None  # Where no sample has a label, it would change nothing.
    if config.balance != 1 and split.max_labels:
        balance = ClassBalance(FirstLabels(split), split.shard_starts, config.balance, seed)
    return SampleOrder(split.shard_sizes, seed, global_batch, config.streams, config.window, balance)


class _Epoch(NamedTuple):
    """The blocks of an epoch, which are shards or parts of `contents`.

    starts: (blocks + 1,), where each begins. blocks: their numbers, in the epoch's order; ends: of each, in that order.
    """

    starts: np.ndarray
    blocks: np.ndarray
    ends: np.ndarray
    contents: EpochContents | None


class Order:
    """Maps positions 0, 1, 2, ... of training to rows. num_samples: of them; global_batch: samples per optimizer step.

    is_balanced: whether it uses some samples more often than others.
    """

    num_samples: int
    global_batch: int
    is_balanced: bool

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, epochs), int64 each, of the samples at these positions, counted from the start of training.

        epochs: how often each sample was used before, which is its epoch unless classes are balanced.
        """
        raise NotImplementedError

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epoch of each position, int64."""
        raise NotImplementedError

    def slice(self, step: int, rank: int = 0, world_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """`rows` of one rank's part of batch `step` (from 0): int64 (global_batch / world_size,) each."""
        assert self.global_batch % world_size == 0, (self.global_batch, world_size)
        share = self.global_batch // world_size
        first = step * self.global_batch + rank * share
        return self.rows(np.arange(first, first + share))


class SampleOrder(Order):
    """Maps positions 0, 1, 2, ... of training to rows of a split, over all epochs, of which each has as many as the
    split.

    shard_sizes: int64 (shards,), samples per shard; rows are numbered through the shards in this order.
    global_batch: samples per optimizer step; divisible by `streams`.
    window: number of consecutive samples of a stream that are shuffled together.
    balance: how often an epoch uses each sample; None is once.
    """

    def __init__(
        self,
        shard_sizes: np.ndarray,
        seed: int,
        global_batch: int,
        streams: int,
        window: int,
        balance: ClassBalance | None = None,
    ) -> None:
        self.shard_sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.shard_starts = np.concatenate([[0], np.cumsum(self.shard_sizes)])
        self.num_samples = int(self.shard_starts[-1])
        assert self.num_samples > 0
        self.seed, self.global_batch, self.window, self.balance = seed, global_batch, window, balance
        self.is_balanced = balance is not None
        self.bounds = np.arange(streams + 1, dtype=np.int64) * self.num_samples // streams
        self.per_round = global_batch // streams
        self.full_rounds = self.num_samples // global_batch
        leftovers = np.diff(self.bounds) - self.full_rounds * self.per_round
        self.leftover_starts = np.concatenate([[0], np.cumsum(leftovers)])
        self._kept: tuple[int, _Epoch] | None = None
        # A batch usually spans two windows per stream (more if it is larger than the windows).
        self._window_order = lru_cache(2 * len(self.bounds))(self._shuffle_window)

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        return np.asarray(positions, np.int64) // self.num_samples

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        rows, uses = np.empty_like(within), np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            rows[of_epoch], uses[of_epoch] = self._rows_of_epoch(epoch, within[of_epoch])
        return rows, uses

    def _rows_of_epoch(self, epoch: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`rows` of positions in an epoch."""
        # Full rounds interleave the streams; the rest of each stream follows, one stream after another.
        in_rounds = self.full_rounds * self.global_batch
        round_number, in_round = np.divmod(position, self.global_batch)
        tail = np.maximum(position - in_rounds, 0)
        tail_stream = np.searchsorted(self.leftover_starts, tail, side="right") - 1
        is_tail = position >= in_rounds
        stream = np.where(is_tail, tail_stream, in_round // self.per_round)
        in_tail = self.full_rounds * self.per_round + tail - self.leftover_starts[tail_stream]
        index = np.where(is_tail, in_tail, round_number * self.per_round + in_round % self.per_round)

        place = self._shuffled_in_windows(epoch, stream, index)
        starts, blocks, ends, contents = self._epoch(epoch)
        if contents:
            place = contents.unmerge(place)
        turn = np.searchsorted(ends, place, side="right")
        block = blocks[turn]
        place += starts[block + 1] - ends[turn]
        if not contents:
            return place, np.full_like(place, epoch)
        rows = contents.rows[place]
        return rows, contents.used(rows) + contents.copies[block]

    def _shuffled_in_windows(self, epoch: int, stream: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Places of these samples of streams, numbered through all streams, before each window was shuffled."""
        window, at = np.divmod(index, self.window)
        # Group samples by window; a batch of many streams spans thousands of windows, so the loop has few operations.
        code = stream * (self.num_samples + 1) + window
        by_code = np.argsort(code, kind="stable")
        code, sorted_at = code[by_code], at[by_code]
        starts = np.flatnonzero(code[1:] != code[:-1]) + 1
        ends = [*starts.tolist(), len(code)]
        first = by_code[np.concatenate([[0], starts])]
        start, moved = 0, np.empty_like(at)
        for s, w, end in zip(stream[first].tolist(), window[first].tolist(), ends, strict=True):
            moved[start:end] = self._window_order(epoch, s, w)[sorted_at[start:end]]
            start = end
        place = self.bounds[stream] + index - at
        place[by_code] += moved
        return place

    def _shuffle_window(self, epoch: int, stream: int, window: int) -> np.ndarray:
        """Places within a window, in shuffled order."""
        first = int(self.bounds[stream]) + window * self.window
        length = min(self.window, int(self.bounds[stream + 1]) - first)
        order = random_numbers.permutation(length, self.seed, Purpose.WINDOW_ORDER, epoch, stream, window)
        return order.astype(np.min_scalar_type(self.window))

    def _epoch(self, epoch: int) -> _Epoch:
        if self._kept is None or self._kept[0] != epoch:
            # The files of a balanced epoch are large: those of another one are removed before these are made.
            self._kept = None
            if self.balance:
                contents = self.balance.contents(epoch)
                laid_out = _Epoch(contents.starts, contents.blocks, contents.ends, contents)
            else:
                blocks = random_numbers.permutation(len(self.shard_sizes), self.seed, Purpose.SHARD_ORDER, epoch)
                laid_out = _Epoch(self.shard_starts, blocks, np.cumsum(self.shard_sizes[blocks]), None)
            self._kept = epoch, laid_out
        return self._kept[1]


def batch_of_step(step: int, skipped_batches: Sequence[tuple[int, int]]) -> int:
    """The number of the batch that optimizer step `step` (from 0) uses: its own number plus the batches skipped until
    then.

    skipped_batches: (step, number of batches skipped before it) for each rollback of the run.
    """
    return step + sum(batches for at, batches in skipped_batches if at <= step)


def batches_before(step: int, skipped_batches: Sequence[tuple[int, int]]) -> int:
    """Number of batches that were used or skipped before step `step` (from 0) uses its own. skipped_batches: as of
    `batch_of_step`.
    """
    return batch_of_step(step - 1, skipped_batches) + 1


def skip_batches(skipped_batches: Sequence[tuple[int, int]], at: int, done: int) -> list[tuple[int, int]]:
    """`skipped_batches` after a rollback from step `done` to step `at` that continues with the next unused batch."""
    before = [entry for entry in skipped_batches if entry[0] <= at]
    return [*before, (at, batch_of_step(done, skipped_batches) - batch_of_step(at, before))]
