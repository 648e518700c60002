"""Streams and Ctrl-C of a process, from its first line on. Standard library only, and little of that.

Every file in `launch/` imports this before anything else, because the imports that follow take up to seconds:

    sys.path.insert(0, ...)
    from pipeline.process import guard

    guard(__name__)
"""

import contextlib
import os
import select
import signal
import sys
from types import FrameType

_INTERRUPTED = "stopped: the same command goes on\n"


def guard(module: str) -> None:
    """Open what is closed of the standard streams on /dev/null, and end with one line and code 130 at Ctrl-C.

    module: its __name__; only "__main__" is guarded, not what a child process or a test imports.

    A closed stream (`>&-`) is None in Python, and the next file that is opened gets its number: what a library prints would
    go into a checkpoint. Ctrl-C is Python's own again after `interruptible()`.
    """
    if module != "__main__":
        return
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, which is this one.
            os.open(os.devnull, os.O_RDWR if number else os.O_RDONLY)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - as long as the process
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # Ignored, as of a job in the background, it stays so.
        signal.signal(signal.SIGINT, _leave)


def interruptible() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def rank() -> int:
    """This process's rank as its launcher says it. 0 for text that is no rank, which a run refuses (`start.py`)."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def say_interrupted() -> None:
    if rank() == 0:
        print(_INTERRUPTED, end="", file=sys.stderr, flush=True)


def silence_broken_output() -> bool:
    """Redirect standard streams whose reader has gone to /dev/null; whether standard output was one of them."""
    broken = []
    for number in (1, 2):
        poll = select.poll()
        poll.register(number, 0)
        if any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0)):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
            broken.append(number)
    return 1 in broken


def _leave(number: int, frame: FrameType | None) -> None:
    # At once: an exception could be caught by the library that is being imported. Nothing was begun.
    if rank() == 0:
        with contextlib.suppress(OSError):
            os.write(2, _INTERRUPTED.encode())  # print() may be what was interrupted.
    os._exit(130)
