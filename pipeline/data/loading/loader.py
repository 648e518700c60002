"""Loads rows of a split as batches of views, decoded on threads ahead of the consumer.

Threads suffice for photographs, because the decoders and resizers release the GIL and write directly into the batch;
for small images see `workers.py`. An unreadable sample keeps its place in the batch with `valid` False, so that it
changes no other sample; it is counted, and too many of them stop the run.
"""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import Interrupted, OneRankError
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.order import Order
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import ViewWriter
from pipeline.data.loading.workers import Batch, WorkerProcesses, empty_batch, fill

__all__ = ["Batch", "Draw", "Loader", "eval_requests", "images_to_device", "normalise", "to_device", "train_requests"]

# Returns random numbers of a batch by name, of its rows and epochs alone (`Objective.draw`).
Draw = Callable[[Batch], dict[str, Tensor]]
# Interval at which a wait for a batch checks for a stop request.
_STOP_CHECK_SECONDS = 0.2


class Loader:
    """Loads batches of a split for any sequence of (rows, epochs). Use it as a context manager, or call `close`."""

    def __init__(
        self,
        split: Split,
        writer: ViewWriter,
        threads: int,
        prefetch: int,
        max_bad_share: float,
        pin: bool = False,
        is_stop_wanted: Callable[[], bool] = lambda: False,
        processes: int = 0,
    ) -> None:
        """writer: makes the views of each image.
        prefetch: number of batches that are decoded ahead. pin: allocate views in pinned memory.
        is_stop_wanted: polled while waiting for a batch; when it returns True, the wait ends with Interrupted.
        processes: decode in so many processes instead of threads, of a split in local files (WorkerProcesses).
        """
        self.split, self.writer = split, writer
        self.is_stop_wanted = is_stop_wanted
        self.threads, self.prefetch, self.pin = processes or threads, prefetch, pin
        self.reader = ShardReader(split)
        self.processes = WorkerProcesses(processes, split, writer) if processes else None
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self.budget = BadBudget(max_bad_share)
        self.max_bad = min(self.budget.allowed(len(part)) for part in split.parts)
        # Row -> why it cannot be read, of the batches yielded so far. Only the consumer's thread changes it.
        self.bad: dict[int, str] = {}
        # Shape -> unused arrays.
        self._free: defaultdict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        if kind is KeyboardInterrupt:  # Otherwise Ctrl-C waited for retries, for data.retry_minutes at worst.
            self.split.storage.retry.give_up()
        self.close()

    def close(self) -> None:
        # When the run is being stopped, do not wait for a hanging read.
        self.pool.shutdown(wait=not self.is_stop_wanted(), cancel_futures=True)
        if self.processes:
            self.processes.close()
        self.reader.close()

    def batches(self, requests: Iterable[tuple[np.ndarray, np.ndarray]], draw: Draw | None = None) -> Iterator[Batch]:
        """Yield one Batch per (rows, epochs), in order; `prefetch` batches are decoded ahead.

        draw: fills `drawn` of each, on the threads that decode.

        Raises OneRankError when more distinct samples are unreadable than max_bad_share of the split, or of its set,
        allows, and Interrupted when a stop is requested before the next batch is ready.
        """
        ahead: deque[tuple[Batch, list[Future[dict[int, str]]]]] = deque()
        for rows, epochs in self.reader.ahead(requests):
            ahead.append(self._start(rows, epochs, draw))
            if len(ahead) > self.prefetch:
                yield self._finish(*ahead.popleft())
        while ahead:
            yield self._finish(*ahead.popleft())

    def _start(
        self, rows: np.ndarray, epochs: np.ndarray, draw: Draw | None
    ) -> tuple[Batch, list[Future[dict[int, str]]]]:
        C = self.writer.pixels.num_channels
        views = tuple(self._new_images(num, len(rows), height, width, C) for num, height, width in self.writer.shapes)
        batch = empty_batch(views, rows, epochs, self.split.max_labels, self.split.num_targets)
        # Two parts per thread over all batches in flight: fewer, larger parts measured 5 % faster.
        num_parts = -(-2 * self.threads // (self.prefetch + 1))
        if self.processes:
            num_parts = max(num_parts, -(-len(rows) // self.processes.most_at_once))
        ends = [len(rows) * n // num_parts for n in range(num_parts + 1)]
        parts = [range(first, last) for first, last in pairwise(ends) if first < last]
        drawing = [self.pool.submit(self._draw, batch, draw)] if draw else []
        return batch, drawing + [self.pool.submit(self._fill, batch, part) for part in parts]

    def _new_images(self, *shape: int) -> Tensor:
        """Returns images of this shape in memory of an earlier batch that is no longer referenced, if there is any.

        New memory costs a page fault per 4 KiB, up to a tenth of the decoding time. (Torch caches pinned memory
        itself.)
        """
        kind = self.writer.pixels.batch_type
        if self.pin:
            return torch.empty(shape, dtype=getattr(torch, kind), pin_memory=True)
        free = self._free[shape]
        memory = free.pop() if free else np.empty(shape, kind)
        # The tensor and everything that shares its storage reference this view: it is finalized with the last of them.
        view = memory[:]
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.from_numpy(view)

    def _draw(self, batch: Batch, draw: Draw) -> dict[int, str]:
        for name, values in draw(batch).items():
            batch.drawn[name] = values.pin_memory() if self.pin else values
        return {}

    def _fill(self, batch: Batch, part: range) -> dict[int, str]:
        """Decode some of its samples into their places of a batch. Returns row -> why it cannot be read."""
        if self.processes:
            return self.processes.fill(batch, part)
        return fill(self.reader, self.writer, batch, part)

    def _finish(self, batch: Batch, parts: list[Future[dict[int, str]]]) -> Batch:
        for part in parts:
            while not part.done():
                if self.is_stop_wanted():
                    raise Interrupted
                wait([part], _STOP_CHECK_SECONDS)
            for row, reason in part.result().items():
                self.bad.setdefault(row, reason)
        if len(self.bad) > self.max_bad and (text := self.budget.excess_of_any_set(self.bad, self.split)):
            raise OneRankError(text)
        return batch


def train_requests(
    order: Order, first_step: int, last_step: int, micro_batch: int, rank: int, world_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows, epochs) of each micro-batch of one rank, from batch `first_step` to the one before `last_step`."""
    for step in range(first_step, last_step):
        rows, epochs = order.slice(step, rank, world_size)
        for start in range(0, len(rows), micro_batch):
            yield rows[start : start + micro_batch], epochs[start : start + micro_batch]


def eval_requests(num_samples: int, batch: int, rank: int, world_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows, zeros) for one rank's share of a split; the number of batches is the same on all ranks.

    A rank whose share is shorter repeats the last row; the caller removes the duplicates by row number.
    """
    share = -(-num_samples // world_size)
    for first in range(0, share, batch):
        places = rank * share + np.arange(first, min(first + batch, share))
        yield np.minimum(places, num_samples - 1), np.zeros_like(places)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from host memory to the device, without waiting for the work queued there."""
    if device.type != "cuda":
        return values.to(device)
    # Only a copy from pinned memory is asynchronous; the allocator keeps the memory until the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


def images_to_device(images: Tensor, device: torch.device) -> Tensor:
    """Copy images of a batch to the device, without waiting for the work queued there if their memory is pinned.

    On a GPU in a stream of their own: the copy runs beside the work that is queued, and what is queued later waits for
    it.
    """
    if device.type != "cuda" or images.device.type == "cuda":
        return images.to(device)
    copies, computes = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        moved = images.to(device, non_blocking=True)
    computes.wait_stream(copies)
    moved.record_stream(computes)  # Otherwise a later copy could get its memory while it is still read.
    return moved


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def normalise(images: Tensor, device: torch.device, dtype: torch.dtype, pixels: Pixels) -> Tensor:
    """Images (B, H, W, C) of a batch, on the host or the device -> `dtype` (B, C, H, W) as a model reads them, on the
    device.

    Computed in float32. 8-bit RGB becomes value / 127.5 - 1.
    """
    values = images_to_device(images, device).permute(0, 3, 1, 2)

    def per_channel(numbers: tuple[float, ...]) -> Tensor | float:
        return numbers[0] if len({*numbers}) == 1 else to_device(torch.tensor(numbers), device).view(-1, 1, 1)

    if pixels.is_clipped:
        low, high = map(per_channel, pixels.batch_range())
        values = values.to(torch.float32).clamp(min=low).clamp(max=high)
    divisor, offset = map(per_channel, pixels.divisor_and_offset())
    return (values / divisor).sub_(offset).to(dtype)
