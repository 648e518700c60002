"""Ranks forked from one process that has imported everything: a start costs a second or two, not ten."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ranks import ROOT

# Forks the ranks that a line asks for and says their pids; or waits for the pids of a line and says their exit codes.
_FORGE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pipeline import schema
from pipeline.command import mistakes_in_one_line
from pipeline.config import RunConfig
from pipeline.train import run
import torch.utils.cpp_extension, torch._inductor.compile_fx, deepspeed.runtime.zero.muon.original_muon  # What every start imports.
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "pids" in request:
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["pids"]]), flush=True)
        continue
    pids = []
    for rank, environment in enumerate(request["ranks"]):
        pid = os.fork()
        if not pid:
            os.environ.update(environment)
            output = os.open(f"{request['output']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with mistakes_in_one_line():
                run(schema.load(RunConfig, None, request["overrides"]))
            sys.exit()
        pids.append(pid)
    print(json.dumps(pids), flush=True)
"""


class Forge:
    """Starts ranks of runs. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _FORGE, str(ROOT)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> "Forge":
        return self

    def __exit__(self, *exception: object) -> None:
        for run in self.runs:
            run.kill()
        self.process.kill()
        self.process.wait()

    def start(self, world_size: int, overrides: list[str]) -> "ForkedRun":
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ranks = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(world_size),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for rank in range(world_size)
        ]  # fmt: skip
        output = self.folder / f"output-{len(self.runs)}"
        pids = self.ask({"ranks": ranks, "overrides": overrides, "output": str(output)})
        self.runs.append(ForkedRun(self, pids, output))
        return self.runs[-1]

    def ask(self, request: dict) -> list[int]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@dataclass
class ForkedRun:
    """The ranks of one run."""

    forge: Forge
    pids: list[int]
    output: Path

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def wait(self) -> list[int]:
        """The ranks' exit codes."""
        pids, self.pids = self.pids, []
        return self.forge.ask({"pids": pids})

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def said(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        path = Path(f"{self.output}.{rank}")
        return path.read_text() if path.exists() else ""


def until(is_so: Callable[[], object], seconds: float = 300) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
