"""Waits and work that may last: what this process waits for, for how long at most, and what it does. Standard library
only, but for bars on a terminal.

Code that waits for a resource announces it (`waiting`). A wait of over NOTICE_SECONDS is said, and the watchdog of a
run (pipeline/monitor/watchdog.py) does not take it for a hang before its limit is over. Time in which this process was
stopped does not count. Work that may last is announced too (`Work`, `worked`), so that no command is silent for long.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline.base.progress import duration
from pipeline.base.words import counted, plural
from pipeline.process.start import rank

T = TypeVar("T")

NOTICE_SECONDS = 2.0
# Between the lines of work that counts.
_LINE_SECONDS = 10.0
# A store that answers each of a thousand requests late is named once in this time.
_AGAIN_SECONDS = 60.0

Say = Callable[[str], None]


@dataclass(eq=False)
class Wait:
    """Announces that this thread waits during the block. It does not end the wait.

    what: completes "waiting for ...". seconds: its limit. setting: the setting that gives the limit. kind: of several
    waits of a kind, one is said. is_silent: it is not said. say: for this wait alone.
    """

    what: str
    seconds: float
    setting: str = ""
    kind: str = ""
    is_silent: bool = False
    say: Say | None = None
    begin: float = field(default_factory=time.monotonic)

    def __enter__(self) -> "Wait":
        self._board = _board
        self._board.waits[id(self)] = self
        self._board.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._board.waits.pop(id(self), None)

    def __str__(self) -> str:
        setting = f" ({self.setting})" if self.setting else ""
        return f"{self.what}, at most {duration(self.seconds)}{setting}"

    @property
    def age(self) -> float:
        return time.monotonic() - self.begin

    @property
    def left(self) -> float:
        """Seconds until its limit; not positive when it is over."""
        return self.seconds - self.age


waiting = Wait


class Work:
    """Announces work of this process during the block. If it lasts, rank 0 shows a bar on a terminal; elsewhere, or if
    nothing is counted, a line.

    what: the work, as "reading val". total: of what `advance` counts, in units of `unit`; 0 for nothing, None if it is
    not known. note: beside the numbers. As a wait does, it says its first line after NOTICE_SECONDS.
    """

    def __init__(self, what: str, total: int | None = 0, unit: str = "image") -> None:
        self.what, self.total, self.unit, self.note = what, total, unit, ""
        self.done = self._first = 0
        self.begin = time.monotonic()
        self.next_line = self.begin + NOTICE_SECONDS
        self._bar: Any = None

    def __enter__(self) -> "Work":
        self._board = _board
        if self.total != 0 and rank() == 0 and sys.stderr.isatty():
            from tqdm import tqdm

            shown = {"total": self.total, "unit": f" {plural(self.unit)}", "delay": NOTICE_SECONDS}
            self._bar = tqdm(desc=self.what, leave=False, dynamic_ncols=True, **shown)
        self._board.work.append(self)
        self._board.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._board.work.remove(self)
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self.total is not None:
            self.done = min(self.done, self.total)
        if self._bar is not None:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(self.done - self._bar.n)

    def restart(self) -> None:
        """What was counted so far says nothing about the time that is left."""
        self.begin, self._first = time.monotonic(), self.done

    def tell(self, say: Say) -> None:
        """Say how far it is, or show the bar, which by itself waits until something is counted."""
        now = time.monotonic()
        if self._bar is not None:
            self.next_line = now + NOTICE_SECONDS
            self._bar.refresh()
            return
        if self.total == 0:
            self.next_line = math.inf
            say(f"{self.what} ...")
            return
        self.next_line = now + _LINE_SECONDS
        told = [counted(self.done, self.unit), self.note]
        if self.total is not None:
            told[0] = f"{self.done:,} of {counted(self.total, self.unit)}"
            if counts := self.done - self._first:
                told.append(f"{duration((now - self.begin) * (self.total - self.done) / counts)} left")
        say(f"{self.what}: {', '.join(filter(None, told))}")


def worked(items: Iterable[T], what: str, total: int, unit: str = "image") -> Iterator[T]:
    """Yield the items, and announce the work on them; see `Work`."""
    with Work(what, total, unit) as work:
        for item in items:
            yield item
            work.advance()


def in_progress(age: float = 0.0) -> list[Wait]:
    """The waits of all threads of this process that have lasted `age` seconds, oldest first."""
    waits = _board.waits.copy().values()  # A copy, because other threads begin and end theirs.
    return sorted((wait for wait in waits if wait.age >= age), key=lambda wait: wait.begin)


def allowed(age: float = 0.0) -> list[Wait]:
    """Those of `in_progress` that are not over their limit."""
    return [wait for wait in in_progress(age) if wait.left > 0]


def say(kind: str, line: str, to: Say | None = None) -> None:
    """Say a line, unless one of its kind was said within a minute. to: as `Wait.say`."""
    now = time.monotonic()
    if now - _board.said.get(kind, -math.inf) > _AGAIN_SECONDS:
        _board.said[kind] = now
        (to or _board.say)(line)


def say_with(function: Say | None) -> None:
    """Make `function` say the lines of this process. None: standard error of rank 0, as at the start."""
    _board.say = function or _print


def _print(line: str) -> None:
    if rank() == 0:
        from tqdm import tqdm  # Whose bars a plain line would tear.

        tqdm.write(line, file=sys.stderr)


class _Board:
    """The waits and the work of this process, and the thread that says them; it starts with the first. said: kind ->
    time.
    """

    def __init__(self, say: Say = _print) -> None:
        self.say = say
        self.waits: dict[int, Wait] = {}
        self.work: list[Work] = []  # The innermost, which is said, is the last.
        self.said: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="waits", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(NOTICE_SECONDS / 4)
            for wait in self.waits.copy().values():
                if not wait.is_silent and wait.age >= NOTICE_SECONDS:
                    wait.is_silent = True  # Said once.
                    with contextlib.suppress(OSError):  # A full disk, or a closed terminal: the next line may arrive.
                        say(wait.kind or wait.what, f"waiting for {wait}", wait.say)
            for work in self.work[-1:]:
                if time.monotonic() >= work.next_line:
                    with contextlib.suppress(OSError):
                        work.tell(self.say)


_board = _Board()


def _forget() -> None:
    """A forked process has the waits of its parent, but not the threads."""
    global _board
    _board = _Board(_board.say)


os.register_at_fork(after_in_child=_forget)
