"""Runs `fill`, which decodes the samples of a batch, on a thread or in one of several processes.

Threads share Python's lock with the thread that trains. For small images most of the work holds it, so that one process
decodes no faster with more threads, and on a GPU also launches its kernels late. Processes cost a copy of the pixels.
"""

import contextlib
import mmap
import os
import queue
import signal
import socket
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.base.errors import CrashError, OneRankCrashError, UserError
from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.decode import DecodeError
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


def empty_batch(
    views: tuple[Tensor, ...], rows: np.ndarray, epochs: np.ndarray, max_labels: int, num_targets: int
) -> Batch:
    """A batch whose samples are to be filled in."""
    labels = torch.full((len(rows), max_labels), -1, dtype=torch.int64)
    targets = torch.full((len(rows), num_targets), torch.nan)
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


@dataclass(frozen=True)
class _Worker:
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
        sample = _bytes_per_sample(writer)
        size = max(_SHARED_BYTES, sample)
        self.most_at_once = size // sample  # The largest number of samples that `fill` takes.
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for number in range(count):
            try:
                worker = _start(mmap.mmap(-1, size), split, writer)
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
            sizes = batch.labels.shape[1], batch.targets.shape[1]
            worker.connection.send((batch.rows[of_part], batch.epochs[of_part], *sizes))
            answer, retries = self._answer(worker)
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

    def _answer(self, worker: _Worker) -> Any:
        """Returns the process's answer. It may retry a shard for as long as a thread may: this wait is announced."""
        if not worker.connection.poll(_USUAL_SECONDS):
            with waiting("a process that decodes images", self.retry.seconds, self.retry.setting):
                return worker.connection.recv()
        return worker.connection.recv()

    def close(self) -> None:
        """Kill them, also in the middle of their work."""
        for worker in self._workers:
            os.kill(worker.process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.process, 0)
        self._workers.clear()


def _start(shared: mmap.mmap, split: Split, writer: ViewWriter) -> _Worker:
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
            rows, epochs, max_labels, num_targets = connection.recv()
            count, before = len(rows), retry.retries
            views = tuple(map(torch.from_numpy, _views(shared, writer, count)))
            batch = empty_batch(views, rows, epochs, max_labels, num_targets)
            try:
                bad = fill(reader, writer, batch, range(count))
                answer: object = bad, batch.labels.numpy(), batch.valid.numpy(), batch.targets.numpy()
            except (UserError, CrashError) as error:
                answer = error
            except Exception:  # As text: a traceback cannot be pickled, nor can some exceptions.
                answer = RuntimeError(f"in a process that decodes images:\n{traceback.format_exc()}")
            connection.send((answer, retry.retries - before))


def _bytes_per_sample(writer: ViewWriter) -> int:
    pixels = writer.pixels
    size = pixels.num_channels * np.dtype(pixels.batch_type).itemsize
    return sum(count * height * width * size for count, height, width in writer.shapes)


def _views(shared: mmap.mmap, writer: ViewWriter, samples: int) -> Iterator[np.ndarray]:
    """The groups of views of so many samples in the shared memory, one behind the other."""
    at = 0
    for count, height, width in writer.shapes:
        shape = (count, samples, height, width, writer.pixels.num_channels)
        group: np.ndarray = np.ndarray(shape, writer.pixels.batch_type, shared, at)
        yield group
        at += group.nbytes
