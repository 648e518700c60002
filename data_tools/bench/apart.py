"""Runs a piece of a benchmark in a process of its own, which may fail, crash, hang or exhaust the GPU without ending
the rest.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from pipeline.base.words import on_one_line
from pipeline.process.start import dying_with_parent

Row = dict[str, Any]
# Yields rows as they are measured.
Work = Callable[..., Iterable[Row]]


def rows_apart(work: Work, arguments: tuple[Any, ...], seconds: float) -> Iterator[Row]:
    """Yields the rows of `work(*arguments)`, and at last {"failed": reason} if it raised, died, or took over `seconds`.

    The process is forked, so it starts with all that this one has imported; this one must not have used CUDA.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, arguments, sender))
    child.start()
    sender.close()
    deadline = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            row = receiver.recv()
            if row is None:
                return
            yield row
        yield {"failed": f"stopped after {seconds:.0f} s"}
    except EOFError:
        child.join()
        yield {"failed": f"its process died with exit code {child.exitcode}"}
    finally:
        # With its compilers, which are in its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
        child.kill()  # Before it had a session of its own.
        child.join()


def _child(work: Work, arguments: tuple[Any, ...], sender: Connection) -> None:
    os.setsid()
    dying_with_parent()()
    try:
        for row in work(*arguments):
            sender.send(row)
    except (Exception, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {on_one_line(error)}"[:200]
        sender.send({"failed": text, "traceback": traceback.format_exc()[-3000:]})
    sender.send(None)
    sys.stdout.flush()
    # What is still running (threads of a loader, a compiler's pool) must not keep the process.
    os._exit(0)
