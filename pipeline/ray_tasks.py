"""Ray, and the only file that imports it: connect to a cluster, run many tasks with bounded memory, run the ranks of a training.

Ray reads its environment when it is imported, and the import takes a second, so functions import it.
"""

import contextlib
import itertools
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import Stopped, UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath, BucketPath, is_utf8, to_path
from pipeline.process.rank_process import (
    Place,
    RankProcess,
    amounts,
    local_gpu,
    rank_environments,
    ranks_that_fit,
    wait_for_ranks,
)
from pipeline.process.waits import waiting
from pipeline.settings.quantities import whole_number

A = TypeVar("A")
R = TypeVar("R")

_ROOT = Path(__file__).resolve().parent.parent
# Seconds before each retry of a task: a node that is out of memory needs time.
RETRY_PAUSES = (1.0, 5.0, 25.0)
# How long tasks may still end by themselves before they are cancelled, in seconds.
_ENDING_SECONDS = 1.0
# Timeout for cancelled tasks to remove their unfinished files, in seconds.
_CANCEL_SECONDS = 30.0
# Timeout of a connection to the head node, in seconds.
_CONNECT_SECONDS = 5.0
# Interval at which a wait for resources looks for a request to stop, in seconds.
_POLL_SECONDS = 0.5


def shared_path(name: str, value: str) -> AnyPath:
    """The absolute path of the setting `name`.

    Raises UserError for a relative one under `ray job submit --working-dir`, and for one that is not UTF-8.
    """
    path = to_path(value)
    if isinstance(path, BucketPath):
        return path
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    if "working_dir" in (job.get("runtime_env") or {}) and not path.is_absolute():
        raise UserError(
            f"{name} = {value} is a relative path, but under `ray job submit` the job runs in a temporary copy of this "
            f"folder. Give an absolute path on storage that all nodes share: {name}=/..."
        )
    absolute = path.resolve()
    if not is_utf8(str(absolute)):
        raise UserError(
            f"{name} = {value}: the path {absolute} is not UTF-8, as Ray and Parquet require. Rename its folders."
        )
    return absolute


# -------------------------------------------------------------------- connecting
def connect(num_cpus: int = 0) -> int:
    """Join the cluster of RAY_ADDRESS or `ray job submit`, else start one on this machine. Returns its number of CPUs.

    num_cpus: size of a cluster that is started here; 0 is all CPUs. Raises UserError when the cluster cannot be reached.
    """
    _prepare_environment()
    _check_reachable(os.environ.get("RAY_ADDRESS", ""))
    import ray

    _shorten_messages()
    if not ray.is_initialized():
        options: dict[str, Any] = {}
        if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
            pass  # Every worker has this library: the job's working_dir is this repository, or it is installed.
        elif os.environ.get("RAY_ADDRESS"):
            options = {"runtime_env": {"py_modules": [str(_ROOT / "pipeline"), str(_ROOT / "data_tools")]}}
        else:
            # "local", because Ray would otherwise join a cluster that `ray start` left running, and refuse the other options.
            options = {"address": "local", "num_cpus": num_cpus or None, "include_dashboard": False,
                       "object_store_memory": 256 * 2**20}  # fmt: skip
        try:
            ray.init(logging_level="ERROR", log_to_driver=False, **options)
        except (ConnectionError, TimeoutError, RuntimeError) as error:
            if not os.environ.get("RAY_ADDRESS"):
                raise
            raise _no_cluster(os.environ["RAY_ADDRESS"], _first_line(error)) from None
        if options.get("address") == "local":
            threading.Thread(target=_exit_with_node, name="Ray's node", daemon=True).start()
    return int(ray.cluster_resources().get("CPU", 1))


def disconnect() -> None:
    """Leave the cluster, and end it if it was started here; otherwise it takes processor time until this process exits."""
    import ray

    ray.shutdown()


def capacity(num_cpus: int, gpus: float) -> tuple[int, float]:
    """Returns (number of tasks that fit at a time, GPUs of each task).

    num_cpus: CPUs of a task. gpus: GPUs of a task, or a share of one, if the cluster has any. Raises UserError when no node can run one.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = gpus if any(node.get("GPU") for node in nodes) else 0.0
    num_fitting = [int(node.get("CPU", 0) // num_cpus) for node in nodes]
    if num_gpus:
        of_nodes = [int(node.get("GPU", 0)) for node in nodes]
        tasks = [n * int(1 / num_gpus + 1e-6) if num_gpus < 1 else int(n // num_gpus) for n in of_nodes]
        num_fitting = [min(pair) for pair in zip(num_fitting, tasks, strict=True)]
        if not any(tasks):
            raise UserError(f"gpus = {gpus:g}, but no node of this cluster has so many GPUs: {max(of_nodes)} at most.")
    if not sum(num_fitting):
        most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        raise UserError(f"threads = {num_cpus}, but no node of this cluster has so many CPUs: {most} at most.")
    return sum(num_fitting), num_gpus


def _prepare_environment() -> None:
    """Set the variables that Ray and its workers read; a cluster on this machine inherits them."""
    # When several tasks fail, we report the first error; Ray would print tracebacks of the others.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ or os.environ.get("RAY_ADDRESS"):
        return
    # Without a token in the environment, Ray writes one into the home folder, which every later cluster then requires.
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def _check_reachable(address: str) -> None:
    """Raise UserError when nothing listens at RAY_ADDRESS. Ray itself would print warnings for over a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    number = whole_number(port)
    if not host or number is None:
        return  # "auto" or "local", which Ray resolves.
    try:
        socket.create_connection((host.strip("[]"), number), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> UserError:
    return UserError(
        f"RAY_ADDRESS = {address[:200]}: there is no Ray cluster ({reason}). Start one (ray start --head), give the address of "
        "its head node, or unset RAY_ADDRESS to use this machine alone."
    )


def _exit_with_node() -> None:
    """Exit with one line of explanation when the Ray node that this process started dies.

    Ray's library would call exit(1) without a message as soon as it cannot reach the node's memory. A node dies with either of
    its agents. This uses private names of Ray; in a version that has others, nothing is watched.
    """
    import psutil
    import ray

    try:
        (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
        processes = [psutil.Process(raylet.process.pid)]
        commands = {child: " ".join(child.cmdline()) for child in processes[0].children()}
        # Workers' arguments contain the agents' names, too.
        processes += [
            child for child, text in commands.items() if "agent" in text.lower() and "default_worker" not in text
        ]
        descriptors = [os.pidfd_open(process.pid) for process in processes]
    except (AttributeError, KeyError, ValueError, OSError, psutil.Error):
        return
    ended, _, _ = select.select(descriptors, [], [])
    if not ray.is_initialized():
        return  # Shut down by this process.
    what = "node" if descriptors[0] in ended else "node agent"
    lost = f"Ray's {what} on this machine died (killed, or out of memory: use fewer tasks at a time, num_tasks=...)."
    with contextlib.suppress(OSError):
        os.write(2, f"error: {lost} Run the same command again to continue.\n".encode())
    os._exit(2)


def _shorten_messages() -> None:
    """Make Ray print one line about a dead node instead of 60 lines of its log.

    Replaces a private function of Ray; in a version without it, all lines are printed.
    """
    from ray._private import worker

    original = getattr(worker, "print_to_stdstream", None)
    if original is None or getattr(original, "is_short", False):
        return

    def print_short(data: dict[str, Any], *rest: Any, **more: Any) -> None:
        lines = [str(line).strip().partition("\n")[0][:200] for line in data.get("lines", [])]
        original({**data, "lines": lines}, *rest, **more)

    print_short.is_short = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_short


# -------------------------------------------------------------------- tasks
class LostError(Exception):
    """A task failed through no fault of its own: its worker died, or it reports a failure of its machine. It is retried."""


def run_tasks(
    function: Callable[[A], R],
    arguments: Iterable[A],
    limit: int,
    on_retry: Callable[[str], None],
    on_failure: Callable[[int, str], None] | None = None,
    num_cpus: int = 1,
    num_gpus: float = 0.0,
    pauses: Sequence[float] = RETRY_PAUSES,
) -> Generator[tuple[int, R]]:
    """Run function(argument) for each argument on the cluster; yields (index of the argument, result) as tasks finish.

    limit: most tasks in flight; arguments are taken one by one as tasks finish. num_cpus, num_gpus: resources of a task.
    pauses: seconds before each retry. A task whose worker or node dies, or that raises LostError, is retried that many
    times, and on_retry is called with the reason. Any other exception of a task is raised here, and the tasks in flight are
    cancelled.
    on_failure: if given, it is called with index and error of a task that fails, and the others continue. A task that raises
    anything but a UserError is then retried, too.
    """
    import ray

    def attempt(argument: A, pause: float) -> R:
        time.sleep(pause)
        return function(argument)

    # No retries by Ray itself, which does not report them. With a GPU, and if all options are given here, not by options(),
    # each task gets a process of its own, which frees its GPU memory at the end.
    options = {"name": function.__name__, "num_cpus": num_cpus, "max_retries": 0}
    remote = ray.remote(**options, **({"num_gpus": num_gpus} if num_gpus else {}))(attempt)
    remaining = enumerate(arguments)
    in_flight: dict[Any, _Task] = {}

    def start_more() -> None:
        for index, argument in itertools.islice(remaining, limit - len(in_flight)):
            task = _Task(index, ray.put(argument), pauses)
            in_flight[remote.remote(task.argument, 0.0)] = task

    try:
        start_more()
        while in_flight:
            (reference,), _ = ray.wait(list(in_flight), num_returns=1)
            task = in_flight.pop(reference)
            try:
                result = _result(reference)
            except Exception as error:
                try:
                    pause = task.pause_after(error, retry_any=on_failure is not None)
                except Exception as last:
                    if on_failure is None:
                        raise
                    on_failure(task.index, _in_one_line(last))
                    start_more()
                    continue
                on_retry(_in_one_line(error))
                in_flight[remote.remote(task.argument, pause)] = task
                continue
            start_more()
            yield task.index, result
    except ray.exceptions.RayError as error:  # Not of a task: the cluster itself is gone.
        in_flight.clear()
        raise _cannot_run(error) from None
    finally:
        _cancel(list(in_flight))


@dataclass
class _Task:
    """A task in flight. argument: reference to it in Ray's object store, for a retry."""

    index: int
    argument: Any
    pauses: Sequence[float]
    num_retries: int = 0

    def pause_after(self, error: Exception, retry_any: bool) -> float:
        """Seconds to wait before the task is retried after this error.

        Raises the error if it is no reason to retry; raises it, or a UserError, if there were too many retries.
        retry_any: retry after all errors but UserError, not after LostError alone.
        """
        is_lost = isinstance(error, LostError)
        if not is_lost and (isinstance(error, UserError) or not retry_any):
            raise error
        if self.num_retries < len(self.pauses):
            self.num_retries += 1
            return self.pauses[self.num_retries - 1]
        if not is_lost:
            raise error
        raise UserError(
            f"Ray gave up on a task after {counted(self.num_retries, 'retry')}: {error} If memory ran out, use fewer tasks at a "
            "time (num_tasks=...); run the same command again to continue."
        )


def _cancel(references: list[Any]) -> None:
    """Cancel tasks by an exception, so that they remove unfinished files; kill those that do not end in time.

    Tasks that are about to end may do so: Ray 2.60 aborts this process, without a word of ours, when it is told to cancel a
    task whose result is just arriving ("Tried to complete task that was not pending").
    """
    import ray

    def wait(references: list[Any], seconds: float) -> list[Any]:
        """The tasks that run after so many seconds."""
        return ray.wait(references, num_returns=len(references), timeout=seconds)[1] if references else []

    running = wait(references, _ENDING_SECONDS)
    for reference in running:
        ray.cancel(reference)
    for reference in wait(running, _CANCEL_SECONDS):
        ray.cancel(reference, force=True)


def _result(reference: Any) -> Any:
    """Raises what the task raised, LostError when its worker died, and UserError when Ray cannot run it."""
    import ray

    errors = ray.exceptions
    try:
        return ray.get(reference)
    except errors.RayTaskError as error:
        # The message of Ray's own copy of the exception is the worker's traceback.
        raise error.cause from None
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError) as error:
        raise LostError(_first_line(error)) from None
    except errors.RayError as error:
        raise _cannot_run(error) from None


def _cannot_run(error: Exception) -> UserError:
    return UserError(f"Ray cannot run a task: {_first_line(error)} Run the same command again to continue.")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _in_one_line(error: Exception) -> str:
    """An error's message, after its type unless it is one of ours."""
    message = " ".join(str(error).split())
    return message if isinstance(error, (UserError, LostError)) else f"{type(error).__name__}: {message}"


# -------------------------------------------------------------------- ranks of a training
class _RankActor(RankProcess):
    def place(self) -> Place:
        import ray

        gpus = ray.get_gpu_ids()
        gpu = local_gpu(str(gpus[0]), os.environ.get("CUDA_VISIBLE_DEVICES")) if gpus else -1
        return Place(ray.util.get_node_ip_address(), gpu)


def run_ranks(
    command: Sequence[str], num_ranks: int, cpus: int, say: Callable[[str], None], stopping: Callable[[], bool],
    wait_minutes: float = 10.0,
) -> int:  # fmt: skip
    """Run a Python command as the ranks of one process group, each in an actor; returns the largest exit code.

    command: Python's arguments (a script, or -m and a module, and its settings); it finds RANK, LOCAL_RANK, ... in its environment, as under any other launcher.
    num_ranks: 0 is as many as fit: one per GPU, or per `cpus` CPUs if the cluster has no GPU.
    say: called with the ranks' nodes, and as in `wait_for_ranks`. stopping: True once the ranks are to be stopped by SIGTERM,
    after which they exit by themselves. A rank that fails, or whose node dies, ends the others, which would wait for it.
    wait_minutes: how long to wait for resources that other jobs hold.
    Raises UserError when the ranks do not fit, their resources do not become free, or a rank is lost; Stopped if `stopping` before
    they run.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    num_ranks, share = ranks_that_fit(nodes, num_ranks, cpus)

    def get(references: Any, what: str, limit: UserError) -> Any:
        """The results; what, limit: what is waited for, and the error after wait_minutes."""
        with waiting(what, 60 * wait_minutes, "--wait-minutes", say=say) as wait:
            while ray.wait(references, num_returns=len(references), timeout=_POLL_SECONDS)[1]:
                if stopping():
                    raise Stopped
                if wait.left <= 0:
                    raise limit
        return _get_from_rank(references)

    group = placement_group([share] * num_ranks, strategy="PACK")
    try:
        needed = amounts({name: num_ranks * amount for name, amount in share.items()})
        free = ray.available_resources()
        left = amounts({name: free.get(name, 0) for name in share})
        busy = UserError(
            f"the resources of {counted(num_ranks, 'rank')} ({needed}) did not become free within {wait_minutes:g} minutes (--wait-minutes); when "
            f"this began, these were: {left}. End other jobs, use fewer --ranks, or wait longer."
        )
        get([group.ready()], f"{needed}, of which other jobs hold some (free: {left})", busy)
        return _run_in_group(group, list(command), num_ranks, share, cpus, get, say, stopping)
    finally:
        remove_placement_group(group)


def _run_in_group(
    group: Any, command: list[str], num_ranks: int, share: dict[str, float], cpus: int, get: Callable[..., Any],
    say: Callable[[str], None], stopping: Callable[[], bool],
) -> int:  # fmt: skip
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Each rank sees all GPUs of its host and uses that of its LOCAL_RANK: NCCL's peer-to-peer copies need both GPUs visible.
    visible = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    actors = [
        ray.remote(_RankActor)
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

    def poll() -> list[tuple[list[str], int | None]]:
        return _get_from_rank([actor.poll.remote() for actor in actors])

    def terminate() -> None:
        for actor in actors:
            actor.terminate.remote()

    try:
        late = UserError("Ray did not start the processes of the ranks. See its logs (ray logs) for the cause.")
        places = get([actor.place.remote() for actor in actors], "Ray to start a process for each rank", late)
        port = _get_from_rank(actors[0].free_port.remote())
        for rank, (actor, variables) in enumerate(zip(actors, rank_environments(places, port, cpus), strict=True)):
            say(f"rank {rank} on {places[rank].address}, {variables['LOCAL_RANK']} of {variables['LOCAL_SIZE']} there")
            _get_from_rank(actor.start.remote(command, variables))
        return wait_for_ranks(num_ranks, poll, terminate, say, stopping)
    finally:
        for actor in actors:
            ray.kill(actor)


def _get_from_rank(references: Any) -> Any:
    """Raises UserError when an actor or its node died."""
    import ray

    try:
        return ray.get(references)
    except ray.exceptions.RayError as error:
        raise UserError(
            f"a rank is lost: {_first_line(error)} Run the same command again to continue from the last checkpoint."
        ) from None
