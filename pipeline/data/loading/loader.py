"""Loads rows of a split as batches of views, decoded ahead of the consumer on threads, or in processes.

An unreadable sample keeps its place in the batch with `valid` False, so that it changes no other sample; it is counted,
and too many of them stop the run.

Threads suffice for photographs, because the decoders and resizers release the GIL and write directly into the batch.
But they share Python's lock with the thread that trains. For small images most of the work holds it, so that one
process decodes no faster with more threads, and on a GPU also launches its kernels late. Processes (`WorkerProcesses`)
cost a copy of the pixels.
"""

import contextlib
import math
import mmap
import os
import queue
import signal
import socket
import traceback
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import CrashError, Interrupted, OneRankCrashError, OneRankError, UserError
from pipeline.data.dataset.split import BadBudget, Split
from pipeline.data.loading.decode import DecodeError
from pipeline.data.loading.order import Order
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import ViewWriter
from pipeline.process.start import dying_with_parent
from pipeline.process.waits import waiting

# Memory that a process shares with the loader, unless the views of one sample need more. Only what is written takes
# memory.
_SHARED_BYTES = 32 * 2**20
# Far longer than the samples of one request take to decode.
_USUAL_SECONDS = 30.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Interval at which a wait for a batch checks for a stop request.
_STOP_CHECK_SECONDS = 0.2


@dataclass(frozen=True)
class Batch:
    """views: (V, B, H, W, C) of `Pixels.batch_type` for each group of V views. labels: int64 (B, M), -1 where a sample
    has fewer than M.

    M is 0 when no sample of the split has a label. valid: bool (B,), False for an unreadable image, whose views are all
    zeros.
    rows, epochs: int64 (B,), as of `Order.rows`. targets: float32 (B, T), the numbers to predict; NaN for a missing
    one, and for those of an unreadable image. drawn: what `Objective.draw` returns for this batch, (B, ...) by name.
    """

    views: tuple[Tensor, ...]
    labels: Tensor
    valid: Tensor
    rows: np.ndarray
    epochs: np.ndarray
    targets: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    drawn: dict[str, Tensor] = field(default_factory=dict)

    @property
    def images(self) -> Tensor:
        """View 0, (B, H, W, C); shares the memory of `views`."""
        return self.views[0][0]


# Returns random numbers of a batch by name, of its rows and epochs alone (`Objective.draw`).
Draw = Callable[[Batch], dict[str, Tensor]]
# A batch, and what fills it: each returns row -> why it cannot be read.
_Started = tuple[Batch, list[Future[dict[int, str]]]]


def empty_batch(views: tuple[Tensor, ...], rows: np.ndarray, epochs: np.ndarray, split: Split) -> Batch:
    """A batch whose samples are to be filled in."""
    labels = torch.full((len(rows), split.max_labels), -1, dtype=torch.int64)
    targets = torch.full((len(rows), split.num_targets), torch.nan)
    return Batch(views, labels, torch.zeros(len(rows), dtype=torch.bool), rows, epochs, targets)


def fill(reader: ShardReader, writer: ViewWriter, batch: Batch, part: range) -> dict[int, str]:
    """Decode some samples of a batch into their places. Returns row -> why it cannot be read; its views are zeros, and
    `valid`, `labels` and `targets` stay as they are.
    """
    bad = {}
    views = [view for group in batch.views for view in group.numpy()]
    all_labels, valid, targets = batch.labels.numpy(), batch.valid.numpy(), batch.targets.numpy()
    for i, row in zip(part, batch.rows[part.start : part.stop].tolist(), strict=True):
        outs = [view[i] for view in views]
        try:
            writer.write(reader.read(row), outs, int(batch.epochs[i]), row)
        except (OSError, DecodeError) as error:
            for out in outs:
                out[:] = 0
            bad[row] = str(error)
            continue
        labels = reader.split.labels_of(row)
        all_labels[i, : len(labels)] = labels
        targets[i] = reader.split.targets_of(row)
        valid[i] = True
    return bad


class Loader:
    """Loads batches of a split for any sequence of (rows, epochs). Use it as a context manager, or call `close`."""

    def __init__(
        self,
        split: Split,
        writer: ViewWriter,
        threads: int,
        prefetch: int = 2,
        max_bad_share: float = 1.0,
        pin: bool = False,
        is_stop_wanted: Callable[[], bool] = lambda: False,
        processes: int = 0,
    ) -> None:
        """writer: makes the views of each image.
        prefetch: number of batches that are decoded ahead. max_bad_share: as of `BadBudget`; 1 for those who count
        unreadable images themselves. pin: allocate views in pinned memory.
        is_stop_wanted: polled while waiting for a batch; when it returns True, the wait ends with Interrupted.
        processes: decode in so many processes instead of threads, of a split in local files (WorkerProcesses).
        """
        self.split, self.writer = split, writer
        self.is_stop_wanted = is_stop_wanted
        self.threads, self.prefetch, self.pin = processes or threads, prefetch, pin
        self.reader = ShardReader(split)
        self.processes = WorkerProcesses(processes, split, writer) if processes else None
        self.fill = self.processes.fill if self.processes else partial(fill, self.reader, writer)
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
        ahead: deque[_Started] = deque()
        for rows, epochs in self.reader.ahead(requests):
            ahead.append(self._start(rows, epochs, draw))
            if len(ahead) > self.prefetch:
                yield self._finish(*ahead.popleft())
        while ahead:
            yield self._finish(*ahead.popleft())

    def _start(self, rows: np.ndarray, epochs: np.ndarray, draw: Draw | None) -> _Started:
        C = self.writer.pixels.num_channels
        views = tuple(self._new_images(num, len(rows), height, width, C) for num, height, width in self.writer.shapes)
        batch = empty_batch(views, rows, epochs, self.split)
        # Two parts per thread over all batches in flight: fewer, larger parts measured 5 % faster.
        num_parts = -(-2 * self.threads // (self.prefetch + 1))
        if self.processes:
            num_parts = max(num_parts, -(-len(rows) // self.processes.most_at_once))
        ends = [len(rows) * n // num_parts for n in range(num_parts + 1)]
        parts = [range(first, last) for first, last in pairwise(ends) if first < last]
        drawing = [self.pool.submit(self._draw, batch, draw)] if draw else []
        return batch, drawing + [self.pool.submit(self.fill, batch, part) for part in parts]

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


class _Worker(NamedTuple):
    process: int
    connection: Connection
    shared: mmap.mmap


class WorkerProcesses:
    """Processes that call `fill`, for as many threads that each wait for one. Thread-safe.

    They are forked and use no GPU. They end with this process, however that happens.
    """

    def __init__(self, count: int, split: Split, writer: ViewWriter) -> None:
        """Raises UserError if the system refuses memory or another process."""
        self.writer, self.retry = writer, split.storage.retry
        values = writer.pixels.num_channels * sum(map(math.prod, writer.shapes))
        sample = values * np.dtype(writer.pixels.batch_type).itemsize
        size = max(_SHARED_BYTES, sample)
        self.most_at_once = size // sample  # The largest number of samples that `fill` takes.
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for number in range(count):
            try:
                worker = _fork(mmap.mmap(-1, size), split, writer)
            except OSError as error:
                self.close()
                raise UserError(
                    f"data.processes = {count}, and process {number + 1} cannot be started ({error.strerror}). Use"
                    " fewer, or raise the limits of processes, open files and memory (ulimit -u, -n, -v)."
                ) from None
            self._workers.append(worker)
            self._idle.put(worker)

    def fill(self, batch: Batch, part: range) -> dict[int, str]:
        """`fill` in a process; waits until one is idle.

        Raises UserError as that does, RuntimeError with the traceback of any other exception, and OneRankCrashError if
        the process dies.
        """
        worker = self._idle.get()
        try:
            of_part = slice(part.start, part.stop)
            worker.connection.send((batch.rows[of_part], batch.epochs[of_part]))
            if not worker.connection.poll(_USUAL_SECONDS):
                # It may retry a shard for as long as a thread may: this wait is announced.
                with waiting("a process that decodes images", self.retry.seconds, self.retry.setting):
                    worker.connection.poll(None)
            answer, retries = worker.connection.recv()
            self.retry.add(retries)
            if isinstance(answer, BaseException):
                raise answer
            bad, *found = answer
            for own, of_worker in zip((batch.labels, batch.valid, batch.targets), found, strict=True):
                own.numpy()[of_part] = of_worker
            for own, shared in zip(batch.views, _views(worker.shared, self.writer, len(part)), strict=True):
                own.numpy()[:, of_part] = shared
        except (OSError, EOFError):
            raise OneRankCrashError(
                f"{socket.gethostname()}: a process that decodes images (data.processes) was killed; if by the kernel,"
                " the host needs more memory."
            ) from None
        finally:
            self._idle.put(worker)
        return bad

    def close(self) -> None:
        """Kill them, also in the middle of their work."""
        for worker in self._workers:
            os.kill(worker.process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.process, 0)
        self._workers.clear()


def _fork(shared: mmap.mmap, split: Split, writer: ViewWriter) -> _Worker:
    ours, theirs = Pipe()
    dies_with_parent = dying_with_parent()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # Until the process ignores them.
    process = -1
    try:
        with warnings.catch_warnings():  # Python 3.12 warns of threads, none of which hold a lock that `fill` needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
    finally:
        if process:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if process:
        theirs.close()
        return _Worker(process, ours, shared)
    try:
        dies_with_parent()
        for number in _IGNORED:  # The rank decides when to stop; a launcher also signals its children.
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        torch.set_num_threads(1)  # OpenMP waits forever for its threads, which a fork does not copy.
        ours.close()
        _work(theirs, shared, split, writer)
    finally:
        os._exit(0)


def _work(connection: Connection, shared: mmap.mmap, split: Split, writer: ViewWriter) -> None:
    reader, retry = ShardReader(split), split.storage.retry
    with contextlib.suppress(EOFError, OSError):  # The rank has closed its end.
        while True:
            rows, epochs = connection.recv()
            count, before = len(rows), retry.retries
            views = tuple(map(torch.from_numpy, _views(shared, writer, count)))
            batch = empty_batch(views, rows, epochs, split)
            try:
                bad = fill(reader, writer, batch, range(count))
                answer: object = bad, batch.labels.numpy(), batch.valid.numpy(), batch.targets.numpy()
            except (UserError, CrashError) as error:
                answer = error
            except Exception:  # As text: a traceback cannot be pickled, nor can some exceptions.
                answer = RuntimeError(f"in a process that decodes images:\n{traceback.format_exc()}")
            connection.send((answer, retry.retries - before))


def _views(shared: mmap.mmap, writer: ViewWriter, samples: int) -> Iterator[np.ndarray]:
    """The groups of views of so many samples in the shared memory, one behind the other."""
    at = 0
    for count, height, width in writer.shapes:
        shape = (count, samples, height, width, writer.pixels.num_channels)
        group: np.ndarray = np.ndarray(shape, writer.pixels.batch_type, shared, at)
        yield group
        at += group.nbytes


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
