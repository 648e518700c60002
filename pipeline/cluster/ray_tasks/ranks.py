"""Runs the ranks of a training on a Ray cluster, each in an actor: whether they fit, what a launcher tells them, output
and exit code.
"""

import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.base.errors import CrashError, Stopped, UserError
from pipeline.base.words import counted
from pipeline.cluster.ray_tasks.cluster import first_line
from pipeline.process.launcher import free_port
from pipeline.process.start import dying_with_parent
from pipeline.process.waits import NOTICE_SECONDS

# Seconds between two polls of the ranks, and of a wait for resources for a request to stop.
_POLL_SECONDS = 0.5
# Lines of output that are kept of a rank, and printed if it fails.
_KEPT_LINES = 50


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs. address: of its node. gpu: index of its GPU there, as CUDA counts them in the rank, or -1.
    port: free there.
    """

    address: str
    gpu: int
    port: int = 0


def ranks_that_fit(
    nodes: Sequence[tuple[str, Mapping[str, float]]], num_ranks: int, cpus: int
) -> tuple[int, dict[str, float]]:
    """Returns (number of ranks, resources of each). A rank needs a GPU and a CPU of one node, or `cpus` CPUs if no node
    has a GPU.

    nodes: (address, number of "CPU" and "GPU") of each. num_ranks: 0 is as many as fit. Raises UserError with the
    arithmetic.
    """
    on_gpus = any(has.get("GPU") for _, has in nodes)
    share: dict[str, float] = {"CPU": 1, "GPU": 1} if on_gpus else {"CPU": cpus}
    fitting = [int(min(has.get(name, 0) // needed for name, needed in share.items())) for _, has in nodes]
    most = sum(fitting)
    if 0 < (num_ranks or most) <= most:
        return num_ranks or most, share
    arithmetic = ", ".join(f"{count} on {address}" for count, (address, _) in zip(fitting, nodes, strict=True) if count)
    raise UserError(
        f"--ranks {num_ranks} do not fit on this cluster. A rank needs {amounts(share)} of one node, so {most} fit:"
        f" {arithmetic or 'none'}."
    )


def amounts(resources: Mapping[str, float]) -> str:
    """Such as "8 CPUs, 1 GPU"."""
    return ", ".join(counted(round(number), name) for name, number in resources.items())


def local_gpu(identity: str, visible: str | None) -> int:
    """The index by which CUDA knows a GPU: its place in CUDA_VISIBLE_DEVICES (`visible`), if that is set.

    identity: as Ray says it, an entry of that variable: the GPU's number, or its UUID. Raises ValueError for another
    one.
    """
    return int(identity) if not visible else [entry.strip() for entry in visible.split(",")].index(identity)


def rank_environments(places: Sequence[RankPlacement], cpus: int) -> list[dict[str, str]]:
    """Environment variables of each rank, as a launcher sets them; rank 0, on the first place, is the master."""
    hosts = [place.address for place in places]
    environments = []
    for rank, place in enumerate(places):
        local = hosts[:rank].count(place.address)
        environments.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": hosts[0],
                "MASTER_PORT": str(places[0].port),
                "LOCAL_RANK": str(local if place.gpu < 0 else place.gpu),
                "LOCAL_SIZE": str(hosts.count(place.address)),
                "OMP_NUM_THREADS": str(cpus),
            }
        )
    return environments


class RankProcess:
    """One rank, in a process of its own, so that signals and exit codes work as under any other launcher."""

    def place(self) -> RankPlacement:
        import ray

        gpus = ray.get_gpu_ids()
        gpu = local_gpu(str(gpus[0]), os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus else -1
        return RankPlacement(ray.util.get_node_ip_address(), gpu, free_port())

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start a Python script with its arguments."""
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env={**os.environ, **environment},
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=dying_with_parent(),
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def poll(self) -> tuple[list[str], int | None]:
        """Returns (new lines of output, exit code or None); the code is negative after a signal, -9 for SIGKILL."""
        code = self.process.poll()
        if code is not None:
            # For its last lines. With a timeout, because a process that it left behind may hold the pipe open.
            self.reader.join(timeout=1)
        return [self.lines.get() for _ in range(self.lines.qsize())], code

    def terminate(self) -> None:
        self.process.terminate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))


def wait_for_ranks(
    num_ranks: int,
    poll: Callable[[], Sequence[tuple[list[str], int | None]]],
    terminate: Callable[[], None],
    say: Callable[[str], None],
    stopping: Callable[[], bool],
    exit_seconds: float = 30.0,
) -> int:
    """Wait until all ranks have exited; returns the largest exit code.

    poll, terminate: `RankProcess.poll` and `.terminate` of all ranks. say: called with rank 0's output, and with the
    last lines of a rank that fails. stopping: True once the ranks are to be terminated. exit_seconds: time that the
    others get to exit after one fails.
    """
    last_lines = [deque[str](maxlen=_KEPT_LINES) for _ in range(num_ranks)]
    codes: list[int | None] = [None] * num_ranks
    terminated, deadline = False, math.inf
    while None in codes and time.monotonic() < deadline:
        for rank, (lines, code) in enumerate(poll()):
            last_lines[rank].extend(lines)
            for line in lines if rank == 0 else ():
                say(line)
            if code and codes[rank] is None:
                deadline = min(deadline, time.monotonic() + exit_seconds)
                for line in last_lines[rank] if rank else ():
                    say(f"rank {rank}: {line}")
                say(f"rank {rank} ended with exit code {code}")
            codes[rank] = code
        # With code 2, rank 0 has said the mistake that the others have made, too: they wait to be ended.
        if not terminated and (codes[0] == 2 or stopping()):
            terminated = True
            terminate()
        time.sleep(_POLL_SECONDS)
    if codes[0] == 2:  # Also where the others were ended by a signal, or left as if they were to be started again.
        return 2
    # A rank that a signal killed has a negative code; one that did not exit in time has none.
    return max((abs(code) for code in codes if code is not None), default=1)


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    cpus: int,
    say: Callable[[str], None],
    stopping: Callable[[], bool],
) -> int:
    """Run a Python command as the ranks of one process group, each in an actor; returns the largest exit code.

    command: Python's arguments (a script, or -m and a module, and its settings); it finds RANK, LOCAL_RANK, ... in its
    environment, as under any other launcher.
    num_ranks: 0 is as many as fit: one per GPU, or per `cpus` CPUs if the cluster has no GPU.
    say: called with the ranks' nodes, and as in `wait_for_ranks`. stopping: True once the ranks are to be stopped by
    SIGTERM, after which they exit by themselves. A rank that fails, or whose node dies, ends the others, which would
    wait for it.
    Waits for resources that other jobs hold. Raises UserError when the ranks do not fit; CrashError when a rank is
    lost; Stopped if `stopping` before they run.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    num_ranks, share = ranks_that_fit(nodes, num_ranks, cpus)

    def get(references: Any, what: str) -> Any:
        """The results. what: what is waited for."""
        if ray.wait(references, num_returns=len(references), timeout=NOTICE_SECONDS)[1]:
            say(f"waiting for {what}")
        while ray.wait(references, num_returns=len(references), timeout=_POLL_SECONDS)[1]:
            if stopping():
                raise Stopped
        return _get_from_rank(references)

    def poll() -> list[tuple[list[str], int | None]]:
        return _get_from_rank([actor.poll.remote() for actor in actors])

    def terminate() -> None:
        for actor in actors:
            actor.terminate.remote()

    actors: list[Any] = []
    group = placement_group([share] * num_ranks, strategy="PACK")
    try:
        needed = amounts({name: num_ranks * amount for name, amount in share.items()})
        free = ray.available_resources()
        left = amounts({name: free.get(name, 0) for name in share})
        get([group.ready()], f"{needed}, of which other jobs hold some (free: {left})")
        # Each rank sees all GPUs of its host and uses that of its LOCAL_RANK: NCCL's peer-to-peer copies need both GPUs
        # visible.
        visible = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        actors = [
            ray.remote(RankProcess)
            .options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                max_concurrency=2,
                runtime_env=visible,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
            for number in range(num_ranks)
        ]
        places = get([actor.place.remote() for actor in actors], "Ray to start a process for each rank")
        for rank, (actor, variables) in enumerate(zip(actors, rank_environments(places, cpus), strict=True)):
            say(f"rank {rank} on {places[rank].address}, {variables['LOCAL_RANK']} of {variables['LOCAL_SIZE']} there")
            _get_from_rank(actor.start.remote(list(command), variables))
        return wait_for_ranks(num_ranks, poll, terminate, say, stopping)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _get_from_rank(references: Any) -> Any:
    """Raises CrashError when an actor or its node died."""
    import ray

    try:
        return ray.get(references)
    except ray.exceptions.RayError as error:
        raise CrashError(f"a rank is lost: {first_line(error)} Run the same command again to continue.") from None
