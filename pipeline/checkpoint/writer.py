"""The process that writes and commits checkpoints while its rank trains on; one beside each rank.

It is nobody's child and has a session of its own, and takes no signal but SIGKILL: what stops or kills the ranks does not
reach it, and the save that it was given is committed all the same. It ends when its rank does and no work is left.

A job is one line of JSON on standard input, the data lies in memory that it shares with its rank, and the answer is one line
on standard output. Each writer writes its rank's file, and says in a status file beside it how far it is. Rank 0's waits for
those of all, puts model.safetensors together, and commits. Neither imports torch, which would take seconds at each start.
"""

import contextlib
import hashlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from pipeline import json_record
from pipeline.checkpoint.sharded_tensors import BYTES, EMA, INDEX, WEIGHTS, Index, ShardedTensors
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
    write_status,
    write_whole,
)
from pipeline.committed import Checksum
from pipeline.data.storage.bucket import AnyPath, BucketPath, to_path
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.errors import UserError

# A writer that says nothing for so long is gone, with its host: its rank's part will not come.
GIVE_UP_SECONDS = 60.0
_CHUNK = 2**23
_FULL = "no space left: free some, or lower checkpoint.keep; the same command goes on from the last checkpoint"


class WriterError(Exception):
    """A save that failed for a reason that one line says."""


class LostWriterError(WriterError):
    """A save that failed because another rank's writer is gone: a crash, no mistake of the user."""


@dataclass(frozen=True)
class Retention:
    """keep: how many of the newest stay. damaged: names of older ones that do not count. always: this one stays."""

    keep: int
    damaged: list[str]
    always: bool


@dataclass(frozen=True)
class Commit:
    """What rank 0's writer needs beyond its part. state: of state.json. metadata: of model.safetensors. shapes: by name."""

    state: dict[str, Any]
    shapes: dict[str, list[int]]
    metadata: dict[str, str]
    retention: Retention


@dataclass(frozen=True)
class Job:
    """One rank's part of one save. folder: of all checkpoints. ranges: (name, start, length) of each state, in order.

    patience: seconds that requests to a bucket are tried again. commit: on rank 0. again: another writer was killed at it.
    """

    folder: str
    retry: float
    step: int
    token: str
    rank: int
    world_size: int
    states: list[str]
    ranges: list[tuple[str, int, int]]
    commit: Commit | None
    again: bool = False

    @property
    def bytes(self) -> int:
        return BYTES * len(self.states) * sum(length for _, _, length in self.ranges)


@dataclass(frozen=True)
class Best:
    """The value of a metric at a step whose checkpoint stays while no other is better."""

    folder: str
    retry: float
    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Request:
    """What a writer is asked for, as a line of JSON: one of the two."""

    job: Job | None = None
    best: Best | None = None


@dataclass(frozen=True)
class Reply:
    """The answer to a request. error: one line, or None. crash: it is no mistake of the user. seconds: of work."""

    error: str | None
    crash: bool
    seconds: float


def save(job: Job, memory: int) -> None:
    """Write this rank's part from `memory` (a file descriptor); on rank 0 also commit. Raises WriterError."""
    checkpoints = Checkpoints(to_path(job.folder, Retry(job.retry, "data.retry_minutes")))
    path: AnyPath | None = None
    committed = False
    try:
        if job.again and (final := checkpoints.committed_by(job.step, job.token)) is not None:
            if job.commit is not None:  # The writer was killed in between.
                checkpoints.point_at(final)
                _retain(checkpoints, final, job.commit.retention)
            return
        path = checkpoints.begin(job.step, job.token)
        if job.again and job.commit is None and read_status(path, job.rank, job.token).part is not None:
            return  # Rank 0's writer may be reading it.
        with _beating(path, job):
            part = _write_part(path, job, memory)
            if job.commit is not None:
                checksums = _write_rest(path, job, job.commit, _await_parts(path, job, part))
        if job.commit is not None:
            final = checkpoints.commit(path, checksums)
            committed = True
            _retain(checkpoints, final, job.commit.retention)
        else:
            write_status(path, job.rank, job.token, WriterStatus(part=part))
    except (OSError, StorageError, WriterError) as error:
        line = _one_line(error, checkpoints.folder)
        if path is not None:
            with contextlib.suppress(OSError, StorageError):
                if job.commit is None:
                    write_status(path, job.rank, job.token, WriterStatus(error=line))
                elif not committed:
                    checkpoints.discard(path)
        raise (LostWriterError if isinstance(error, LostWriterError) else WriterError)(line) from error


def _write_part(path: AnyPath, job: Job, memory: int) -> WrittenPart:
    """Write the rank's file."""
    name = f"rank-{job.rank:04d}.{job.token}.bin"
    size, digest = job.bytes, hashlib.sha256()
    with contextlib.ExitStack() as stack:
        data = memoryview(b"")
        if size:
            shared = stack.enter_context(mmap.mmap(memory, size, prot=mmap.PROT_READ))
            data = stack.enter_context(memoryview(shared))
        file = None if isinstance(path, BucketPath) else stack.enter_context(open(path / name, "wb"))
        for begin in range(0, size, _CHUNK):
            with data[begin : begin + _CHUNK] as chunk:
                if not np.isfinite(np.frombuffer(chunk, np.float32)).all():
                    raise WriterError(
                        f"weights or moments of step {job.step:,} are no numbers (NaN or Inf), on rank {job.rank}. The same "
                        "command goes on from the checkpoint before"
                    )
                digest.update(chunk)
                if file is not None:
                    file.write(chunk)
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
    if isinstance(path, BucketPath):
        (path / name).upload(f"/proc/self/fd/{memory}")
    return WrittenPart(name, job.ranges, size, digest.hexdigest())


def _await_parts(path: AnyPath, job: Job, own: WrittenPart) -> list[WrittenPart]:
    """Every rank's part. Raises WriterError when one failed, or is silent for GIVE_UP_SECONDS."""
    parts = {job.rank: own}
    heard: dict[int, tuple[WriterStatus, float]] = {}
    pause = 0.01
    while missing := set(range(job.world_size)) - parts.keys():
        for rank in missing:
            status = read_status(path, rank, job.token)
            if status.error is not None:
                raise WriterError(f"{status.error} (rank {rank})")
            if status.part is not None:
                parts[rank] = status.part
            last, since = heard.get(rank, (WriterStatus(), 0.0))
            if rank not in heard or status != last:
                heard[rank] = status, time.monotonic()
            elif time.monotonic() - since > GIVE_UP_SECONDS:
                raise LostWriterError(
                    f"rank {rank}'s part of the checkpoint of step {job.step:,} does not come: its writer has said "
                    f"nothing for {GIVE_UP_SECONDS:.0f} s"
                )
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return [parts[rank] for rank in range(job.world_size)]


def _write_rest(path: AnyPath, job: Job, commit: Commit, parts: list[WrittenPart]) -> dict[str, Checksum]:
    """index.json, state.json and model.safetensors; checksums of all there is."""
    index = Index(commit.shapes, job.states, {part.file: part.ranges for part in parts})
    write_whole(path / INDEX, json.dumps(asdict(index)))
    write_whole(path / "state.json", json.dumps({"format": FORMAT, **commit.state}, indent=1))
    checksums = {part.file: Checksum(part.bytes, part.sha256) for part in parts}
    checksums[MODEL] = _write_model(path / MODEL, ShardedTensors(path, index), commit)
    checksums |= {name: checksum(path / name) for name in (INDEX, "state.json")}
    return checksums


def _retain(checkpoints: Checkpoints, final: AnyPath, retention: Retention) -> None:
    if retention.always:
        checkpoints.keep_always(final.name)
    checkpoints.prune(final, retention.keep, set(retention.damaged) - {final.name})


def _write_model(file: AnyPath, sharded: ShardedTensors, commit: Commit) -> Checksum:
    """A .safetensors of the weights in the parts; its checksum. (The length of a header, the header in JSON, the data.)"""
    weights = sharded.whole(EMA if EMA in sharded.states else WEIGHTS)
    header: dict[str, Any] = {"__metadata__": commit.metadata}
    at = 0
    for name, array in weights.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # So that the data is aligned.
    with file.replacing() if isinstance(file, BucketPath) else open(file, "wb") as stream:
        for part in chain([len(text).to_bytes(8, "little"), text], (array.tobytes() for array in weights.values())):
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
    return checksum(file)


@contextlib.contextmanager
def _beating(path: AnyPath, job: Job) -> Iterator[None]:
    """Show in the status file that this writer is alive."""
    over = threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(BEAT_SECONDS):
            count += 1
            # If it cannot be written, the part cannot either, and that says so.
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
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        return f"{folder}: {_FULL}"
    text = " ".join(str(error).split())
    return text if isinstance(error, (WriterError, StorageError)) else f"{folder}: {type(error).__name__}: {text}"


def mark_best(best: Best) -> None:
    """As Checkpoints.keep_if_best."""
    checkpoints = Checkpoints(to_path(best.folder, Retry(best.retry, "data.retry_minutes")))
    checkpoints.keep_if_best(step_name(best.step), best.metric, best.value)


def answer(line: str, memory: int) -> Reply:
    """Do what a line asks."""
    begin = time.perf_counter()
    error, crash = None, False
    try:
        request = json_record.parse(line, Request, "a request to the checkpoint writer")
        if request.best is not None:
            mark_best(request.best)
        if request.job is not None:
            save(request.job, memory)
    except WriterError as failed:
        error, crash = str(failed), isinstance(failed, LostWriterError)
    except UserError as failed:  # A damaged kept.json.
        error = str(failed)
    except Exception as failed:  # Whatever it is: it must not die without a word.
        error, crash = f"the checkpoint writer failed: {type(failed).__name__}: {' '.join(str(failed).split())}", True
    return Reply(error, crash, time.perf_counter() - begin)


def main() -> None:
    """Serve one rank. Argument: the file descriptor of the memory that they share."""
    memory = int(sys.argv[1])
    os.nice(10)  # Training goes first.
    for line in sys.stdin:
        reply = answer(line, memory)
        with contextlib.suppress(BrokenPipeError):  # Its rank is gone.
            print(json.dumps(asdict(reply)), flush=True)
