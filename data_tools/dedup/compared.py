"""The splits that a search for copies compares: their images, what is known of each, and the Ray tasks that read
them.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.dedup.pair_sheet import read_tile
from data_tools.dedup.thumbnails import BAD, PLAIN, ThumbnailJob, jobs, load, make_thumbnails
from data_tools.driver import remove_leftovers
from data_tools.tasks import tasks_on_cluster
from pipeline.base.errors import UserError
from pipeline.base.gallery import Tile
from pipeline.base.progress import PROGRESS_FILE, duration
from pipeline.base.words import counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.storage.bucket import AnyPath, make_folder
from pipeline.settings.commands.data import DedupConfig

FOLDER, THUMBNAILS, SEARCH = "dedup", "thumbnails", "search"
# For a report and its sheet of pairs.
HISTOGRAM_BINS = 10
MAX_PICTURED = 96


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

    def tile(self, row: int, caption: str) -> Tile:
        """The image of a row of the split, to be drawn."""
        job = self.jobs[bisect_right(self.jobs, row, key=lambda job: job.first_row) - 1]
        at = row - job.first_row
        return read_tile(job.tar, int(job.offsets[at]), int(job.sizes[at]), caption, job.pixels)


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
    there = {str(path) for path in (base / THUMBNAILS).iterdir()}
    states = {out: load(job, "states")["states"] for out, job in every.items() if out in there}
    missing = [job for out, job in every.items() if out not in states]
    print(
        f"{counted(sum(map(len, parts)), 'image')} in {counted(len(every), 'shard')}; read earlier:"
        f" {len(every) - len(missing):,}",
        flush=True,
    )
    amounts = [(len(job.offsets), int(job.sizes.sum())) for job in missing]
    run_tasks(make_thumbnails, missing, amounts, "read", parts[0], config)
    states |= {job.out: load(job, "states")["states"] for job in missing}
    of_parts = [np.concatenate([states[job.out] for job in part.jobs]) for part in parts]
    for part, of_part in zip(parts, of_parts, strict=True):
        _check_readable(part, of_part, config.max_bad_share)
    return of_parts


def run_tasks(
    function: Callable[[Any], None],
    tasks: Sequence[Any],
    amounts: Sequence[tuple[int, int]],
    done: str,
    searched: ComparedSplit,
    config: DedupConfig,
) -> None:
    """Run Ray tasks. amounts: images and bytes of each. done: the verb in the past tense for progress, such as
    "read".
    """
    if not tasks:
        return
    total, folder = sum(images for images, _ in amounts), searched.dataset.path / FOLDER
    with tasks_on_cluster(function, tasks, config.num_tasks, total, len(tasks), folder, done) as (results, progress):
        for number, _ in results:
            progress.add(*amounts[number])


def about(part: ComparedSplit, states: np.ndarray) -> dict[str, Any]:
    """For a report: the split, its number of images, and how many of them were not compared, by reason."""
    return {
        "name": part.name,
        "path": str(part.dataset.path),
        "fingerprint": part.dataset.fingerprint,
        "images": len(states),
        "plain": int((states == PLAIN).sum()),
        "unreadable": int((states == BAD).sum()),
    }


def histogram_edges(config: DedupConfig) -> np.ndarray:
    return np.linspace(0, config.max_distance or 1e-6, HISTOGRAM_BINS + 1)


def print_not_compared(reports: Sequence[dict[str, Any]], seconds: float) -> None:
    """Print how many images were not compared, and why. reports: with `about` each split."""
    plain, bad = (sum(part[name] for part in reports) for name in ("plain", "unreadable"))
    print(
        f"with too little detail to compare (only equal files are found): {counted(plain, 'image')}; "
        f"not decodable: {bad:,}; {duration(seconds)}"
    )


def _check_readable(part: ComparedSplit, states: np.ndarray, max_bad_share: float) -> None:
    bad = np.flatnonzero(states == BAD)
    if len(bad) > BadBudget(max_bad_share).allowed(len(part)):
        keys = ", ".join(part.keys(bad[:3]))
        raise UserError(
            f"{len(bad):,} of the {counted(len(part), 'image')} of {part.name} cannot be decoded, more than"
            f" max_bad_share = {max_bad_share} allows: {keys}. Repair or remove them and shard again, or raise"
            " max_bad_share."
        )
