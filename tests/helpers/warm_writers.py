"""Checkpoint writers of forked ranks, forked from one process that has imported what they need, and not torch.

A start of Python with numpy takes 0.3 s of CPU, and each run has one for each rank. What a writer does once it runs,
and that it is a process of its own that outlives its rank, is as in `Saver._start_writer`, whose command
tests/checkpoint/test_saver.py and all runs that are no forks start.
"""

import io
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable

from pipeline.checkpoint import writer
from pipeline.process.start import child_environment

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_requests: list[socket.socket] = []
_replaced: list[Callable[..., None]] = []


def begin() -> None:
    """Fork the process that forks writers. It ends when this process and all forks of it have ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _requests.append(ours)
        return
    try:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):  # The pipes of the parent, of which this process is to hold no end.
            os.dup2(nothing, number)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for a writer.
        while True:
            environment, files, _, _ = socket.recv_fds(theirs, 2**20, 4)
            if not files:
                break
            if not os.fork():
                theirs.close()
                _write(json.loads(environment), *files)
            for file in files:
                os.close(file)
    finally:
        os._exit(0)


def _write(environment: dict[str, str], requests: int, replies: int, errors: int, memory: int) -> None:
    """In a writer: serve a rank to its end."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        for number, file in enumerate((requests, replies, errors)):
            os.dup2(file, number)
            os.close(file)
        sys.argv = ["-c", str(memory)]
        writer.main()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def use() -> None:
    """In a rank: its `Saver` gets such writers."""
    from pipeline.checkpoint.saver import Saver

    def start_writer(saver: Saver) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        files = [theirs_in, theirs_out, saver._errors.fileno(), saver._memory]
        socket.send_fds(_requests[0], [json.dumps(child_environment()).encode()], files)
        os.close(theirs_in)
        os.close(theirs_out)
        saver._from, saver._to = io.FileIO(ours_in), io.BufferedWriter(io.FileIO(ours_out, "wb"))

    _replaced.append(Saver._start_writer)
    Saver._start_writer = start_writer  # type: ignore[method-assign]


def forget() -> None:
    """In a rank: its `Saver` starts a writer by its command, as in a user's run."""
    from pipeline.checkpoint.saver import Saver

    Saver._start_writer = _replaced.pop()  # type: ignore[method-assign]
