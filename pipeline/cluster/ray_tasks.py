"""Ray, which no other file imports: connects to a cluster, or starts one on this machine; runs many tasks there with
bounded memory, a limited number at a time, each retried when its node is lost; and runs the ranks of a training, each
in an actor.

Ray reads its environment when it is imported, and the import takes a second, so functions import it.
"""

import itertools
import json
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.base.errors import CrashError, Stopped, UserError
from pipeline.base.words import counted, on_one_line
from pipeline.data.storage.bucket import AnyPath, BucketPath, is_utf8, to_path
from pipeline.process import waits
from pipeline.process.launcher import free_port
from pipeline.process.start import dying_with_parent
from pipeline.settings.command import mistake_in_words
from pipeline.settings.quantities import whole_number

A = TypeVar("A")
R = TypeVar("R")

_ROOT = Path(__file__).resolve().parents[2]
# Timeout of a connection to the head node, in seconds.
_CONNECT_SECONDS = 5.0
# How long a node of this machine may take to start, in seconds; Ray's 30 are too few on a busy machine.
_START_SECONDS = 120
# Seconds between two polls of the ranks, and of a wait for resources for a request to stop.
_POLL_SECONDS = 0.5
# Lines of output that are kept of a rank, and printed if it fails.
_KEPT_LINES = 50
# The variable, JSON, that tells the command of `ray job submit` about its job.
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Seconds before each retry of a task: a node that is out of memory needs time.
RETRY_PAUSES = (1.0, 5.0, 25.0)
# How long tasks may still end by themselves before they are cancelled, in seconds.
_ENDING_SECONDS = 1.0
# Timeout for cancelled tasks to remove their unfinished files, in seconds.
_CANCEL_SECONDS = 30.0


# ---------------------------------------------------------------------- a cluster
def shared_path(name: str, value: str) -> AnyPath:
    """The absolute path of the setting `name`.

    Raises UserError for a relative one under `ray job submit --working-dir`, and for one that is not UTF-8.
    """
    path = to_path(value)
    if isinstance(path, BucketPath):
        return path
    job = json.loads(os.environ.get(_JOB) or "{}")
    if "working_dir" in (job.get("runtime_env") or {}) and not path.is_absolute():
        raise UserError(
            f"{name} = {value} is a relative path, but under `ray job submit` the job runs in a temporary copy of this "
            f"folder. Give an absolute path on storage that all nodes share: {name}=/..."
        )
    absolute = path.resolve()
    if not is_utf8(str(absolute)):
        raise UserError(f"{name} = {value}: {absolute} is not UTF-8, as Ray and Parquet require. Rename its folders.")
    return absolute


def connect(num_cpus: int = 0) -> int:
    """Join the cluster of RAY_ADDRESS or `ray job submit`, else start one on this machine. Returns its number of CPUs.

    num_cpus: size of a cluster that is started here; 0 is all CPUs. SIGTERM to this process is as Ctrl-C from here on.
    Raises UserError when the cluster cannot be reached, or started.
    """
    _prepare_environment()
    _check_reachable(os.environ.get("RAY_ADDRESS", ""))
    import ray

    if not ray.is_initialized():
        where, options = "the cluster of this job", dict[str, Any]()
        if _JOB in os.environ:
            pass  # Every worker has this library: the job's working_dir is this repository, or it is installed.
        elif os.environ.get("RAY_ADDRESS"):
            where = "the cluster of RAY_ADDRESS"
            options = {"runtime_env": {"py_modules": [str(_ROOT / "pipeline"), str(_ROOT / "data_tools")]}}
        else:
            where = "this machine"
            # "local", because Ray would otherwise join a cluster that `ray start` left running, and refuse the other
            # options.
            options = {
                "address": "local",
                "num_cpus": num_cpus or None,
                "include_dashboard": False,
                "object_store_memory": 256 * 2**20,
            }
        try:
            # A process of Ray that dies meanwhile ends this one by a line of Ray's library: ours says what it was
            # about.
            with waits.waiting(f"Ray to start on {where}", _START_SECONDS):
                ray.init(logging_level="ERROR", log_to_driver=False, **options)
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            # Ray's handler of SIGTERM exits with the signal's number, without a word.
            raise KeyboardInterrupt from None
        except Exception as error:  # Ray raises a bare one when its node does not start in time.
            raise UserError(
                f"Ray did not start on {where}: {on_one_line(error)[:600] or type(error).__name__} Run the same command"
                " again when the machine is less busy, check RAY_ADDRESS, or set RAY_TMPDIR to another folder (a short"
                " path, free space), where Ray writes its logs."
            ) from None
    # As for Ctrl-C. Ray's own handler aborts the process after 3 s, while it waits for the tasks that it cancels.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return int(ray.cluster_resources().get("CPU", 1))


def capacity(num_cpus: int, gpus: float) -> tuple[int, float]:
    """Returns (number of tasks that fit at a time, GPUs of each task).

    num_cpus: CPUs of a task. gpus: GPUs of a task, or a share of one, if the cluster has any. Raises UserError when no
    node can run one.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = gpus if any(node.get("GPU") for node in nodes) else 0.0

    def fitting(node: dict[str, float]) -> int:
        by_cpu = int(node.get("CPU", 0) // num_cpus)
        if not num_gpus:
            return by_cpu
        have = int(node.get("GPU", 0))  # Shares of one GPU, or whole ones.
        return min(by_cpu, have * int(1 / num_gpus + 1e-6) if num_gpus < 1 else int(have // num_gpus))

    if not (total := sum(map(fitting, nodes))):
        raise UserError(
            f"threads = {num_cpus}, gpus = {num_gpus:g}: no node of this cluster has so many CPUs and GPUs."
        )
    return total, num_gpus


def _prepare_environment() -> None:
    """Set the variables that Ray and its workers read; a cluster on this machine inherits them."""
    # When several tasks fail, we report the first error; Ray would print tracebacks of the others.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    if _JOB in os.environ or os.environ.get("RAY_ADDRESS"):
        return
    # Without a token in the environment, Ray writes one into the home folder, which every later cluster then requires.
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(_START_SECONDS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def _check_reachable(address: str) -> None:
    """Raise UserError when nothing listens at RAY_ADDRESS. Ray itself would print warnings for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    number = whole_number(port)
    if number is None:
        return  # "auto" or "local", which Ray resolves.
    try:
        socket.create_connection((host.strip("[]"), number), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"RAY_ADDRESS = {address[:200]}: there is no Ray cluster ({error}). Start one (ray start --head), give the"
            " address of its head node, or unset RAY_ADDRESS to use this machine alone."
        ) from None


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# ---------------------------------------------------------------------- tasks
class LostError(Exception):
    """A task failed through no fault of its own: its worker died, or it reports a failure of its machine. It is
    retried.
    """


class RunJobs(Protocol):
    """Runs function(job) for each job; yields (index of the job, result) as they finish. Jobs are taken one by one.

    on_retry is called with the reason when a job is run again, on_failure with index and reason when one fails: the
    others continue.
    """

    def __call__(
        self,
        function: Callable[[A], R],
        jobs: Iterable[A],
        on_retry: Callable[[str], None],
        on_failure: Callable[[int, str], None],
        /,
    ) -> Iterable[tuple[int, R]]: ...


def run_here(
    function: Callable[[A], R],
    jobs: Iterable[A],
    on_retry: Callable[[str], None],
    on_failure: Callable[[int, str], None],
) -> Iterator[tuple[int, R]]:
    """A `RunJobs` in this process: one job after the other. A job that raises LostError is tried again, as on a
    cluster.
    """
    for index, job in enumerate(jobs):
        for pause in (*RETRY_PAUSES, None):
            try:
                yield index, function(job)
                break
            except (UserError, PermissionError) as error:  # Without rights to a folder of this job only.
                on_failure(index, mistake_in_words(error) or str(error))
                break
            except LostError as error:
                if pause is None:
                    on_failure(index, str(error))
                else:
                    on_retry(str(error))
                    time.sleep(pause)


def run_tasks(
    function: Callable[[A], R],
    arguments: Iterable[A],
    on_retry: Callable[[str], None],
    on_failure: Callable[[int, str], None] | None = None,
    *,
    limit: int,
    num_cpus: int = 1,
    num_gpus: float = 0.0,
) -> Generator[tuple[int, R]]:
    """Run function(argument) for each argument on the cluster, with `limit` a `RunJobs`; yields (index of the argument,
    result) as tasks finish.

    limit: most tasks in flight; arguments are taken one by one as tasks finish. num_cpus, num_gpus: resources of a
    task. A task whose worker or node dies, or that raises LostError, is retried after each of RETRY_PAUSES, and
    on_retry is called with the reason. Any other exception of a task is raised here, and the tasks in flight are
    cancelled.
    on_failure: if given, it is called with index and error of a task that fails, and the others continue. A task that
    raises anything but a UserError is then retried, too.
    """
    import ray

    def attempt(argument: A, pause: float) -> R:
        time.sleep(pause)
        return function(argument)

    # No retries by Ray itself, which does not report them. With a GPU, and if all options are given here, not by
    # options(), each task gets a process of its own, which frees its GPU memory at the end.
    options = {"name": function.__name__, "num_cpus": num_cpus, "max_retries": 0}
    remote = ray.remote(**options, **({"num_gpus": num_gpus} if num_gpus else {}))(attempt)
    remaining = enumerate(arguments)
    # Task -> (index, reference to the argument for a retry, pauses that are left).
    in_flight: dict[Any, tuple[int, Any, Iterator[float]]] = {}

    def start_more() -> None:
        for index, argument in itertools.islice(remaining, limit - len(in_flight)):
            reference = ray.put(argument)
            in_flight[remote.remote(reference, 0.0)] = index, reference, iter(RETRY_PAUSES)

    try:
        start_more()
        while in_flight:
            (reference,), _ = ray.wait(list(in_flight), num_returns=1)
            index, argument, pauses = in_flight.pop(reference)
            try:
                result = _result(reference)
            except Exception as error:
                # With on_failure, all errors but a UserError.
                is_retried = isinstance(error, LostError) or not (on_failure is None or isinstance(error, UserError))
                if is_retried and (pause := next(pauses, None)) is not None:
                    on_retry(_in_one_line(error))
                    in_flight[remote.remote(argument, pause)] = index, argument, pauses
                    continue
                if isinstance(error, LostError):
                    error = UserError(
                        f"Ray gave up on a task after {counted(len(RETRY_PAUSES), 'retry')}: {error} If memory ran out,"
                        " use fewer tasks at a time (num_tasks=...); run the same command again to continue."
                    )
                if on_failure is None:
                    raise error from None
                on_failure(index, _in_one_line(error))
                start_more()
            else:
                start_more()
                yield index, result
    except ray.exceptions.RayError as error:  # Not of a task: the cluster itself is gone.
        in_flight.clear()
        raise _cannot_run(error) from None
    finally:
        _cancel(list(in_flight))


def _cancel(references: list[Any]) -> None:
    """Cancel tasks by an exception, so that they remove unfinished files; kill those that do not end in time.

    Tasks that are about to end may do so: Ray 2.60 aborts this process, without a word of ours, when it is told to
    cancel a task whose result is just arriving ("Tried to complete task that was not pending").
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
        raise LostError(first_line(error)) from None
    except errors.RayError as error:
        raise _cannot_run(error) from None


def _cannot_run(error: Exception) -> UserError:
    return UserError(f"Ray cannot run a task: {first_line(error)} Run the same command again to continue.")


def _in_one_line(error: Exception) -> str:
    """An error's message, after its type unless it is one of ours."""
    message = on_one_line(error)
    return message if isinstance(error, (UserError, LostError)) else f"{type(error).__name__}: {message}"


# ---------------------------------------------------------------------- ranks
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
        if ray.wait(references, num_returns=len(references), timeout=waits.NOTICE_SECONDS)[1]:
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
