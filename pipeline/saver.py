"""A rank's side of saving: the copy to host memory, which is all that training waits for, and word from the writer.

The memory is an anonymous file that both processes map: it needs no room in /dev/shm, and is gone when both are. There is
one, and it is used again: host memory is bounded by what the rank owns, and one save is in flight at most.
"""

import contextlib
import io
import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from pipeline.checkpoint_writer import Best, Commit, Job
from pipeline.distributed import Ranks
from pipeline.errors import UserError

_ROOT = Path(__file__).resolve().parents[1]
# Deaf to signals and nobody's child before it does anything that takes time.
_START = """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
if os.fork():
    os._exit(0)
from pipeline.checkpoint_writer import main
main()
"""
# How long a run that ends with an error waits for the save in flight; the writer finishes it in any case.
_LAST_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """What one rank writes. ranges: (name, start, length). tensors: by state, a flat fp32 tensor for each range."""

    ranges: list[tuple[str, int, int]]
    tensors: dict[str, Sequence[Tensor]]


class Saver:
    """Saves checkpoints in the background. All methods but close are collective.

    folder: of all checkpoints, local or a URL. patience: seconds that requests to a bucket are tried again.
    """

    def __init__(self, folder: str, ranks: Ranks, patience: float) -> None:
        self.folder, self.ranks, self.patience = folder, ranks, patience
        # Seconds that this rank waited for saving, and that its writer worked, since they were last asked for.
        self.blocked = self.written = 0.0
        # What is certainly on disk, and the longest that writing took: 0 before the first.
        self.committed_step, self.longest = 0, 0.0
        # What the writer was given and has not answered: a step to save, or None for a word on the best.
        self._in_flight: deque[int | None] = deque()
        self._memory = os.memfd_create(f"checkpoint-{ranks.rank}")
        self._host = torch.empty(0)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  Not a pipe: it would keep the ranks' own open.
        starter = subprocess.Popen(
            [sys.executable, "-c", _START, str(self._memory)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, pass_fds=[self._memory],
            bufsize=0, start_new_session=True, cwd="/",
            env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        starter.wait()
        # Answers are read unbuffered: what lay in a buffer, select would not see.
        self._from = cast(io.RawIOBase, starter.stdout)
        self._to = io.BufferedWriter(cast(io.RawIOBase, starter.stdin))

    def save(self, step: int, part: Part, commit: Commit | None) -> None:
        """Copy this rank's part and hand it over; first waits for the save before. commit: on rank 0."""
        begin = time.perf_counter()
        self._conclude(self._hear_all())
        self._copy(part)
        job = Job(
            self.folder, self.patience, step, self.ranks.agree(uuid.uuid4().hex[:8]), self.ranks.rank,
            self.ranks.world_size, list(part.tensors), part.ranges, commit,
        )  # fmt: skip
        self._send(job.to_json(), step)
        self.blocked += time.perf_counter() - begin

    def mark_best(self, step: int, metric: str, value: float) -> None:
        """The checkpoint of `step` stays while no other is better by `metric`; after the save that was given before."""
        if self.ranks.is_main:
            self._send(json.dumps(asdict(Best(self.folder, self.patience, step, metric, value))), None)

    def read(self) -> dict[str, float]:
        """Seconds since the last one: training waited for saving (the slowest rank), and writers worked beside it."""
        reading = {"checkpoint_blocked_seconds": self.ranks.max(self.blocked),
                   "checkpoint_write_seconds": self.ranks.max(self.written)}  # fmt: skip
        self.blocked = self.written = 0.0
        return reading

    def check(self) -> None:
        """Raise UserError if a save has failed; does not wait for one."""
        self._conclude(self._hear(0.0))

    def wait(self) -> None:
        """Return once all that was given is committed. Raises UserError if it cannot be."""
        begin = time.perf_counter()
        self._conclude(self._hear_all())
        self.blocked += time.perf_counter() - begin

    def close(self) -> None:
        """Let the writer go when it is done; this rank alone."""
        deadline = time.monotonic() + _LAST_WAIT_SECONDS
        while self._in_flight and (left := deadline - time.monotonic()) > 0:
            self._hear(left)
        for stream in (self._to, self._from):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        os.close(self._memory)
        self._errors.close()

    # ---------------------------------------------------------------- inside
    def _copy(self, part: Part) -> None:
        count = len(part.tensors) * sum(length for _, _, length in part.ranges)
        if not count:
            return
        if count != len(self._host):
            self._map(count)
        at = 0
        for tensors in part.tensors.values():
            for tensor in tensors:
                self._host[at : at + tensor.numel()].copy_(tensor.detach(), non_blocking=True)
                at += tensor.numel()
        assert at == count, (at, count)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def _map(self, count: int) -> None:
        """Make room for `count` elements: at the first save, and when the optimizer has begun to keep its states."""
        on_gpu = self.ranks.device.type == "cuda"
        if on_gpu and len(self._host):
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        os.ftruncate(self._memory, 4 * count)
        self._host = torch.frombuffer(mmap.mmap(self._memory, 4 * count), dtype=torch.float32)
        if on_gpu:
            # Page-locked, so that the device copies at the speed of the bus.
            torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), 4 * count, 0)

    def _send(self, line: str, step: int | None) -> None:
        self._in_flight.append(step)
        with contextlib.suppress(BrokenPipeError):  # It died; the next look at its answers says so.
            self._to.write(line.encode() + b"\n")
            self._to.flush()

    def _hear_all(self) -> str | None:
        error = None
        while self._in_flight and error is None:
            error = self._hear(None)
        return error

    def _hear(self, seconds: float | None) -> str | None:
        """The writer's answers so far, waiting up to `seconds` (None: for ever) for one: the first error."""
        error = None
        while self._in_flight and select.select([self._from], [], [], seconds)[0]:
            seconds = 0.0
            line = self._from.readline()
            if not line:
                self._in_flight.clear()
                return f"the checkpoint writer of rank {self.ranks.rank} died: {self._last_words()}"
            step, reply = self._in_flight.popleft(), json.loads(line)
            self.written += reply["seconds"]
            self.longest = max(self.longest, reply["seconds"])
            error = error or reply["error"]
            if step is not None and error is None:
                self.committed_step = step
        return error

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it was killed"

    def _conclude(self, error: str | None) -> None:
        errors = [text for text in self.ranks.gather(error) if text]
        if errors:
            raise UserError(f"the checkpoint was not saved: {errors[0]}")
