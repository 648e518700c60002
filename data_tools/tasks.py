"""Runs the tasks of a job on a Ray cluster, shows its progress, and removes what killed ones left."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from data_tools.progress import ProgressMeter
from pipeline.base.errors import UserError
from pipeline.cluster import ray_tasks
from pipeline.data.storage.bucket import AnyPath

A = TypeVar("A")
R = TypeVar("R")


@contextlib.contextmanager
def tasks_on_cluster(
    function: Callable[[A], R],
    arguments: Iterable[A],
    num_tasks: int,
    total: int | None,
    shards: int,
    folder: AnyPath,
    done: str,
) -> Iterator[tuple[Generator[tuple[int, R]], ProgressMeter]]:
    """Context with (pairs of an argument's index and function's result, as tasks finish; their progress, which the
    caller adds to).

    num_tasks: most tasks at a time; 0 is one for each CPU. total, shards, folder, done: as `ProgressMeter`. Tasks in
    flight are cancelled when the block ends early.
    """
    num_cpus = ray_tasks.connect(num_tasks)
    with (
        ProgressMeter(total, shards, folder, done) as progress,
        contextlib.closing(
            ray_tasks.run_tasks(function, arguments, progress.retried, limit=num_tasks or num_cpus)
        ) as tasks,
    ):
        yield tasks, progress


def refuse_unseen(path: AnyPath) -> None:
    """Raise UserError in a task whose node does not see a file or folder that the driver sees."""
    if isinstance(path, Path) and not path.exists():
        raise UserError(f"A worker cannot access {path}: it must be on storage shared by all nodes.")


def remove_leftovers(*folders: AnyPath, pattern: str = ".*.tmp") -> None:
    """Remove unfinished files of killed drivers and tasks (`atomic.replacing`). Object stores have none: uploads are
    atomic.
    """
    for folder in folders:
        for leftover in folder.glob(pattern) if isinstance(folder, Path) else ():
            leftover.unlink(missing_ok=True)
