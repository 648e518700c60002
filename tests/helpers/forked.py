"""Ranks of `pipeline.train.start.run_training`, forked from one process that has imported everything: a start costs a
second, not ten.
"""

import contextlib
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.process.launcher import free_port

# Forks the ranks that a line asks for and says their pids; or waits for the pids of a line and says their exit codes.
# An answer bears the number of its request: one that nobody read must not be taken for the next.
_FORGE = """
import gc, json, os, sys, time, weakref
sys.path[:] = json.loads(sys.argv[1])
# It waits for the disk dozens of times in a run; a SIGKILL loses nothing that was written.
os.fsync = lambda descriptor: None
import warm_writers
warm_writers.begin()  # Before torch is there, of which writers need nothing.
from pipeline.process.launcher import quiet_torch
quiet_torch()  # As the start of a run does, before it imports torch.
import pipeline.train.setup, pipeline.train.zero.engine
import torch.utils.cpp_extension, torch._dynamo, deepspeed.module_inject.auto_ep_layer  # What every start imports,
import pipeline.data.mixture.run_data, PIL.Image
PIL.Image.preinit()  # and what every first image does.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow.tracking, mlflow.store.tracking.sqlalchemy_store  # What every tracked run imports.
from forked import work
import pipeline.settings.command
pipeline.settings.command.SILENT_SECONDS = 0.0  # No launcher would end them.
gc.freeze()  # As the start of a run does: otherwise each rank looks at all these objects when it exits, for a second.
for finalizer in weakref.finalize._registry:
    finalizer.atexit = False  # These would take torch's operators apart.

class End:
    def __init__(self, code):
        self.code = code

    def __del__(self):
        # The interpreter has ended all but its modules, and begins with `sys`. To destroy those of torch takes 0.4
        # s, and copies the
        # memory that ranks share. What a thread does wrong from here on (see _leave_gloo in
        # pipeline/train/zero/engine.py) still shows.
        time.sleep(0.05)
        os._exit(self.code)

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "pids" in request:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["pids"]]
        print(json.dumps([request["number"], codes]), flush=True)
        continue
    pids = []
    for rank, environment in enumerate(request["ranks"]):
        pid = os.fork()
        if not pid:
            os.environ.update(environment)
            output = os.open(f"{request['output']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            warm_writers.use()
            code = 0
            try:
                work(request["function"], request["argument"])
            except SystemExit as stop:
                code = stop.code or 0
            sys.last_value = End(code)
            sys.exit(code)
        pids.append(pid)
    print(json.dumps([request["number"], pids]), flush=True)
"""
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def work(function: str, argument: Any) -> None:
    """In a rank: function is "module:name"."""
    from pipeline.settings.command import mistakes_in_one_line

    module, _, name = function.partition(":")
    with mistakes_in_one_line():
        getattr(importlib.import_module(module), name)(argument)


def train(runs: list[list[str]]) -> None:
    """In a rank: one run after another. runs: their overrides of a RunConfig."""
    from pipeline.settings import schema
    from pipeline.settings.run import RunConfig
    from pipeline.train.start import run_training

    for overrides in runs:
        run_training(schema.load(RunConfig, None, overrides), draw="pipeline.review.draw")


def train_within_a_limit(argument: tuple[list[int], list[str]]) -> None:
    """In a rank: train, on these ranks with 1 GiB more than what they hold by then. Nobody can lift a limit again."""
    ranks, overrides = argument
    if int(os.environ["RANK"]) in ranks:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30,) * 2)
    train([overrides])


def told_to_stop() -> threading.Event:
    """In a rank, before its run: an event that is set when the run has heard that it is to stop."""
    from pipeline.cluster.stop import Stop

    want, heard = Stop._want, threading.Event()

    def want_and_tell(stop: Stop, reason: str) -> None:
        want(stop, reason)
        heard.set()

    Stop._want = want_and_tell  # type: ignore[method-assign]
    return heard


def train_with_halts(argument: tuple[str, list[int], list[int], list[str]]) -> None:
    """In a rank: a run that halts (SIGSTOP) at a place, so that what is sent to it is sent there on any machine.

    place: the preparation, or the evaluation or the training step after each of `steps` steps. Where it halts last, the
    ranks `ears` go on once they have heard that they are to stop. Its checkpoint writers are started as those of a
    user's run.
    """
    import warm_writers

    from pipeline.train import evaluators, loop, setup

    warm_writers.forget()
    place, steps, ears, overrides = argument
    owner, name, at = {
        "preparation": (setup, "dry_run_on_all_ranks", None),
        "evaluation": (evaluators.SplitEvaluator, "evaluate_on_all_ranks", 1),
        "step": (loop, "training_step", 2),
    }[place]
    function, heard = getattr(owner, name), told_to_stop()

    def halt_before(*arguments: Any) -> Any:
        if at is None or arguments[at] in steps:
            os.kill(os.getpid(), signal.SIGSTOP)
            if int(os.environ["RANK"]) in ears and (at is None or arguments[at] == steps[-1]):
                heard.wait()
                print("heard", flush=True)
        return function(*arguments)

    setattr(owner, name, halt_before)
    train([overrides])


def command(arguments: list[str]) -> None:
    """In a rank: a command line. arguments: a file of this repository, and what follows it."""
    sys.argv = arguments
    tempfile.tempdir = None  # As TMPDIR says now, not when the ranks' parent began.
    runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


class Forge:
    """Starts ranks of runs. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.asked = folder, [], 0
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _FORGE, json.dumps(sys.path)],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def __enter__(self) -> "Forge":
        return self

    def __exit__(self, *exception: object) -> None:
        for run in self.runs:
            run.kill()
        self.process.kill()
        self.process.wait()

    def start(self, world_size: int, *runs: list[str]) -> "ForkedRun":
        """Ranks that go through `runs`, one after another."""
        return self.start_work(world_size, "forked:train", runs)

    def start_work(self, world_size: int, function: str, argument: Any) -> "ForkedRun":
        """Ranks that call a function ("module:name", of a file of tests) with an argument that JSON can hold."""
        port = free_port()
        ranks = [
            {
                **os.environ,
                **ENVIRONMENT,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(world_size)
        ]
        output = self.folder / f"output-{len(self.runs)}"
        request = {"ranks": ranks, "function": function, "argument": argument, "output": str(output)}
        self.runs.append(ForkedRun(self, self.ask(request), output, port))
        return self.runs[-1]

    def ask(self, request: dict[str, Any]) -> list[int]:
        assert self.process.stdin
        assert self.process.stdout
        self.asked += 1
        self.process.stdin.write(json.dumps({"number": self.asked, **request}) + "\n")
        self.process.stdin.flush()
        number = 0
        while number != self.asked:
            number, answer = json.loads(self.process.stdout.readline())
        return answer


@dataclass
class ForkedRun:
    """The ranks of one start."""

    forge: Forge
    pids: list[int]
    output: Path
    port: int

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def wait(self, seconds: float = 570) -> list[int]:
        """The ranks' exit codes; those that are still there after so many seconds, or when a test is given up, are
        killed.
        """
        late = threading.Timer(seconds, self.kill)
        late.start()
        try:
            return self.forge.ask({"pids": self.pids})
        except BaseException:
            self.kill()
            raise
        finally:
            late.cancel()
            self.pids = []  # Other processes may have them from now on.

    def finish(self) -> str:
        """Wait for all ranks, and fail when one of them failed; what rank 0 said."""
        codes = self.wait()
        assert codes == [0] * len(codes), (codes, *map(self.said, range(len(codes))))
        return self.said()

    def kill(self) -> None:
        """SIGKILL all ranks that are left."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def has_halted(self) -> bool:
        """Whether all ranks stand still, as they do at a place of `train_with_halts`."""
        states = {psutil.Process(pid).status() for pid in self.pids}
        assert psutil.STATUS_ZOMBIE not in states, self.said(0) + self.said(1)
        return states == {psutil.STATUS_STOPPED}

    def has_left(self, rank: int) -> bool:
        """Whether a rank has ended, by itself or not; `wait` has its exit code."""
        return psutil.Process(self.pids[rank]).status() == psutil.STATUS_ZOMBIE

    def said(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        path = Path(f"{self.output}.{rank}")
        return path.read_text() if path.exists() else ""
