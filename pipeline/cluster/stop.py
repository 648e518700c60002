"""Graceful stopping: stop requests, agreement of the ranks on a step, and the status that a run leaves behind.

A stop is requested by SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, by a file `stop` in the run folder, by
`train.stop_after_minutes`, or by the end of the ranks' launcher (pipeline/process/launcher.py).
A thread on each rank receives the request, even while the main thread is blocked in a collective, and forwards it
through the process group's store, so that a rank waiting for data learns of it too. The ranks then agree: an
asynchronous all-reduce accompanies each item (a training step, an evaluation batch), and all stop before the same item.
Before training begins there is nothing to commit, and a rank exits at once.
"""

import contextlib
import os
import queue
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from pipeline.base.errors import (
    CrashError,
    DivergedError,
    Interrupted,
    Stopped,
    UserError,
    exit_code,
    is_of_one_rank,
    mistake_in_words,
)
from pipeline.base.words import how_to_resume, on_one_line
from pipeline.cluster.status_files import RESUME, Ending, RunFolder, Status, is_stop_asked, read_failures, stop_file
from pipeline.process import waits
from pipeline.process.launcher import end_restarts, find_launcher, key_of_start

if TYPE_CHECKING:  # This file is imported before torch, so that a signal during the import is heard.
    from pipeline.process.distributed import Ranks

T = TypeVar("T")

BY_FILE = "the stop file"
BY_LIMIT = "train.stop_after_minutes"
BY_LAUNCHER = "the end of its launcher"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 1.0
# Timeout of one store request: rank 0, which hosts the store, may hang.
_STORE_SECONDS = 5.0
# See `_spread`.
_SPREAD_SECONDS = 3.0
# Timeout for a message that ends all ranks to arrive.
_END_SECONDS = 15.0
# One Ctrl-C may arrive twice, from the terminal and from the launcher.
_ONE_INTERRUPT_SECONDS = 1.0
# Timeout for the other ranks when leaving with everything committed.
_FAREWELL_SECONDS = 10.0
# Reserve before stop_after_minutes, for the current step, MLflow and exit; plus three times the longest commit. Before
# the first one of a start, its time is that of its bytes on a slow disk.
_RESERVE_SECONDS, _SLOW_DISK = 30.0, 100e6
_NAMED = 8  # of several ranks that failed
_LOST_OTHERS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed? ?out", re.IGNORECASE)


class RankStore:
    """torch's TCPStore, which the ranks share, with a limit on every request, also while rank 0, which hosts it, stands
    still; of torch's own, `check` and `add` wait for an answer for ever. Its keys belong to this start.

    A thread makes the requests, one after another. After one that was not answered in time, all raise at once until it
    is answered; only what `set` was given is kept, and stored then. All raise RuntimeError if the store is lost or does
    not answer.
    store: a connection used only here. seconds: the limit.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        store.set_timeout(timedelta(seconds=seconds))
        self._store, self._seconds = store, seconds
        self._requests: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        # Not an executor, for whose threads the interpreter waits when it exits.
        threading.Thread(target=self._work, name="rank store", daemon=True).start()

    def set(self, name: str, value: str) -> None:
        self._ask("set", key_of_start(name), value)

    def get(self, name: str) -> str:
        """What the name was set to, "" before."""
        key = key_of_start(name)
        return self._ask("get", key).decode() if self._ask("check", [key]) else ""

    def is_first(self, name: str) -> bool:
        """Whether no rank has asked this before."""
        return self._ask("add", key_of_start(name), 1) == 1

    def _ask(self, name: str, *arguments: Any) -> Any:
        answer = Future[Any]()
        is_late = self._late is not None and not self._late.done()
        if name == "set" or not is_late:
            self._requests.put((answer, name, arguments))
        try:
            return answer.result(0 if is_late else self._seconds)
        except TimeoutError:
            self._late = self._late if is_late else answer
            raise RuntimeError("rank 0 does not answer") from None

    def _work(self) -> None:
        while True:
            answer, name, arguments = self._requests.get()
            try:
                answer.set_result(getattr(self._store, name)(*arguments))
            except Exception as error:
                answer.set_exception(error)


class Stop:
    """Receives stop requests from its construction on. A context manager around the whole run."""

    _ranks: "Ranks"  # From `connect` on, and then the folder is ours.

    def __init__(self, folder: Path, limit_minutes: float = 0.0) -> None:
        """folder: of the run. limit_minutes: train.stop_after_minutes, 0 for none."""
        self.folder = RunFolder(folder, int(os.environ.get("RANK", "0")))
        self.reason = ""
        self.step = 0
        self.commit_seconds = self._expected_seconds = 0.0
        self.limit_seconds = 60 * limit_minutes
        self.begin = time.monotonic()  # Monotonic: wall clocks jump.
        self.flagged = False  # See `together`.
        self._training = False
        self._agreed = False  # A rank may learn this before the reason.
        self._is_recorded = False
        self._store: RankStore | None = None
        self._lock = threading.RLock()
        self._interrupted = self._terminated = float("inf")  # Times of the first SIGINT and SIGTERM.
        self._before: dict[int, Any] = {}
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        if threading.current_thread() is threading.main_thread():
            # The handlers do nothing: the number goes into the pipe, also while the main thread is busy in a library.
            self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # Under nohup the run outlives its terminal.
                self._before[number] = signal.signal(number, lambda number, frame: None)
                signal.siginterrupt(number, False)
        self._closed = False
        # Shows how the run ended to those who follow it: called with the ending and its reason. Rank 0 of a run sets
        # it.
        self.show_end: Callable[[Ending, str], None] = lambda how, reason: None
        self._launcher = find_launcher()
        self._thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what a run does with it
    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write how the run ended, unless another run holds the folder; then stop listening."""
        with self._lock:
            pass  # While another rank ends this one, the error is only that it has left.
        if error is None:
            with contextlib.suppress(OSError):
                self.folder.say_status(Status("finished", self.step, 0, ""))
        else:
            self._end_with(error)
        self._closed = True
        os.write(self._wake, b"\0")
        self._thread.join()
        if self._before:
            signal.set_wakeup_fd(self._old_wake)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        with contextlib.suppress(BlockingIOError):  # What came after the thread's last look.
            if signal.SIGTERM in os.read(self._woken, 100):
                self._terminated = time.monotonic()
        os.close(self._woken)
        os.close(self._wake)
        self.folder.unlock()
        waits = isinstance(error, UserError | CrashError) and not error.on_one_rank and self.folder.rank
        if waits and self._terminated < float("inf"):
            signal.raise_signal(signal.SIGTERM)  # Its launcher ends it already: the command would wait for that.

    def _end_with(self, error: BaseException) -> None:
        """Write what a run ended with. Ends the process if other ranks are the cause, or have to end with this one."""
        if not isinstance(error, UserError) and not self._training and self._told("stop"):
            # The others left as asked, and so does this rank, within a second.
            self._thread.join(_END_SECONDS)
        asked = f" ({self.reason})" if self.reason else ""
        if not isinstance(error, UserError | CrashError | OSError) or (line := mistake_in_words(error)) is None:
            text = f"{type(error).__name__}: {on_one_line(error)[:500]}"
            lost_others = self._store is not None and bool(_LOST_OTHERS.search(text))
            self.folder.say_failure(text, lost_others, "".join(traceback.format_exception(error)))
            if lost_others:
                self._leave_lost(text)
            self._record("failed", text + asked)
            return
        how: Ending = (
            "diverged" if isinstance(error, DivergedError) else "refused" if exit_code(error) == 2 else "failed"
        )
        alone = is_of_one_rank(error)
        if alone or isinstance(error, CrashError):
            self.folder.say_failure(line, lost_others=False)
        where = f"rank {self.folder.rank} on {socket.gethostname()}: " if self.folder.rank else ""
        if alone and self._store is not None:
            # The others may be blocked in a collective, and would say that this rank was killed.
            with contextlib.suppress(RuntimeError):
                if where:
                    time.sleep(_POLL_SECONDS)  # Rank 0, which may have the same error, goes first.
                if not self._told("end"):
                    self._store.set("end", f"{how} {where}{line}")
                self._thread.join(_END_SECONDS)  # The thread ends this process, as on the other ranks.
        self._record(how, line + (asked if how == "failed" else ""))

    def _record(self, how: Ending, reason: str) -> None:
        """Write how this start ended wherever it is shown. The first call counts. A disk that fails does not hide the
        reason.
        """
        with self._lock:
            if self._is_recorded:
                return
            self._is_recorded = True
            with contextlib.suppress(OSError):
                self.folder.say_status(Status(how, self.step, _code(how), reason))
            with contextlib.suppress(OSError):
                self.show_end(how, reason)

    def meet(self, hosts_store: bool) -> None:
        """Open the store through which the ranks hear of each other's stop requests and errors. hosts_store: on this
        rank.
        """
        from torch.distributed import TCPStore

        # A rank that hosts it and is asked to stop has told the others, or they have not found it yet.
        with self._lock if hosts_store else contextlib.nullcontext():
            # A connection of its own: the process group's is held while it waits.
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=hosts_store,
                wait_for_workers=False,
                multi_tenant=True,
            )
            self._store = RankStore(store, _STORE_SECONDS)

    def connect(self, ranks: "Ranks") -> None:
        """Share stop requests with the other ranks from now on. Needs the process group. Collective."""
        if ranks.world_size > 1 and self._store is None:
            self.meet(hosts_store=False)
        ranks.barrier()
        self._ranks, self.folder.ours = ranks, True

    def expect_checkpoint(self, num_bytes: int) -> None:
        """Until a commit was measured, keep time for one of so many bytes, of all ranks together, before
        stop_after_minutes.
        """
        # At most half of the limit: a run that stops before its first step each time would never end.
        most = max(0.0, self.limit_seconds / 2 - _RESERVE_SECONDS) / 3
        self._expected_seconds = min(num_bytes / _SLOW_DISK, most)

    def begin_training(self, step: int) -> None:
        """From now on the ranks stop together, with a checkpoint. Collective."""
        self.committed(step)
        # First: a rank that is asked while it prepares leaves, and so must those that wait for it.
        self._ranks.barrier()
        with self._lock:
            self._training = True

    def committed(self, step: int, seconds: float = 0.0) -> None:
        """Record that a checkpoint of `step` is committed, and how many seconds that took."""
        self.step = step
        self.commit_seconds = max(self.commit_seconds, seconds)
        with self._lock:  # Not after `_want` said that the run leaves, which takes rank 0 some seconds.
            self.folder.say_status(Status("running", step, -1, ""))

    def record_failure(self, line: str, lost_others: bool) -> None:
        """Write why this rank is about to end, because its main thread will not. lost_others: other ranks are the
        cause.
        """
        self.folder.say_failure(line, lost_others)
        with contextlib.suppress(OSError):
            self.folder.say_status(Status("failed", self.step, 1, line))

    def is_wanted(self) -> bool:
        """Whether this rank knows of a stop request. Others may not yet: the ranks agree in `together`."""
        return self._agreed or bool(self.reason)

    def together(self, items: Iterator[T], flag: Callable[[], bool] = lambda: False) -> Iterator[T]:
        """Yield `items` until the ranks agree to stop; then raise Stopped. Collective; each rank has equally many
        items.

        flag: called on each rank, and on one at most it may return True: `flagged` is then True on all ranks while that
        item is the last one yielded.

        The all-reduce starts one item ahead, so that its result is available without waiting. It starts only when this
        rank has its next item, or will not need one: so no rank begins an item for which another still waits for data.
        """
        end: Any = object()

        def take() -> Any:
            if not self.is_wanted():
                with contextlib.suppress(Interrupted):
                    return next(items, end)
            return end

        def ask() -> Callable[[], float]:
            return self._ranks.sum_later(float(self.is_wanted()) + 0.5 * flag())

        item, answer = take(), ask()
        while True:
            total = answer()
            if total >= 1:
                self._agreed = True
                raise Stopped
            if item is end:
                return
            following, answer = take(), ask()
            self.flagged = total > 0
            yield item
            item = following

    def leave_if_wanted_on_all_ranks(self) -> None:
        """Raise Stopped on all ranks if any has a stop request. Collective; blocks, unlike `together`."""
        if self._ranks.sum(float(self.is_wanted()))[0]:
            self._agreed = True
            raise Stopped

    def leave(self, step: int, reason: str) -> NoReturn:
        """Exit with code RESUME, all ranks together, because a launcher kills the others when one exits. Collective.

        Everything is committed. Blocked threads, libraries or other ranks cannot delay the exit.
        """
        self.step = step
        self._say_stopped(RESUME, reason)
        with contextlib.suppress(OSError):
            self.show_end("stopped", reason)
        alone = threading.Timer(_FAREWELL_SECONDS, _exit, [RESUME, reason])
        alone.daemon = True
        alone.start()
        with contextlib.suppress(RuntimeError):  # Another rank has exited already.
            self._ranks.barrier()
        _exit(RESUME, reason)

    # ------------------------------------------------------------------ after the loss of another rank
    def _leave_lost(self, error: str) -> NoReturn:
        """Exit with code 1 after one rank has said in one line that another was lost.

        This rank's own error comes from a collective and does not tell the cause; its traceback goes to `failures/`.
        """
        assert self._store is not None
        said, line = 2, self._loss(error)
        with contextlib.suppress(OSError):
            said = os.dup(2)
            self.folder.take_stderr()  # torch prints C++ frames when the store is lost.
        try:
            speaks = self._store.is_first("speaker")
        except RuntimeError:  # The store is lost, so rank 0, which hosts it, is.
            speaks = self.folder.rank == 1
        self._record("failed", line)
        if speaks:
            with contextlib.suppress(OSError):
                os.write(said, f"error: {line}\n".encode())
        else:
            time.sleep(_SPREAD_SECONDS)  # A launcher kills the others when one exits.
        _exit(1)

    def _loss(self, error: str) -> str:
        """Describe the loss by what ranks recorded of themselves, and how to continue. error: this rank's own error."""
        own = [f for f in read_failures(self.folder.path).values() if not f.lost_others]
        lines = [f"rank {failure.rank} on {failure.host} failed ({failure.error})" for failure in own[:_NAMED]]
        what = (
            ", ".join(lines) or f"another rank is gone: it, its host or the network failed, or it was killed ({error})"
        )
        return f"{what}. The other ranks end, too. {how_to_resume(self.step)} Details: {self.folder.path / 'failures'}"

    # ------------------------------------------------------------------ the listening thread
    def _listen(self) -> None:
        while not self._closed:
            woken, _, _ = select.select([self._woken], [], [], _POLL_SECONDS)
            for number in os.read(self._woken, 100) if woken else b"":
                if number in _SIGNALS:  # Not 0, which wakes the thread, nor a signal that a library handles.
                    self._hear(signal.Signals(number))
            if end := self._told("end"):
                how, _, line = end.partition(" ")
                self._leave_ended(cast(Ending, how), line)
            if not self.reason and (reason := self._asked_elsewhere()):
                self._want(reason)

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted > _ONE_INTERRUPT_SECONDS:
            self._say_stopped(130, "a second SIGINT: what came after the last checkpoint is lost")
            self._tell(f"stopped at once by a second SIGINT. {how_to_resume(self.step)}")
            _exit(130)
        if number == signal.SIGINT:
            self._interrupted = min(self._interrupted, now)
        if number == signal.SIGTERM:
            self._terminated = min(self._terminated, now)
        self._want(number.name)

    def _asked_elsewhere(self) -> str:
        """Return the reason of a stop request other than a signal; empty if there is none."""
        if self._launcher is not None and self._launcher.is_gone():
            return f"{BY_LAUNCHER} ({self._launcher.name}, process {self._launcher.pid})"
        if self.folder.ours and self.folder.rank == 0:
            if is_stop_asked(self.folder.path):
                return BY_FILE
            reserve = _RESERVE_SECONDS + 3 * (self.commit_seconds or self._expected_seconds)
            if self.limit_seconds and time.monotonic() - self.begin > self.limit_seconds - reserve:
                return BY_LIMIT
        return self._told("stop")

    def _told(self, name: str) -> str:
        """A rank's message to the others: why to "stop", or how and why to "end"; "" without one."""
        with contextlib.suppress(RuntimeError):  # Rank 0, which hosts the store, has exited.
            if self._store is not None:
                return self._store.get(name)
        return ""

    def _want(self, reason: str) -> None:
        with self._lock:
            if self._training and not self.reason:
                self._tell(
                    f"{reason}: saves a checkpoint after this step or the next, and ends (a second Ctrl-C: at once)"
                )
            self.reason = self.reason or reason
            with contextlib.suppress(RuntimeError):
                if self._store is not None:
                    self._store.set("stop", self.reason)
            if not self._training:
                self._say_stopped(RESUME, f"{reason}, before training began")
                self._tell(
                    f"stopped by {reason} before training began: the same command starts it again (exit code {RESUME})"
                )
                if self._store is not None and self.folder.rank == 0:
                    _spread()
                _exit(RESUME, reason)

    def _tell(self, line: str) -> None:
        if self.folder.rank == 0:
            with contextlib.suppress(OSError):  # Not print(), which the main thread may be in.
                begin = "\n" * os.isatty(2)  # A progress bar has left the cursor at its end.
                os.write(2, f"{begin}{line}\n".encode())

    def _leave_ended(self, how: Ending, line: str) -> NoReturn:
        """End with the error of one rank, which rank 0 says for all."""
        with self._lock:  # The main thread may meet the end of that rank.
            self._record(how, line)
            self._tell(f"error: {line}")
            _spread()  # Also on other ranks: a launcher kills all when one exits.
            _exit(_code(how))

    def _say_stopped(self, code: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            self.folder.take_back_failure()
            self.folder.say_status(Status("stopped", self.step, code, reason))
            if self.folder.held:  # The request is fulfilled: the next start must not stop.
                stop_file(self.folder.path).unlink(missing_ok=True)


def _exit(code: int, stopped_by: str = "") -> NoReturn:
    # torchrun sends SIGTERM to start the ranks again with those of a host that joins or has left.
    if code == 2 or (code == RESUME and stopped_by != signal.Signals.SIGTERM.name):
        end_restarts()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _spread() -> None:
    """Give the other ranks time to read from the store, which ends with rank 0."""
    for wait in waits.in_progress():
        wait.is_silent = True  # The main thread's wait does not matter any more.
    time.sleep(_SPREAD_SECONDS)


def _code(how: Ending) -> int:
    return 1 if how == "failed" else 2
