"""A rank's side of asynchronous saving: copy to host memory, hand over to the writer process, collect its replies.

Training waits for the copy only. The buffer is an anonymous file (memfd) mapped by both processes: it uses no /dev/shm
and is freed when both have exited. It is reused, so host memory is bounded and at most one save is in flight.
"""

import contextlib
import io
import json
import math
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, cast

import torch

from pipeline.base import json_record
from pipeline.base.errors import CrashError, OneRankCrashError, UserError
from pipeline.base.words import how_to_resume
from pipeline.checkpoint.sharded_tensors import BYTES, RankPart
from pipeline.checkpoint.writer import Best, Commit, Reply, Request, SaveJob
from pipeline.process.distributed import Ranks
from pipeline.process.start import child_environment
from pipeline.process.waits import waiting

# The writer ignores signals and leaves the rank's process tree before its slow imports.
_START = """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
if os.fork():
    os._exit(0)
from pipeline.checkpoint.writer import main
main()
"""
# How long a run that fails waits for the save in flight; the writer finishes it in any case.
_LAST_WAIT_SECONDS = 10.0


class Saver:
    """Saves checkpoints in the background. All methods but reserve, mark_best, check_writer and close are
    collective.

    A writer that dies is replaced, and the new one repeats the save, because the copy is still in memory. A second
    death during the same save raises CrashError.

    folder: of all checkpoints, local or a URL. retry: seconds for which object store requests are retried.
    committed_step: step of the checkpoint that the run starts from. say: receives a line on rank 0 when a writer died.
    wait_seconds: how long a commit may be waited for; the watchdog ends a run that waits longer.
    """

    def __init__(
        self,
        folder: str,
        ranks: Ranks,
        retry: float,
        committed_step: int = 0,
        say: Callable[[str], None] = print,
        wait_seconds: float = 1800.0,
    ) -> None:
        self.folder, self.ranks, self.retry, self.say, self.wait_seconds = folder, ranks, retry, say, wait_seconds
        # Seconds since the last `metrics`: this rank waited for saving; its writer worked.
        self.blocked = self.written = 0.0
        # Step of the last committed checkpoint, as rank 0 knows it (the others, since the last collective call), and
        # the longest time that writing one took (0 before the first).
        self.committed_step, self.longest = committed_step, 0.0
        # Requests without a reply yet, oldest first.
        self._in_flight: deque[Request] = deque()
        self._error: UserError | CrashError | None = None  # This rank's, until `_conclude` shares it.
        self._notes: list[str] = []
        self._memory = os.memfd_create(f"checkpoint-{ranks.rank}")
        self._host = torch.empty(0)
        self._thread = ThreadPoolExecutor(1)
        self._reserving: Future[Any] = self._thread.submit(int)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  Not a pipe: it would keep the ranks' own open.
        self._start_writer()

    def _start_writer(self) -> None:
        spawner = subprocess.Popen(
            [sys.executable, "-c", _START, str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=[self._memory],
            bufsize=0,
            start_new_session=True,
            cwd="/",
            env=child_environment(),
        )
        spawner.wait()
        # Unbuffered: select does not see what a buffer holds.
        self._from = cast(io.RawIOBase, spawner.stdout)
        self._to = io.BufferedWriter(cast(io.RawIOBase, spawner.stdin))

    def reserve(self, part: RankPart) -> None:
        """Allocate the memory of a part in the background, so that the first save takes no longer than later ones. No
        save may be in flight. Not collective.
        """
        self._reserving = self._thread.submit(self._map, part.num_elements)

    def save(self, step: int, part: RankPart, commit: Commit | None) -> None:
        """Copy this rank's part and hand it to the writer; waits for the previous save first. commit: rank 0 only."""
        begin = time.perf_counter()
        self._hear_all()
        self._conclude()
        self._copy(part)
        job = SaveJob(
            self.folder,
            self.retry,
            step,
            self.ranks.agree(uuid.uuid4().hex[:8]),
            self.ranks.rank,
            self.ranks.world_size,
            list(part.tensors),
            part.ranges,
            commit,
            constants=part.constant_ranges,
        )
        self._send(Request(job=job))
        self.blocked += time.perf_counter() - begin

    def mark_best(self, step: int, metric: str, value: float, lower_is_better: bool = False) -> None:
        """Retain the checkpoint of `step` until one with a better `metric` exists. Queued behind the save in flight."""
        if self.ranks.is_main and math.isfinite(value):
            best = Best(self.folder, self.retry, step, metric, value, lower_is_better)
            self._send(Request(best=best))

    def numbers(self) -> list[float]:
        """This rank's numbers for `metrics` and `check`."""
        self.check_writer()
        return [self.blocked, self.written, self.committed_step, bool(self._error or self._notes)]

    def metrics(self, numbers: Sequence[Sequence[float]]) -> dict[str, float]:
        """Metrics since the last call, maximum over ranks: seconds training waited for saving, and seconds writers
        worked. numbers: of every rank.
        """
        self.blocked = self.written = 0.0
        blocked, written, *_ = zip(*numbers, strict=True)
        return {"checkpoint_blocked_seconds": max(blocked), "checkpoint_write_seconds": max(written)}

    def check_writer(self) -> None:
        """Replace the writer if it died, because other writers wait for its part. Does not block; not collective."""
        self._hear(0.0)

    def check(self, numbers: Sequence[Sequence[float]]) -> None:
        """Raise UserError or CrashError if a save has failed; does not wait for the one in flight. numbers: of every
        rank. Collective if there is something to say.
        """
        self.committed_step = int(numbers[0][2])
        if any(has_news for *_, has_news in numbers):
            self._conclude()

    def wait(self) -> None:
        """Return once all saves are committed. Raises UserError or CrashError if one failed."""
        begin = time.perf_counter()
        self._hear_all()
        self._conclude()
        self.blocked += time.perf_counter() - begin

    def close(self) -> None:
        """Close the pipes; the writer exits when its work is done. Not collective."""
        deadline = time.monotonic() + _LAST_WAIT_SECONDS
        while self._in_flight and self._error is None and (left := deadline - time.monotonic()) > 0:
            self._hear(left)
        self._close_pipes()
        self._thread.shutdown()
        self._unlock()
        os.close(self._memory)
        self._errors.close()

    # ---------------------------------------------------------------- inside
    def _copy(self, part: RankPart) -> None:
        self._reserving.result()
        self._map(part.num_elements)
        at = 0
        for tensor in part.all_tensors():
            self._host[at : at + tensor.numel()].copy_(tensor.detach(), non_blocking=True)
            at += tensor.numel()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def _map(self, count: int) -> None:
        """Resize the buffer to `count` elements: when reserved, and at a save whose optimizer has other states."""
        if count == len(self._host):
            return
        self._unlock()
        os.ftruncate(self._memory, BYTES * count)
        host = torch.frombuffer(mmap.mmap(self._memory, BYTES * count), dtype=torch.float32)
        host.numpy()[:: mmap.PAGESIZE // BYTES] = 0  # Each page is there once it is written to.
        if self.ranks.device.type == "cuda":
            torch.cuda.set_device(self.ranks.device)  # Of the thread that reserves.
            # Page-locked, so that the device copies at the speed of the bus.
            failure = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), BYTES * count, 0))
            if failure:  # Unsaid, it would be raised by the next operation of the GPU.
                raise OneRankCrashError(
                    f"{socket.gethostname()}: {BYTES * count / 2**30:.1f} GiB of memory for checkpoints could not be"
                    f" page-locked (CUDA error {failure}). Free memory of the host, or allow more to be locked (ulimit"
                    " -l unlimited)."
                )
        self._host = host

    def _unlock(self) -> None:
        """Undo the locking of pages: CUDA remembers their addresses, where the next run of this process may map its
        memory.
        """
        if self.ranks.device.type == "cuda" and len(self._host):
            torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())
        self._host = torch.empty(0)

    def _send(self, request: Request) -> None:
        self._in_flight.append(request)
        with contextlib.suppress(BrokenPipeError):  # It died; the next `_hear` notices.
            self._to.write(json.dumps(asdict(request)).encode() + b"\n")
            self._to.flush()

    def _hear_all(self) -> None:
        """Wait for the writer's replies to all requests."""
        if not self._in_flight:
            return
        saving = next((f"of step {request.job.step:,} " for request in self._in_flight if request.job), "")
        with waiting(f"the checkpoint {saving}to be committed", self.wait_seconds, "checkpoint.wait_minutes"):
            while self._in_flight and self._error is None:
                self._hear(None)

    def _hear(self, seconds: float | None) -> None:
        """Process the writer's replies, waiting up to `seconds` (None: no timeout) for the first."""
        while (self._in_flight or seconds == 0.0) and select.select([self._from], [], [], seconds)[0]:
            seconds = 0.0
            line = self._from.readline()
            if not line:
                self._replace_writer()
                if self._error is not None:
                    return
                continue
            request, reply = self._in_flight.popleft(), json_record.parse(line, Reply, "the checkpoint writer's reply")
            self.written += reply.seconds
            self.longest = max(self.longest, reply.seconds)
            if reply.error is not None and self._error is None:
                kind = CrashError if reply.crash else UserError
                what = f"the checkpoint of step {request.job.step:,}" if request.job else "the best checkpoint"
                self._error = kind(f"{what} was not saved: {reply.error} {how_to_resume(self.committed_step)}")
            # The other ranks' writers reply once their parts are written, before rank 0's commits.
            if request.job and self._error is None and self.ranks.is_main:
                self.committed_step = request.job.step

    def _replace_writer(self) -> None:
        """Start another writer and resend the requests that have no reply."""
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        what = f"the checkpoint writer of rank {self.ranks.rank} died ({said[-1] if said else 'it was killed'})"
        unanswered = list(self._in_flight)
        self._in_flight.clear()
        if any(request.again for request in unanswered):
            self._error = CrashError(
                f"{what}, the second one at the same save. If the kernel killed it, the host needs more memory. "
                f"{how_to_resume(self.committed_step)}"
            )
            return
        self._notes.append(f"{what}: a new one goes on")
        self._close_pipes()
        self._start_writer()
        for request in unanswered:
            self._send(replace(request, again=True))

    def _close_pipes(self) -> None:
        for stream in (self._to, self._from):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _conclude(self) -> None:
        """Share notes, errors and the step of the last commit with all ranks. Raises the first error."""
        gathered = self.ranks.gather((self._error, self._notes, self.committed_step))
        self._notes, self.committed_step = [], gathered[0][2]
        for _, notes, _ in gathered:
            for note in notes:
                self.say(note)
        for error, _, _ in gathered:
            if error is not None:
                raise error
