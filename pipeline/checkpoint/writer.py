"""The process that writes and commits checkpoints while training continues; one per rank.

It is detached from its rank (own session, reparented) and ignores all signals but SIGKILL, so a save in progress is
committed even when the ranks are stopped or killed. It exits when its rank has exited and no work is left.

A request is one line of JSON on standard input, the data is in memory shared with the rank, and the reply is one line
on standard output. Each writer writes its rank's file and reports progress in a status file beside it. Rank 0's writer
waits for all of them, assembles model.safetensors, and commits. No writer imports torch, which would take seconds at
each start.
"""

import contextlib
import errno
import hashlib
import json
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.base import json_record
from pipeline.base.errors import CrashError, UserError, is_outage, mistake_in_words
from pipeline.base.words import on_one_line
from pipeline.checkpoint.sharded_tensors import (
    BYTES,
    EMA,
    INDEX,
    WEIGHTS,
    CheckpointIndex,
    Ranges,
    ShardedTensors,
)
from pipeline.checkpoint.store import (
    BEAT_SECONDS,
    FORMAT,
    MODEL,
    Checkpoints,
    WriterStatus,
    WrittenPart,
    checksum,
    read_status,
    step_name,
    write_atomically,
    write_status,
)
from pipeline.data.storage.bucket import AnyPath, BucketPath, to_path
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.process import waits
from pipeline.process.committed import Checksum

# Timeout for another rank's writer without a heartbeat: it is lost, and probably its host.
GIVE_UP_SECONDS = 60.0
_CHUNK, _FLUSH = 2**20, 2**26


@dataclass(frozen=True)
class Commit:
    """What rank 0's writer also needs. state: for state.json. shapes: of parameters and buffers. metadata: for
    model.safetensors. keep: number of newest checkpoints to retain. damaged: names that do not count. always: never
    remove this one.
    """

    state: dict[str, Any]
    shapes: dict[str, list[int]]
    metadata: dict[str, str]
    keep: int
    damaged: list[str]
    always: bool


@dataclass(frozen=True)
class SaveJob:
    """One rank's part of one save. folder: of all checkpoints. ranges: (name, start, length) within each state, in
    order.

    constants: ranges of tensors without states, which follow.
    retry: seconds for which object store requests are retried. commit: rank 0 only.
    """

    folder: str
    retry: float
    step: int
    token: str
    rank: int
    world_size: int
    states: list[str]
    ranges: Ranges
    commit: Commit | None
    constants: Ranges = field(default_factory=list)

    @property
    def bytes(self) -> int:
        of_states, of_constants = (sum(length for _, _, length in ranges) for ranges in (self.ranges, self.constants))
        return BYTES * (len(self.states) * of_states + of_constants)


@dataclass(frozen=True)
class Best:
    """Request to retain the checkpoint of a step while it is the best by a metric."""

    folder: str
    retry: float
    step: int
    metric: str
    value: float
    lower_is_better: bool


@dataclass(frozen=True)
class Request:
    """A request to the writer, one line of JSON: job or best. again: a previous writer died during it."""

    job: SaveJob | None = None
    best: Best | None = None
    again: bool = False


@dataclass(frozen=True)
class Reply:
    """The reply to a request. error: one line, or None. crash: not a user's mistake. seconds: time the work took."""

    error: str | None
    crash: bool
    seconds: float


def save(job: SaveJob, memory: int, give_up: float = GIVE_UP_SECONDS, again: bool = False) -> None:
    """Write this rank's part from `memory` (a file descriptor); on rank 0 also commit. Raises UserError, or CrashError
    if another rank's writer is lost or the disk failed.

    give_up: timeout in seconds for another rank's writer without a heartbeat. again: see `Request`.
    """
    checkpoints = Checkpoints(to_path(job.folder, Retry(job.retry, "data.retry_minutes")))
    path: AnyPath | None = None
    committed = False
    try:
        if again and (final := checkpoints.committed_by(job.step, job.token)) is not None:
            if job.commit is not None:  # The previous writer died after the commit.
                checkpoints.point_at(final)
                _retain(checkpoints, final, job.commit)
            return
        path = checkpoints.begin(job.step, job.token)
        if again and job.commit is None and read_status(path, job.rank, job.token).part is not None:
            return  # Rank 0's writer may be reading it.
        with _beating(path, job):
            part = _write_part(path, job, memory)
            if job.commit is not None:
                checksums = _write_rest(path, job, job.commit, _await_parts(path, job, part, give_up))
        if job.commit is not None:
            final = checkpoints.commit(path, checksums)
            committed = True
            _retain(checkpoints, final, job.commit)
        else:
            write_status(path, job.rank, job.token, WriterStatus(part=part))
    except (OSError, UserError, CrashError) as error:
        line = _one_line(error, checkpoints.folder)
        crash = isinstance(error, CrashError) or is_outage(error)
        if path is not None:
            with contextlib.suppress(OSError, StorageError):
                if job.commit is None:
                    write_status(path, job.rank, job.token, WriterStatus(error=line, crash=crash))
                elif not committed:
                    checkpoints.discard(path)
        raise (CrashError if crash else UserError)(line) from error


def _write_part(path: AnyPath, job: SaveJob, memory: int) -> WrittenPart:
    """Write the rank's file."""
    name, digest = f"rank-{job.rank:04d}.{job.token}.bin", xxhash.xxh3_128()
    with contextlib.ExitStack() as stack:
        data = memoryview(b"")
        if job.bytes:
            shared = stack.enter_context(mmap.mmap(memory, job.bytes, prot=mmap.PROT_READ))
            data = stack.enter_context(memoryview(shared))
        write = None if isinstance(path, BucketPath) else stack.enter_context(_flushed(path / name))
        for begin in range(0, job.bytes, _CHUNK):
            with data[begin : begin + _CHUNK] as chunk:
                if not np.isfinite(np.frombuffer(chunk, np.float32)).all():
                    raise UserError(
                        f"weights or moments of step {job.step:,} are non-finite (NaN or Inf) on rank {job.rank}."
                    )
                digest.update(chunk)
                if write is not None:
                    write(chunk)
    if isinstance(path, BucketPath):
        (path / name).upload(f"/proc/self/fd/{memory}")
    return WrittenPart(name, job.ranges, Checksum(job.bytes, xxh128=digest.hexdigest()), job.constants)


@contextlib.contextmanager
def _flushed(path: Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yields what appends bytes to a new local file, which is on the disk when the block ends: it is flushed while more
    is written, in another thread.
    """
    with ThreadPoolExecutor(1) as thread, open(path, "wb") as file:
        flush: Future[Any] = thread.submit(int)
        unflushed = 0

        def write(data: bytes | memoryview) -> None:
            nonlocal flush, unflushed
            file.write(data)
            unflushed += len(data)
            if unflushed > _FLUSH and flush.done():
                flush.result()  # The system reports an error to one call only.
                flush, unflushed = thread.submit(os.fdatasync, file.fileno()), 0

        yield write
        flush.result()
        file.flush()
        os.fsync(file.fileno())


def _await_parts(path: AnyPath, job: SaveJob, own: WrittenPart, give_up: float) -> list[WrittenPart]:
    """Wait for every rank's part. Raises UserError if one failed, CrashError after `give_up` seconds of silence.

    Silence is what passes between looks: an outage, in which a look lasts longer, does not count.
    """
    parts = {job.rank: own}
    heard = dict[int, WriterStatus]()
    silent = dict[int, float]()
    pause = 0.01
    while missing := set(range(job.world_size)) - parts.keys():
        for rank in missing:
            status = read_status(path, rank, job.token)
            if status.error is not None:
                raise (CrashError if status.crash else UserError)(f"rank {rank}: {status.error}")
            if status.part is not None:
                parts[rank] = status.part
            silent[rank] = silent.get(rank, 0.0) + pause if status == heard.get(rank) else 0.0
            heard[rank] = status
            if silent[rank] > give_up:
                raise CrashError(
                    f"rank {rank}'s part of the checkpoint of step {job.step:,} does not come: its writer has said "
                    f"nothing for {give_up:.0f} s."
                )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return [parts[rank] for rank in range(job.world_size)]


def _write_rest(path: AnyPath, job: SaveJob, commit: Commit, parts: list[WrittenPart]) -> dict[str, Checksum]:
    """Write index.json, state.json and model.safetensors; returns the checksums of all files."""
    constants = {part.file: part.constants for part in parts if part.constants}
    index = CheckpointIndex(commit.shapes, job.states, {part.file: part.ranges for part in parts}, constants)
    write_atomically(path / INDEX, json.dumps(index.to_dict()))
    write_atomically(path / "state.json", json.dumps({"format": FORMAT, **commit.state}, indent=1))
    checksums = {part.file: part.checksum for part in parts}
    checksums[MODEL] = _write_model(path / MODEL, ShardedTensors(path, index), commit)
    checksums |= {name: checksum(path / name) for name in (INDEX, "state.json")}
    return checksums


def _retain(checkpoints: Checkpoints, final: AnyPath, commit: Commit) -> None:
    if commit.always:
        checkpoints.keep_always(final.name)
    checkpoints.prune(final, commit.keep, set(commit.damaged) - {final.name})


def _write_model(file: AnyPath, sharded: ShardedTensors, commit: Commit) -> Checksum:
    """Write model.safetensors from the parts; returns its checksum.

    By hand, because the library sorts the tensors by name, which would change the files' bytes, cannot write to an
    object store, and needs all weights in memory; this writes tensor by tensor, and another thread hashes what is
    being written. Format: header length, header in JSON, data.
    """
    header: dict[str, Any] = {"__metadata__": commit.metadata}
    at = 0
    for name, shape in sharded.model_shapes().items():
        end = at + BYTES * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # Aligns the data.
    tensors = sharded.model_tensors(EMA if EMA in sharded.states else WEIGHTS)
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1))
        if isinstance(file, BucketPath):
            write: Callable[[bytes], object] = stack.enter_context(file.replacing()).write
        else:
            write = stack.enter_context(_flushed(file))
        hashing = thread.submit(digest.update, b"")
        for part in chain([len(text).to_bytes(8, "little"), text], (array.tobytes() for _, array in tensors)):
            hashing.result()  # Of the tensor before: no more than two are in memory.
            hashing = thread.submit(digest.update, part)
            write(part)
        hashing.result()
    return Checksum(8 + len(text) + at, digest.hexdigest())


@contextlib.contextmanager
def _beating(path: AnyPath, job: SaveJob) -> Iterator[None]:
    """Write heartbeats to the status file from a thread."""
    over = threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(BEAT_SECONDS):
            count += 1
            # Writing the part fails for the same reason and reports it.
            with contextlib.suppress(OSError, StorageError):
                write_status(path, job.rank, job.token, WriterStatus(beat=count))

    write_status(path, job.rank, job.token, WriterStatus(beat=0))
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _one_line(error: Exception, folder: AnyPath) -> str:
    if not isinstance(error, OSError):
        return on_one_line(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{folder}: no space left. Free some, or lower checkpoint.keep."
    error.filename, error.filename2 = str(folder), None  # It names a hidden file, or none.
    return mistake_in_words(error) or f"{folder}: {type(error).__name__}: {on_one_line(error)}."


def answer(line: str, memory: int) -> Reply:
    """Execute one request; returns the reply."""
    begin = time.perf_counter()
    error, crash = None, False
    try:
        request = json_record.parse(line, Request, "a request to the checkpoint writer")
        if best := request.best:
            checkpoints = Checkpoints(to_path(best.folder, Retry(best.retry, "data.retry_minutes")))
            checkpoints.keep_if_best(step_name(best.step), best.metric, best.value, best.lower_is_better)
        if request.job is not None:
            save(request.job, memory, again=request.again)
    except (UserError, CrashError) as failed:
        error, crash = str(failed), isinstance(failed, CrashError)
    except Exception as failed:  # Report everything: the rank waits for a reply.
        error, crash = f"the checkpoint writer failed: {type(failed).__name__}: {on_one_line(failed)}.", True
    return Reply(error, crash, time.perf_counter() - begin)


def main() -> None:
    """Serve one rank's requests until it exits. sys.argv[1]: file descriptor of the shared memory."""
    memory = int(sys.argv[1])
    waits.say_with(lambda line: None)  # The rank says that it waits; the last line here is why this process died.
    os.nice(10)  # Training has priority.
    for line in sys.stdin:
        reply = answer(line, memory)
        with contextlib.suppress(BrokenPipeError):  # Its rank has exited.
            print(json.dumps(asdict(reply)), flush=True)
