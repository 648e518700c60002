"""Which sample stands at which position of training: a pure function of (seed, epoch, position).

An epoch is a permutation of its shards, concatenated and cut into a fixed number of equal *streams*, each shuffled in
windows. A round of `global_batch` positions takes `global_batch / streams` samples of every stream, stream by stream. So

- the order knows nothing of ranks: any world size that divides the batch gets contiguous slices of the same batches;
- a slice touches few streams, so a rank reads few shards at a time;
- every sample comes exactly once an epoch; a batch that straddles two epochs takes the rest of one, then the next;
- nothing but the number of samples seen is needed to resume.
"""

from collections import OrderedDict

import numpy as np

from pipeline.data import rng

# What a random number is for: keeps the shards' permutation apart from the windows'.
_SHARDS, _WINDOW = 1, 2


class SampleOrder:
    """Positions 0, 1, 2, ... of training -> rows of a split, over all epochs.

    shard_sizes: int64 (shards,), samples in each shard; rows count through the shards in this order.
    global_batch: samples of one optimizer step; divisible by `streams`.
    window: samples of a stream that are shuffled together.
    """

    def __init__(self, shard_sizes: np.ndarray, seed: int, global_batch: int, streams: int, window: int) -> None:
        assert global_batch % streams == 0, (global_batch, streams)
        self.shard_sizes = np.asarray(shard_sizes, dtype=np.int64)
        self.shard_starts = np.concatenate([[0], np.cumsum(self.shard_sizes)])
        self.num_samples = int(self.shard_starts[-1])
        assert self.num_samples > 0
        self.seed, self.global_batch, self.window = seed, global_batch, window
        self.bounds = np.arange(streams + 1, dtype=np.int64) * self.num_samples // streams
        self.per_round = global_batch // streams
        self.full_rounds = self.num_samples // global_batch
        leftovers = np.diff(self.bounds) - self.full_rounds * self.per_round
        self.leftover_starts = np.concatenate([[0], np.cumsum(leftovers)])
        self._epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()

    def slice(self, step: int, rank: int = 0, world_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows and epochs, int64 (global_batch / world_size,), of one rank's part of batch `step` (from 0)."""
        assert self.global_batch % world_size == 0, (self.global_batch, world_size)
        share = self.global_batch // world_size
        first = step * self.global_batch + rank * share
        return self.rows(np.arange(first, first + share))

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows and epochs, int64, of the samples at these positions (counted from the start of training)."""
        epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        rows = np.empty_like(within)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            rows[of_epoch] = self._rows_of_epoch(int(epoch), within[of_epoch])
        return rows, epochs

    def _rows_of_epoch(self, epoch: int, position: np.ndarray) -> np.ndarray:
        # Whole rounds interleave the streams; what is left of each stream follows, stream by stream.
        in_rounds = self.full_rounds * self.global_batch
        round_number, in_round = np.divmod(position, self.global_batch)
        tail = np.maximum(position - in_rounds, 0)
        tail_stream = np.searchsorted(self.leftover_starts, tail, side="right") - 1
        is_tail = position >= in_rounds
        stream = np.where(is_tail, tail_stream, in_round // self.per_round)
        in_tail = self.full_rounds * self.per_round + tail - self.leftover_starts[tail_stream]
        index = np.where(is_tail, in_tail, round_number * self.per_round + in_round % self.per_round)

        place = self._shuffled(epoch, stream, index)
        shards, ends = self._shards_of_epoch(epoch)
        turn = np.searchsorted(ends, place, side="right")
        shard = shards[turn]
        return self.shard_starts[shard] + place - (ends[turn] - self.shard_sizes[shard])

    def _shuffled(self, epoch: int, stream: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Place in the epoch's concatenated shards of the index-th sample of each stream, shuffled in windows."""
        window = index // self.window
        place = np.empty_like(index)
        for s, w in np.unique(np.stack([stream, window]), axis=1).T:
            chosen = (stream == s) & (window == w)
            first = int(self.bounds[s] + w * self.window)
            order = self._window_order(epoch, int(s), int(w), min(self.window, int(self.bounds[s + 1]) - first))
            place[chosen] = first + order[index[chosen] - w * self.window]
        return place

    def _window_order(self, epoch: int, stream: int, window: int, length: int) -> np.ndarray:
        key = (epoch, stream, window)
        if key not in self._windows:
            self._windows[key] = rng.permutation(length, self.seed, _WINDOW, epoch, stream, window)
            if len(self._windows) > 4 * len(self.bounds):
                self._windows.popitem(last=False)
        return self._windows[key]

    def _shards_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of shards, and where each ends in the concatenation."""
        if epoch not in self._epochs:
            shards = rng.permutation(len(self.shard_sizes), self.seed, _SHARDS, epoch)
            self._epochs[epoch] = shards, np.cumsum(self.shard_sizes[shards])
            if len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]
