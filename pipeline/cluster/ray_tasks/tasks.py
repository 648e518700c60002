"""Runs many tasks on a Ray cluster with bounded memory: a limited number at a time, each retried when its node is
lost.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from pipeline.base.errors import UserError
from pipeline.base.words import counted, on_one_line
from pipeline.cluster.ray_tasks.cluster import first_line
from pipeline.settings.command import mistake_in_words

A = TypeVar("A")
R = TypeVar("R")

# Seconds before each retry of a task: a node that is out of memory needs time.
RETRY_PAUSES = (1.0, 5.0, 25.0)
# How long tasks may still end by themselves before they are cancelled, in seconds.
_ENDING_SECONDS = 1.0
# Timeout for cancelled tasks to remove their unfinished files, in seconds.
_CANCEL_SECONDS = 30.0


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
                final = _final_error(error)
                if on_failure is None:
                    raise final from None
                on_failure(index, _in_one_line(final))
                start_more()
                continue
            start_more()
            yield index, result
    except ray.exceptions.RayError as error:  # Not of a task: the cluster itself is gone.
        in_flight.clear()
        raise _cannot_run(error) from None
    finally:
        _cancel(list(in_flight))


def _final_error(error: Exception) -> Exception:
    """The error to raise for a task that is not retried any more."""
    if not isinstance(error, LostError):
        return error
    return UserError(
        f"Ray gave up on a task after {counted(len(RETRY_PAUSES), 'retry')}: {error} If memory ran out, use fewer tasks"
        " at a time (num_tasks=...); run the same command again to continue."
    )


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
