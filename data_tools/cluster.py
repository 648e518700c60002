"""Ray, and the only file that imports it: a place to run tasks, and a bounded way to run many of them.

Ray reads its environment when it is imported, and that takes a second; so it is imported when the first task is due.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.data.bucket import AnyPath, BucketPath, to_path
from pipeline.errors import UserError

A = TypeVar("A")
R = TypeVar("R")

_ROOT = Path(__file__).resolve().parent.parent
# Seconds before the first retry of a task, the second, ... and there are no more: a node that lacks memory needs time.
_PAUSES = (1.0, 5.0, 25.0)
_SECONDS_TO_TIDY_UP = 5.0


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
    import ray

    if not ray.is_initialized():
        options: dict[str, Any] = {}
        if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
            pass  # The job's working_dir is this repository, and every worker has it.
        elif os.environ.get("RAY_ADDRESS"):
            options = {"runtime_env": {"py_modules": [str(_ROOT / "pipeline"), str(_ROOT / "data_tools")]}}
        else:
            options = {"num_cpus": num_cpus or None, "include_dashboard": False, "object_store_memory": 256 * 2**20}
        ray.init(logging_level="ERROR", log_to_driver=False, **options)
    return int(ray.cluster_resources().get("CPU", 1))


def run_tasks(
    function: Callable[[A], R], arguments: Iterable[A], limit: int, on_retry: Callable[[str], None]
) -> Generator[tuple[int, R]]:
    """Run function(argument) for each argument on the cluster; (number of the argument, result) as they finish.

    limit: tasks in flight; arguments are taken one by one as tasks finish. A task whose worker or node dies is run
    again, up to 3 times, after longer and longer pauses; on_retry is told why. An exception of a task is raised here as it was raised there, and the
    tasks still in flight are cancelled.
    """
    import ray

    def attempt(argument: A, pause: float) -> R:
        time.sleep(pause)
        return function(argument)

    # Ray's own retries are not told to anyone.
    remote = ray.remote(attempt).options(name=function.__name__, num_cpus=1, max_retries=0)
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
            except _LostError as error:
                pause = task.next_pause(str(error))
                on_retry(str(error))
                flying[remote.remote(task.argument, pause)] = task
                continue
            launch()
            yield task.number, result
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

    def next_pause(self, reason: str) -> float:
        """Count a retry; seconds to wait before it. Raises UserError when there were too many."""
        if self.retries == len(_PAUSES):
            raise UserError(
                f"Ray gave up on a task after {self.retries} retries: {reason} If memory ran out, use fewer tasks at a "
                "time (num_tasks=...); run the same command again to go on."
            )
        self.retries += 1
        return _PAUSES[self.retries - 1]


class _LostError(Exception):
    """A task ended with its worker, for no reason of its own."""


def _result(reference: Any) -> Any:
    """Raises what the task raised, _LostError when its worker died, UserError when Ray cannot run it."""
    import ray

    errors = ray.exceptions
    try:
        return ray.get(reference)
    except errors.RayTaskError as error:
        # Ray's own copy of the exception has the worker's traceback for a message.
        raise error.cause from None
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError) as error:
        raise _LostError(_first_line(error)) from None
    except errors.RayError as error:
        raise UserError(f"Ray cannot run a task: {_first_line(error)} Run the same command again to go on.") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


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
