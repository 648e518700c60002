"""A process and its system: output, signals, memory. Imports little, and only the standard library."""

import io
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.base.errors import UserError

_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1  # prctl(2)


def print_any_text() -> None:
    """Show bytes of a file name that are not UTF-8, and characters that the locale lacks, as escapes, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def dying_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Returns what asks Linux to send a process a signal when the thread that started it ends, however that happens.

    To be called in a child process before its program starts (subprocess's preexec_fn), where nothing can be imported
    safely.
    """
    import ctypes

    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, int(number))


def child_environment() -> dict[str, str]:
    """Returns the environment for a process of this code beside the ranks: one thread, no GPU, and packages found as
    here.
    """
    # Absolute: the process may start in another folder.
    packages = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    path = os.pathsep.join([str(_ROOT), *packages])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def check_program(program: str, path: str | None = None) -> None:
    """Raise UserError unless a program can be started. path: as PATH of the environment, which is the default."""
    from shutil import which

    if which(program, path=path) is None:
        raise UserError(
            f"{program!r}: there is no such program, or it may not be run. Name the launcher as it is called in a"
            " shell, as deepspeed or torchrun, or by its path."
        )


def rank() -> int:
    """This process's rank, from RANK."""
    return int(os.environ.get("RANK", "0"))


def say_interrupted() -> None:
    if rank() == 0:
        print("stopped: to go on, run the same command again", file=sys.stderr, flush=True)


def silence_broken_output() -> bool:
    """Redirect output streams whose reader has closed to /dev/null. Returns whether standard output was one of them."""
    import select

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
