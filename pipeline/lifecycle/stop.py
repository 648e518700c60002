"""Graceful stopping: stop requests, agreement of the ranks on a step, and the status that a run leaves behind.

A stop is requested by SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, by a file `stop` in the run folder, by
`train.stop_after_minutes`, or by the end of the ranks' launcher (pipeline/lifecycle/launcher_process.py).
A thread on each rank receives the request, even while the main thread is blocked in a collective, and forwards it through the
process group's store, so that a rank waiting for data learns of it too. The ranks then agree: an asynchronous all-reduce
accompanies each item (a training step, an evaluation batch), and all stop before the same item. Before training begins there
is nothing to commit, and a rank exits at once.
"""

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pipeline.base.errors import CrashError, DivergedError, Interrupted, Stopped, UserError, is_outage
from pipeline.base.words import on_one_line
from pipeline.lifecycle.launcher_process import find_launcher
from pipeline.lifecycle.rank_store import RankStore
from pipeline.lifecycle.run_folder import RESUME, Ending, RunFolder, Status, is_stop_asked, read_failures, stop_file
from pipeline.settings.command import mistake_in_words
from pipeline.settings.run import RunConfig

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
# Before training, rank 0 waits this long before it exits, so that the others can read its message from the store.
_SPREAD_SECONDS = 3.0
# Prefix of the message that ends all ranks with one rank's UserError, and the timeout for it to arrive.
_REFUSED, _REFUSAL_SECONDS = "refused: ", 15.0
# One Ctrl-C may arrive twice, from the terminal and from the launcher.
_ONE_INTERRUPT_SECONDS = 1.0
# The deepspeed launcher kills what is left 30 s after SIGTERM.
_LAST_WORD_SECONDS = 27.0
# Timeout for the other ranks when leaving with everything committed.
_FAREWELL_SECONDS = 10.0
# Reserve before stop_after_minutes, for the current step, MLflow and exit; plus three times the longest commit. Before the first one
# of a start, its time is that of its bytes on a slow disk.
_RESERVE_SECONDS, _SLOW_DISK = 30.0, 100e6
_NAMED = 8  # of several ranks that failed
_LOST_OTHERS = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed? ?out", re.IGNORECASE)


class Stop:
    """Receives stop requests from its construction on. A context manager around the whole run."""

    def __init__(self, config: RunConfig) -> None:
        self.folder = RunFolder(Path(config.out) / config.name, int(os.environ.get("RANK", "0")))
        self.reason = ""
        self.caveat = ""  # What to know of a run that is finished.
        self.step = 0
        self.commit_seconds = self._expected_seconds = 0.0
        self.limit_seconds = config.train.stop_after_minutes * 60
        self.begin = time.monotonic()  # Monotonic: wall clocks jump.
        self._training = False
        self._agreed = False  # A rank may learn this before the reason.
        self._refused = False
        self._ranks: Ranks | None = None
        self._store: RankStore | None = None
        self._lock = threading.Lock()
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
                self._before[number] = signal.signal(number, _ignore)
                signal.siginterrupt(number, False)
        self._closed = False
        self._launcher = find_launcher()
        self._thread = threading.Thread(target=self._listen, name="stop", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what a run does with it
    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write how the run ended, unless another run holds the folder; then stop listening."""
        if self._refused:  # The error is only that other ranks left; the thread ends this one.
            self._thread.join()
        with contextlib.suppress(OSError):  # A full disk, which the error already reports.
            if error is None:
                self.folder.say_status(Status("finished", self.step, 0, self.caveat))
            elif isinstance(error, UserError | OSError) and (mistake := mistake_in_words(error)):
                self._end_with_mistake(error, mistake)
            else:
                self._end_with_failure(error)
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

    def _end_with_mistake(self, error: UserError | OSError, mistake: str) -> None:
        """Write that a run ended with one line and no traceback."""
        how: Ending = "diverged" if isinstance(error, DivergedError) else "refused"
        code = 2
        if is_outage(error):  # Another start may succeed.
            how, code = "failed", 1
        self.folder.say_status(Status(how, self.step, code, mistake))
        # The others lose this rank, and would say that it was killed.
        if isinstance(error, OSError) or error.on_one_rank:
            self.folder.say_failure(mistake, lost_others=False, outage=is_outage(error))

    def _end_with_failure(self, error: BaseException) -> None:
        """Write an error that nobody expected. Ends the process if it comes from the loss of another rank."""
        text = f"{type(error).__name__}: {on_one_line(error)[:500]}"
        lost_others = self._store is not None and bool(_LOST_OTHERS.search(text))
        crash = isinstance(error, CrashError)
        lines = "" if crash else "".join(traceback.format_exception(error))
        self.folder.say_failure(text, lost_others, lines, is_outage(error))
        if lost_others:
            if not self._training and self._is_any_asked():
                # The others left as asked, and so does this rank, within a second.
                self._thread.join(_REFUSAL_SECONDS)
            self._leave_lost(text)
        asked = f" ({self.reason})" if self.reason else ""
        self.folder.say_status(Status("failed", self.step, 1, (str(error) if crash else text) + asked))

    def connect(self, ranks: "Ranks") -> None:
        """Share stop requests with the other ranks from now on. Needs the process group. Collective."""
        if ranks.world_size > 1:
            from torch.distributed import TCPStore

            # A connection of its own: the process group's is held while it waits.
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            self._store = RankStore(store, _STORE_SECONDS)
        ranks.barrier()
        self._ranks, self.folder.ours = ranks, True

    def expect_checkpoint(self, num_bytes: int) -> None:
        """Until a commit was measured, keep time for one of so many bytes, of all ranks together, before stop_after_minutes."""
        # At most half of the limit: a run that stops before its first step each time would never end.
        most = max(0.0, self.limit_seconds / 2 - _RESERVE_SECONDS) / 3
        self._expected_seconds = min(num_bytes / _SLOW_DISK, most)

    def begin_training(self, step: int) -> None:
        """From now on the ranks stop together, with a checkpoint. Collective."""
        assert self._ranks is not None
        self.committed(step)
        self._ranks.barrier()  # First: a rank that is asked while it prepares leaves, and so must those that wait for it.
        with self._lock:
            self._training = True

    def committed(self, step: int, seconds: float = 0.0) -> None:
        """Record that a checkpoint of `step` is committed, and how many seconds that took."""
        self.step = step
        self.commit_seconds = max(self.commit_seconds, seconds)
        with self._lock:  # Not after `_want` said that the run leaves, which takes rank 0 some seconds.
            self.folder.say_status(Status("running", step, -1, ""))

    def record_failure(self, line: str, lost_others: bool) -> None:
        """Write why this rank is about to end, because its main thread will not. lost_others: other ranks are the cause."""
        with contextlib.suppress(OSError):
            self.folder.say_failure(line, lost_others)
            self.folder.say_status(Status("failed", self.step, 1, line))

    def is_wanted(self) -> bool:
        """Whether this rank knows of a stop request. Others may not yet: the ranks agree in `together`."""
        return self._agreed or bool(self.reason)

    def together(self, items: Iterator[T]) -> Iterator[T]:
        """Yield `items` until the ranks agree to stop; then raise Stopped. Collective; each rank has equally many items.

        The all-reduce starts one item ahead, so that its result is available without waiting. It starts only when this rank
        has its next item, or will not need one: so no rank begins an item for which another still waits for data.
        """
        end: Any = object()

        def take() -> Any:
            if self.is_wanted():
                return end
            try:
                return next(items, end)
            except Interrupted:
                return end

        assert self._ranks is not None
        item = take()
        answer = self._ranks.sum_later(float(self.is_wanted()))
        while True:
            if answer():
                self._agreed = True
                raise Stopped
            if item is end:
                return
            following = take()
            answer = self._ranks.sum_later(float(self.is_wanted()))
            yield item
            item = following

    def leave_if_wanted_on_all_ranks(self) -> None:
        """Raise Stopped on all ranks if any has a stop request. Collective; blocks, unlike `together`."""
        assert self._ranks is not None
        if self._ranks.sum(float(self.is_wanted()))[0]:
            self._agreed = True
            raise Stopped

    def agreed_reason_on_all_ranks(self) -> str:
        """Return the reason of an agreed stop."""
        assert self._ranks is not None
        return next(filter(None, self._ranks.gather(self.reason)))

    def refuse(self, error: UserError) -> NoReturn:
        """End all ranks with this rank's error, before training; the others may be blocked in a collective.

        Rank 0 prints the error, whichever rank raised it, and all exit with code 2.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(_key(), f"{_REFUSED}{error}")
                self._thread.join(_REFUSAL_SECONDS)  # The thread ends this process, as on the other ranks.
        raise error

    def leave(self, step: int, reason: str) -> NoReturn:
        """Exit with code RESUME, all ranks together, because a launcher kills the others when one exits. Collective.

        Everything is committed. Blocked threads, libraries or other ranks cannot delay the exit.
        """
        assert self._ranks is not None
        self.step = step
        self._say_stopped(RESUME, reason)
        alone = threading.Timer(_FAREWELL_SECONDS, _exit, [RESUME])
        alone.daemon = True
        alone.start()
        with contextlib.suppress(RuntimeError):  # Another rank has exited already.
            self._ranks.barrier()
        _exit(RESUME)

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
            speaks = self._store.add(_key("speaker"), 1) == 1
        except RuntimeError:  # The store is lost, so rank 0, which hosts it, is.
            speaks = self.folder.rank == 1
        with contextlib.suppress(OSError):
            self.folder.say_status(Status("failed", self.step, 1, line))
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
        return (
            f"{what}. The other ranks end, too. The same command resumes from the last checkpoint, of step {self.step:,} or "
            f"later; launch/supervise.py gives it by itself. Details: {self.folder.path / 'failures'}"
        )

    # ------------------------------------------------------------------ the listening thread
    def _listen(self) -> None:
        while not self._closed:
            woken, _, _ = select.select([self._woken], [], [], _POLL_SECONDS)
            for number in os.read(self._woken, 100) if woken else b"":
                if number in _SIGNALS:  # Not 0, which wakes the thread, nor a signal that a library handles.
                    self._hear(signal.Signals(number))
            if not self.reason and (reason := self._asked_elsewhere()):
                if reason.startswith(_REFUSED):
                    self._leave_refused(reason.removeprefix(_REFUSED))
                self._want(reason)
            if time.monotonic() - self._terminated > _LAST_WORD_SECONDS:
                self._terminated = float("inf")
                self.record_failure(f"had not left {_LAST_WORD_SECONDS:.0f} s after SIGTERM", lost_others=True)

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted > _ONE_INTERRUPT_SECONDS:
            self._say_stopped(130, "a second SIGINT: what came after the last checkpoint is lost")
            self._tell("stopped at once by a second SIGINT: the same command continues from the last checkpoint")
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
        if self._ranks is None:  # Not connected: the other ranks could not be told.
            return ""
        if self._ranks.is_main:
            if is_stop_asked(self.folder.path):
                return BY_FILE
            reserve = _RESERVE_SECONDS + 3 * (self.commit_seconds or self._expected_seconds)
            if self.limit_seconds and time.monotonic() - self.begin > self.limit_seconds - reserve:
                return BY_LIMIT
        with contextlib.suppress(RuntimeError):  # Rank 0, which hosts the store, has exited.
            if self._store is not None and self._store.check(_key()):
                return self._store.get(_key())
        return ""

    def _is_any_asked(self) -> bool:
        """Whether a rank has told the others of a request to leave."""
        with contextlib.suppress(RuntimeError):
            return self._store is not None and self._store.check(_key())
        return False

    def _want(self, reason: str) -> None:
        with self._lock:
            self.reason = self.reason or reason
            with contextlib.suppress(RuntimeError):
                if self._store is not None:
                    self._store.set(_key(), self.reason)
            if not self._training:
                self._say_stopped(RESUME, f"{reason}, before training began")
                self._tell(
                    f"stopped by {reason} before training began: the same command starts it again (exit code {RESUME})"
                )
                if self._store is not None and self.folder.rank == 0:
                    time.sleep(_SPREAD_SECONDS)  # The store ends with this rank.
                _exit(RESUME)

    def _tell(self, line: str) -> None:
        if self.folder.rank == 0:
            with contextlib.suppress(OSError):  # Not print(), which the main thread may be in.
                os.write(2, f"{line}\n".encode())

    def _leave_refused(self, error: str) -> NoReturn:
        self._refused = True
        if self.folder.rank == 0:
            with contextlib.suppress(OSError):
                self.folder.say_status(Status("refused", self.step, 2, error))
            print(f"error: {error}", file=sys.stderr, flush=True)
        # The store ends with rank 0, and a launcher kills the others when one exits.
        time.sleep(_SPREAD_SECONDS)
        _exit(2)

    def _say_stopped(self, code: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            self.folder.take_back_failure()
            self.folder.say_status(Status("stopped", self.step, code, reason))
            if self.folder.is_owner:  # The request is fulfilled: the next start must not stop.
                stop_file(self.folder.path).unlink(missing_ok=True)


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _key(name: str = "stop") -> str:
    # torchrun's store outlives the ranks that it restarts.
    return f"vit_pipeline/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
