"""A clock that stands still while this process does: stopped by Ctrl-Z, by a scheduler that suspends jobs, in a paused virtual machine.

Limits that catch the failure of something else (another rank, a writer, a store) go by it, because a suspended job stands still as a
whole: on continuing, nothing has failed. A process that stands still alone is caught by the clocks of the others. Standard library only.
"""

import os
import threading
import time
from collections.abc import Callable

# A thread looks at the clock at this interval. Without a look for so long as the second, this process did not run.
_LOOK_SECONDS, _GAP_SECONDS = 1.0, 5.0


class RunningClock:
    """Has to be looked at more often than every _GAP_SECONDS: longer gaps between two looks do not count."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, left_out: float = 0.0) -> None:
        self.monotonic, self.left_out = monotonic, left_out
        self._looked_at = monotonic()
        self._lock = threading.Lock()

    def seconds(self) -> float:
        with self._lock:
            now = self.monotonic()
            gap, self._looked_at = now - self._looked_at, now
            if gap > _GAP_SECONDS:
                self.left_out += gap
            return now - self.left_out


_clock = RunningClock()
_looker: threading.Thread | None = None  # Starts with the first call.


def running_time() -> float:
    """time.monotonic() without the time in which this process stood still. For differences within this process and its forks."""
    global _looker
    if _looker is None:
        _looker = threading.Thread(target=_look, args=(_clock,), name="running time", daemon=True)
        _looker.start()
    return _clock.seconds()


def _look(clock: RunningClock) -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        clock.seconds()


def _forget() -> None:
    """A forked process has the time of its parent, but not the thread, and perhaps a lock that this thread held."""
    global _clock, _looker
    _clock, _looker = RunningClock(left_out=_clock.left_out), None


os.register_at_fork(after_in_child=_forget)
