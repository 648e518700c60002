"""The splits that a search for copies compares: their images, what is known of each, and the Ray tasks that read
them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.dedup.thumbnails import BAD, ThumbnailJob, jobs, make_thumbnails, read_arrays
from data_tools.driver import remove_leftovers
from data_tools.sources.reader import read_thumbnail
from data_tools.tasks import tasks_on_cluster
from pipeline.base.errors import UserError
from pipeline.base.progress import PROGRESS_FILE
from pipeline.base.words import counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.bucket import AnyPath, make_folder
from pipeline.settings.commands.data import DedupConfig

FOLDER, THUMBNAILS, SEARCH = "dedup", "thumbnails", "search"


@dataclass(frozen=True)
class ComparedSplit:
    """The searched split, or a split of test images, with one job per shard. name: FOLDER:SPLIT."""

    dataset: Dataset
    split: str
    jobs: list[ThumbnailJob]
    name: str

    def __len__(self) -> int:
        return self.dataset.info["samples"][self.split]

    def keys(self, rows: np.ndarray) -> list[str]:
        """Keys of some rows of the split, in the given order."""
        return self.dataset.table(self.split, verify=False).keys(rows)

    def thumbnail(self, row: int, side: int) -> np.ndarray | None:
        """The image of a row of the split, to be drawn; None if it is unreadable."""
        job = self.jobs[bisect_right(self.jobs, row, key=lambda job: job.first_row) - 1]
        at = row - job.first_row
        return read_thumbnail(job.tar, int(job.offsets[at]), int(job.sizes[at]), side, job.pixels)


def compared_split(dataset: Dataset, split: str, folder: AnyPath) -> ComparedSplit:
    """folder: of the thumbnails. Raises UserError for a split without images, and values that were not measured."""
    if not dataset.info["samples"].get(split, 0):
        known = ", ".join(name for name, count in dataset.info["samples"].items() if count) or "none"
        raise UserError(f"{dataset.path} has no images of a split {split!r}. It has: {known}.")
    dataset.refuse_unmeasured()
    return ComparedSplit(dataset, split, list(jobs(dataset, split, folder)), f"{dataset.path.name}:{split}")


def read_images(parts: Sequence[ComparedSplit], config: DedupConfig) -> list[np.ndarray]:
    """Make the thumbnails of every shard that has none. Returns the states of the images of each part.

    The thumbnails are in the folder of the first part's data set. Raises UserError for too many unreadable images.
    """
    base = parts[0].dataset.path / FOLDER
    make_folder(base / THUMBNAILS)
    remove_leftovers(base, pattern="**/.*.tmp")
    # A killed job leaves it for good if this one has no tasks: they would replace it, and remove it at their end.
    remove_leftovers(base, pattern=PROGRESS_FILE)
    every = {job.out: job for part in parts for job in part.jobs}
    missing = unfinished(every.values(), base / THUMBNAILS)
    print(
        f"{counted(sum(map(len, parts)), 'image')} in {counted(len(every), 'shard')}; read earlier:"
        f" {len(every) - len(missing):,}",
        flush=True,
    )
    run_tasks(make_thumbnails, missing, "read", parts[0], config)
    states = []
    for part in parts:
        states.append(np.concatenate([read_arrays(job.out, "states")["states"] for job in part.jobs]))
        bad = np.flatnonzero(states[-1] == BAD)
        if len(bad) > BadBudget(config.max_bad_share).allowed(len(part)):
            raise UserError(
                f"{len(bad):,} of the {counted(len(part), 'image')} of {part.name} cannot be decoded, more than"
                f" max_bad_share = {config.max_bad_share} allows: {', '.join(part.keys(bad[:3]))}. Repair or remove"
                " them and shard again, or raise max_bad_share."
            )
    return states


def unfinished(tasks: Iterable[Any], folder: AnyPath) -> list[Any]:
    """Those of the jobs whose output is not in the folder."""
    there = {str(path) for path in folder.iterdir()}
    return [job for job in tasks if job.out not in there]


def run_tasks(
    function: Callable[[Any], None], tasks: Sequence[Any], done: str, searched: ComparedSplit, config: DedupConfig
) -> None:
    """Run Ray tasks. done: the verb in the past tense for progress, such as "read"."""
    if not tasks:
        return
    shown = sum(job.amount[0] for job in tasks), len(tasks), searched.dataset.path / FOLDER, done
    with tasks_on_cluster(function, tasks, config.num_tasks, *shown) as (results, progress):
        for number, _ in results:
            progress.add(*tasks[number].amount)
