"""Ray, and the only file that imports it: a place to run tasks, and a bounded way to run many of them.

Ray reads its environment when it is imported, and that takes a second; so it is imported when the first task is due.
"""

import contextlib
import ctypes
import json
import math
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.data.storage.bucket import AnyPath, BucketPath, to_path
from pipeline.errors import UserError

A = TypeVar("A")
R = TypeVar("R")

_ROOT = Path(__file__).resolve().parent.parent
# Seconds before the first retry of a task, the second, ... and there are no more: a node that lacks memory needs time.
_PAUSES = (1.0, 5.0, 25.0)
# For what a cancelled task has half-written; waited for only as long as it takes.
_SECONDS_TO_TIDY_UP = 30.0
# How long the other ranks may take to leave after one has failed.
_SECONDS_TO_LEAVE = 30.0
_LOOK_SECONDS = 0.5
# For the head node to accept a connection.
_SECONDS_TO_ANSWER = 5.0
_LAST_LINES = 50
_PR_SET_PDEATHSIG = 1


def in_temporary_copy() -> bool:
    """Whether this process runs under `ray job submit --working-dir`: its current folder is a passing copy."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    return "working_dir" in (job.get("runtime_env") or {})


def shared_path(name: str, value: str) -> AnyPath:
    """The file or folder that a setting names, absolute. Raises UserError for one that is relative to a passing copy."""
    path = to_path(value)
    if isinstance(path, BucketPath):
        return path
    if in_temporary_copy() and not path.is_absolute():
        raise UserError(
            f"{name} = {value} is a relative path, but under `ray job submit` the job runs in a temporary copy of this "
            f"folder. Give an absolute path on storage that all nodes share: {name}=/..."
        )
    return path.resolve()


def connect(num_cpus: int = 0) -> int:
    """Join the cluster that RAY_ADDRESS or `ray job submit` name, else start one on this machine; how many CPUs it has.

    num_cpus: of a cluster started here; 0 is all there are.
    """
    _prepare_environment()
    _refuse_unreachable(os.environ.get("RAY_ADDRESS", ""))
    import ray

    _shorten_messages()
    if not ray.is_initialized():
        options: dict[str, Any] = {}
        if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
            pass  # The job's working_dir is this repository, and every worker has it.
        elif os.environ.get("RAY_ADDRESS"):
            options = {"runtime_env": {"py_modules": [str(_ROOT / "pipeline"), str(_ROOT / "data_tools")]}}
        else:
            # "local": else Ray would join what `ray start` has left on this machine, and refuse the other options.
            options = {"address": "local", "num_cpus": num_cpus or None, "include_dashboard": False,
                       "object_store_memory": 256 * 2**20}  # fmt: skip
        try:
            ray.init(logging_level="ERROR", log_to_driver=False, **options)
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            if not os.environ.get("RAY_ADDRESS"):
                raise
            raise _no_cluster(os.environ["RAY_ADDRESS"], _first_line(error)) from None
        if options.get("address") == "local":
            threading.Thread(target=_watch_node, name="Ray's node", daemon=True).start()
    return int(ray.cluster_resources().get("CPU", 1))


def _watch_node() -> None:
    """End this process, in one line, when the Ray node that it started on this machine dies.

    Ray's library would end it: it calls exit(1) as soon as it cannot reach the node's memory, and says nothing. A node ends with
    either of its agents. Relies on names inside of Ray; where another version has other names, nothing is watched.
    """
    import psutil
    import ray

    try:
        (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
        family = [psutil.Process(raylet.process.pid)]
        names = {child: " ".join(child.cmdline()) for child in family[0].children()}
        # Their arguments name the agents, too.
        family += [child for child, name in names.items() if "agent" in name.lower() and "default_worker" not in name]
        ends = [os.pidfd_open(process.pid) for process in family]
    except (AttributeError, KeyError, ValueError, OSError, psutil.Error):
        return
    ended, _, _ = select.select(ends, [], [])
    if not ray.is_initialized():
        return  # Shut down by us.
    what = "node" if ends[0] in ended else "node agent"
    lost = f"Ray's {what} on this machine died (killed, or out of memory: use fewer tasks at a time, num_tasks=...)."
    with contextlib.suppress(OSError):
        os.write(2, f"error: {lost} Run the same command again to go on.\n".encode())
    os._exit(2)


def _shorten_messages() -> None:
    """Let Ray print one line of what it has to say of a node that died, not its log: 60 lines that no user can act on.

    Replaces a private function of Ray's; where another version has none of the name, all is printed.
    """
    from ray._private import worker

    plain = getattr(worker, "print_to_stdstream", None)
    if plain is None or getattr(plain, "is_short", False):
        return

    def print_short(data: dict[str, Any], *rest: Any, **more: Any) -> None:
        lines = [str(line).strip().partition("\n")[0][:200] for line in data.get("lines", [])]
        plain({**data, "lines": lines}, *rest, **more)

    print_short.is_short = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_short


def _refuse_unreachable(address: str) -> None:
    """Raise UserError when nothing answers at RAY_ADDRESS: Ray itself would print warnings for a minute and more."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" or "local", which Ray looks up itself.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> UserError:
    return UserError(
        f"RAY_ADDRESS = {address[:200]}: there is no Ray cluster ({reason}). Start one (ray start --head), give the address of "
        "its head node, or unset RAY_ADDRESS to use this machine alone."
    )


def room(num_cpus: int, gpu_share: float) -> tuple[int, float]:
    """How many tasks of `num_cpus` CPUs fit at a time, and the GPUs of each: `gpu_share` where the cluster has any, or 0.

    Raises UserError when no node has room for one.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = gpu_share if any(node.get("GPU") for node in nodes) else 0.0
    of_nodes = [int(node.get("CPU", 0) // num_cpus) for node in nodes]
    if num_gpus:
        a_gpu = int(1 / num_gpus + 1e-6)
        of_nodes = [min(fit, int(node.get("GPU", 0)) * a_gpu) for fit, node in zip(of_nodes, nodes, strict=True)]
    if not sum(of_nodes):
        most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        raise UserError(f"threads = {num_cpus}, but no node of this cluster has so many CPUs: {most} at most.")
    return sum(of_nodes), num_gpus


def run_tasks(
    function: Callable[[A], R],
    arguments: Iterable[A],
    limit: int,
    on_retry: Callable[[str], None],
    on_failure: Callable[[int, str], None] | None = None,
    num_cpus: int = 1,
    num_gpus: float = 0.0,
) -> Generator[tuple[int, R]]:
    """Run function(argument) for each argument on the cluster; (number of the argument, result) as they finish.

    limit: tasks in flight; arguments are taken one by one as tasks finish. A task whose worker or node dies, or that raises
    LostError, is run again, up to 3 times, after longer and longer pauses; on_retry is told why. Any other exception of a
    task is raised here as it was raised there, and the tasks still in flight are cancelled.
    on_failure: if given, is told the number and the error of a task that fails instead, and the others go on. Then a task
    that raises anything but a UserError is run again as well. num_cpus, num_gpus: what a task takes of its node.
    """
    import ray

    def attempt(argument: A, pause: float) -> R:
        time.sleep(pause)
        return function(argument)

    # Ray's own retries are not told to anyone. (With a GPU, and with all options given here, not by options(), each task
    # gets a process of its own, whose GPU memory is free when it ends.)
    options = {"name": function.__name__, "num_cpus": num_cpus, "max_retries": 0}
    remote = ray.remote(**options, **({"num_gpus": num_gpus} if num_gpus else {}))(attempt)
    waiting = enumerate(arguments)
    flying: dict[Any, _Task] = {}

    def launch() -> None:
        for number, argument in waiting:
            task = _Task(number, ray.put(argument))
            flying[remote.remote(task.argument, 0.0)] = task
            if len(flying) >= limit:
                break

    try:
        launch()
        while flying:
            (reference,), _ = ray.wait(list(flying), num_returns=1)
            task = flying.pop(reference)
            try:
                result = _result(reference)
            except Exception as error:
                try:
                    pause = task.next_pause(error, or_whatever=on_failure is not None)
                except Exception as last:
                    if on_failure is None:
                        raise
                    on_failure(task.number, _in_one_line(last))
                    launch()
                    continue
                on_retry(_in_one_line(error))
                flying[remote.remote(task.argument, pause)] = task
                continue
            launch()
            yield task.number, result
    except ray.exceptions.RayError as error:  # Not of a task: the cluster itself is gone.
        flying.clear()
        raise _node_lost(error) from None
    finally:
        # By an exception in the task, so that it removes what it has half-written; those that do not hear it are killed.
        for reference in flying:
            ray.cancel(reference)
        deaf = ray.wait(list(flying), num_returns=len(flying), timeout=_SECONDS_TO_TIDY_UP)[1] if flying else []
        for reference in deaf:
            ray.cancel(reference, force=True)


@dataclass
class _Task:
    """A task in flight. argument: where Ray keeps it, so that a retry does not need it held here."""

    number: int
    argument: Any
    retries: int = 0

    def next_pause(self, error: Exception, or_whatever: bool) -> float:
        """Count a retry after this error; seconds to wait before it.

        Raises the error when it is no reason to try again: all but a LostError, or (or_whatever) a UserError alone. Raises
        UserError, or the error, when there were too many.
        """
        is_lost = isinstance(error, LostError)
        if not is_lost and (isinstance(error, UserError) or not or_whatever):
            raise error
        if self.retries == len(_PAUSES):
            if not is_lost:
                raise error
            raise UserError(
                f"Ray gave up on a task after {self.retries} retries: {error} If memory ran out, use fewer tasks at a "
                "time (num_tasks=...); run the same command again to go on."
            )
        self.retries += 1
        return _PAUSES[self.retries - 1]


class LostError(Exception):
    """A task ended for no reason of its own: with its worker, or (it says so itself) because its machine failed it."""


def _result(reference: Any) -> Any:
    """Raises what the task raised, LostError when its worker died, UserError when Ray cannot run it."""
    import ray

    errors = ray.exceptions
    try:
        return ray.get(reference)
    except errors.RayTaskError as error:
        # Ray's own copy of the exception has the worker's traceback for a message.
        raise error.cause from None
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError) as error:
        raise LostError(_first_line(error)) from None
    except errors.RayError as error:
        raise _node_lost(error) from None


def _node_lost(error: Exception) -> UserError:
    return UserError(f"Ray cannot run a task: {_first_line(error)} Run the same command again to go on.")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _in_one_line(error: Exception) -> str:
    """What an error says; of one that is not ours, its kind too."""
    said = " ".join(str(error).split())
    return said if isinstance(error, (UserError, LostError)) else f"{type(error).__name__}: {said}"


def run_ranks(
    command: Sequence[str], num_ranks: int, cpus: int, say: Callable[[str], None], stopping: Callable[[], bool]
) -> int:
    """Run a Python command as the ranks of one process group, an actor for each; returns the worst of the exit codes.

    command: a script and its arguments, as under any other launcher: it finds RANK, LOCAL_RANK, ... in its environment.
    num_ranks: 0 is as many as there is room for: one on each GPU, or on `cpus` CPUs where the cluster has no GPU.
    say: told where the ranks are, and every line that rank 0 prints, or another rank that fails. stopping: True
    once the ranks are to be stopped with SIGTERM, after which they leave by themselves. A rank that fails, or whose node
    dies, ends the others, who would wait for it. Raises UserError when there is no room, or a rank is lost.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = ray.cluster_resources()
    num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    room = num_gpus or num_cpus // cpus
    num_ranks = num_ranks or room
    if not 0 < num_ranks <= room:
        has = f"{num_gpus} GPUs" if num_gpus else f"{num_cpus} CPUs, for {room} ranks of {cpus}"
        raise UserError(f"--ranks {num_ranks} do not fit on this cluster: it has {has}.")
    share: dict[str, float] = {"CPU": 1, "GPU": 1} if num_gpus else {"CPU": cpus}
    group = placement_group([share] * num_ranks, strategy="PACK")
    ray.get(group.ready())
    # Each rank sees all GPUs of its host, and takes that of its LOCAL_RANK: NCCL's direct copies need both ends.
    visible = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    actors = [
        ray.remote(_Rank)
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
    try:
        places = _get_from_rank([actor.place.remote() for actor in actors])
        port = _get_from_rank(actors[0].free_port.remote())
        for rank, (actor, of_rank) in enumerate(zip(actors, rank_environments(places, port, cpus), strict=True)):
            say(f"rank {rank} on {places[rank].address}, {of_rank['LOCAL_RANK']} of {of_rank['LOCAL_SIZE']} there")
            _get_from_rank(actor.start.remote(list(command), of_rank))
        return _follow(actors, say, stopping)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


@dataclass(frozen=True)
class Place:
    """Where an actor runs. gpu: the number of its GPU on that node, or -1."""

    address: str
    gpu: int


def rank_environments(places: Sequence[Place], port: int, cpus: int) -> list[dict[str, str]]:
    """What a launcher tells each rank; rank 0, on the first place, is the master."""
    hosts = [place.address for place in places]
    environments = []
    for rank, place in enumerate(places):
        local = hosts[:rank].count(place.address)
        environments.append(
            {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "MASTER_ADDR": hosts[0], "MASTER_PORT": str(port),
             "LOCAL_RANK": str(local if place.gpu < 0 else place.gpu), "LOCAL_SIZE": str(hosts.count(place.address)),
             "OMP_NUM_THREADS": str(cpus)}
        )  # fmt: skip
    return environments


class _Rank:
    """An actor that keeps one rank: a process of its own, so that signals and exits mean what they mean elsewhere."""

    def place(self) -> Place:
        import ray

        gpus = ray.get_gpu_ids()
        return Place(ray.util.get_node_ip_address(), int(gpus[0]) if gpus else -1)

    def free_port(self) -> int:
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command], env={**os.environ, **environment}, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def look(self) -> tuple[list[str], int | None]:
        """New lines of output, and the exit code when it has ended: -9 for SIGKILL."""
        code = self.process.poll()
        if code is not None:
            # Its last words; not for ever, as a process that it left behind may hold the pipe.
            self.reader.join(timeout=1)
        lines = []
        with contextlib.suppress(queue.Empty):
            while True:
                lines.append(self.lines.get_nowait())
        return lines, code

    def terminate(self) -> None:
        self.process.terminate()


def _follow(actors: Sequence[Any], say: Callable[[str], None], stopping: Callable[[], bool]) -> int:
    """Pass on what the ranks print until all have ended; the worst exit code."""
    kept = [deque[str](maxlen=_LAST_LINES) for _ in actors]
    codes: list[int | None] = [None] * len(actors)
    told, deadline = False, math.inf
    while None in codes and time.monotonic() < deadline:
        if stopping() and not told:
            told = True
            for actor in actors:
                actor.terminate.remote()
        for rank, (lines, code) in enumerate(_get_from_rank([actor.look.remote() for actor in actors])):
            kept[rank].extend(lines)
            if rank == 0:
                for line in lines:
                    say(line)
            if code and codes[rank] is None:
                deadline = min(deadline, time.monotonic() + _SECONDS_TO_LEAVE)
                for line in kept[rank] if rank else ():
                    say(f"rank {rank}: {line}")
                say(f"rank {rank} ended with exit code {code}")
            codes[rank] = code
        time.sleep(_LOOK_SECONDS)
    # A rank that a signal killed has a negative code; those that had to be killed after it have none.
    return max((abs(code) for code in codes if code is not None), default=1)


def _get_from_rank(references: Any) -> Any:
    """Raises UserError when the actor, or its node, is gone."""
    import ray

    try:
        return ray.get(references)
    except ray.exceptions.RayError as error:
        raise UserError(
            f"a rank is lost: {_first_line(error)} Run the same command again to go on from the last checkpoint."
        ) from None


def _die_with_parent() -> None:
    """In the child, before it runs: the kernel kills it when the actor dies, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prepare_environment() -> None:
    """What Ray and its workers read; a cluster on this machine inherits it."""
    # When several tasks fail, the first one's error is ours to tell; Ray would print tracebacks of the others.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or os.environ.get("RAY_ADDRESS"):
        return
    # Without a token in the environment, Ray writes one into the home folder, which every later cluster then requires.
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
