"""Ranks forked from one process that has imported everything: a start costs a second or two, not ten."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ranks import ROOT

_FORGE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pipeline import schema
from pipeline.command import mistakes_in_one_line
from pipeline.config import RunConfig
from pipeline.train import run
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pids = []
    for rank, environment in enumerate(request["ranks"]):
        pid = os.fork()
        if not pid:
            os.environ.update(environment)
            output = os.open(request["output"] + f".{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with mistakes_in_one_line():
                run(schema.load(RunConfig, None, request["overrides"]))
            sys.exit()
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Forge:
    """Starts ranks of a run, one run at a time. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output"
        self.pids: list[int] = []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _FORGE, str(ROOT)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._read() == "ready"

    def __enter__(self) -> "Forge":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self.process.kill()
        self.process.wait()

    def start(self, world_size: int, overrides: list[str], **environment: str) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ranks = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
            for rank in range(world_size)
        ]  # fmt: skip
        request = {"ranks": ranks, "overrides": overrides, "output": str(self.output)}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self.pids = json.loads(self._read())

    def wait(self) -> list[int]:
        """The ranks' exit codes."""
        codes = json.loads(self._read())
        self.pids = []
        return codes

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def said(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        path = Path(f"{self.output}.{rank}")
        return path.read_text() if path.exists() else ""

    def _read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()


def until(is_so: Callable[[], object], seconds: float = 120) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
