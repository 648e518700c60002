"""The splits that a search for copies compares, and the Ray task that reads the images of a shard once and writes a
thumbnail of each (1 KB), for all later comparisons.

Images of any channels and type are compared as the picture that is shown of them (`picture`).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data_tools.dedup.near_copies import SIDE, is_plain, thumbnail
from data_tools.sources.reader import Reader, lost_if_unreadable, read_at, read_thumbnail
from data_tools.tasks import refuse_unseen, remove_leftovers, tasks_on_cluster
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import npz
from pipeline.base.errors import UserError
from pipeline.base.progress import PROGRESS_FILE
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.mapped_index import hash_column
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.decode import DecodeError
from pipeline.data.loading.values import picture
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, fetched, make_folder, to_path
from pipeline.data.storage.content import HASH_BYTES, content_hash
from pipeline.data.storage.retry import StorageError
from pipeline.settings.commands.data import DedupConfig

FOLDER, THUMBNAILS, SEARCH = "dedup", "thumbnails", "search"
FINE, PLAIN, BAD = range(3)
# For n images: (n, SIDE, SIDE) uint8; (n,) uint8, one of the above; (n, 16) uint8, `content_hash` of the files.
ARRAYS = ("thumbs", "states", "hashes")
# Format of the files, part of their name. Increase it when the rule of plain images or the hash changes.
_FORMAT = 3
_NO_HASH = bytes(HASH_BYTES)


@dataclass(frozen=True)
class ThumbnailJob:
    """A shard to read. tar: its path. out: path of the thumbnails. offsets, sizes: (n,) int64.

    first_row: row of the shard's first sample in its split. hashes: (n,) V16, of the images by the manifest, zeros
    where it has none.
    pixels: what the values of the images mean.
    """

    tar: str
    out: str
    first_row: int
    offsets: np.ndarray
    sizes: np.ndarray
    hashes: np.ndarray
    pixels: Pixels = RGB8

    @property
    def name(self) -> str:
        """Of the shard and its thumbnails, as part of a choice of images."""
        return f"{self.tar} {to_path(self.out).name}"

    @property
    def amount(self) -> tuple[int, int]:
        """Images and their bytes."""
        return len(self.sizes), int(self.sizes.sum())


def make_thumbnails(job: ThumbnailJob) -> None:
    """Read one shard and write its thumbnails.

    Raises UserError for a missing or changed shard, StorageError when the object store cannot be reached, and LostError
    when reading fails because of the node or its storage.
    """
    cv2.setNumThreads(1)
    thumbs = np.zeros((len(job.offsets), SIDE, SIDE), np.uint8)
    states = np.full(len(job.offsets), BAD, np.uint8)
    hashes = np.zeros((len(job.offsets), HASH_BYTES), np.uint8)
    refuse_unseen(to_path(job.tar))
    with lost_if_unreadable(job.tar), fetched(to_path(job.tar)) as file:
        for i, (offset, size) in enumerate(zip(job.offsets.tolist(), job.sizes.tolist(), strict=True)):
            data = read_at(file, offset, size)
            if len(data) != size:
                raise UserError(f"{job.tar} ends before byte {offset + size}. Copy it again, or shard again.")
            digest = content_hash(data)
            hashes[i] = np.frombuffer(digest, np.uint8)
            if job.hashes[i].tobytes() not in (digest, _NO_HASH):
                raise UserError(
                    f"{job.tar} has other bytes at {offset:,} than in the manifest. Repair it (launch/verify.py says"
                    " how), and run the same command again."
                )
            try:
                pixels = picture(data, job.pixels)
            except DecodeError:
                continue
            thumbs[i] = thumbnail(pixels)
            states[i] = PLAIN if is_plain(pixels, thumbs[i]) else FINE
    with replacing(to_path(job.out)) as out:
        np.savez(out, thumbs=thumbs, states=states, hashes=hashes)


def read_image(tar: str, offset: int, size: int, pixels: Pixels) -> np.ndarray:
    """The picture of an image that has a thumbnail, uint8 (H, W, 3). Raises UserError for a missing, damaged or changed
    shard.
    """
    refuse_unseen(to_path(tar))
    try:
        with Reader() as reader:
            return picture(reader.read(tar, offset, size, packed=0), pixels)
    except ValueError as error:
        raise UserError(f"{tar} was changed while its images were compared: {error}. Shard again.") from None


def read_arrays(path: str, *names: str) -> dict[str, np.ndarray]:
    """Read arrays of an .npz file that a task wrote. Raises UserError for a damaged file."""
    try:
        file = to_path(path)
        return npz.read_arrays(file if isinstance(file, Path) else file.read_bytes(), path, names)
    except StorageError:
        raise
    except (UserError, OSError):
        raise UserError(f"{path} is damaged. Remove it, and run the same command again.") from None


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
        return self.dataset.table(self.split).keys(rows)

    def thumbnail(self, row: int, side: int) -> np.ndarray | None:
        """The image of a row of the split, to be drawn; None if it is unreadable."""
        job = self.jobs[bisect_right(self.jobs, row, key=lambda job: job.first_row) - 1]
        at = row - job.first_row
        return read_thumbnail(job.tar, int(job.offsets[at]), int(job.sizes[at]), side, job.pixels)


def located(counts: Iterable[int], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(number of the part, row in it) of rows that are counted over all parts. counts: of rows, of each part."""
    starts = np.cumsum([0, *counts])
    of_part = np.searchsorted(starts, rows, side="right") - 1
    return of_part, rows - starts[of_part]


def compared_split(dataset: Dataset, split: str, folder: AnyPath) -> ComparedSplit:
    """A split, with a job for each of its shards. Excluded samples are included. folder: of the thumbnails. Raises
    UserError for a split without images, and values that were not measured.
    """
    if not dataset.info["samples"].get(split, 0):
        raise UserError(dataset.without_split(split))
    dataset.refuse_unmeasured()
    table = dataset.table(split).read_all(["offset", "size", "xxh128"])
    offsets, sizes = (table[name].to_numpy() for name in ("offset", "size"))
    hashes = hash_column(table["xxh128"])
    # Another range is another picture of the same shard.
    shown = "" if dataset.pixels == RGB8 else f"-{content_hash(repr(dataset.pixels).encode()).hex()[:8]}"
    first_row, jobs = 0, []
    for shard in dataset.shards():
        if shard.split != split:
            continue
        end = first_row + shard.samples
        # A tar that is indexed again may have other rows; a tar of launch/shard.py has the same for good.
        is_indexed = dataset.info["source"].get("indexed")
        rows = f"-{content_hash(offsets[first_row:end].tobytes()).hex()[:8]}" if is_indexed else ""
        job = ThumbnailJob(
            tar=str(dataset.shard_path(shard.name)),
            out=str(folder / f"{shard.sha256 or f'{dataset.fingerprint}-{shard.name}'}{rows}{shown}.{_FORMAT}.npz"),
            first_row=first_row,
            offsets=offsets[first_row:end],
            sizes=sizes[first_row:end],
            hashes=hashes[first_row:end],
            pixels=dataset.pixels,
        )
        jobs.append(job)
        first_row = end
    return ComparedSplit(dataset, split, jobs, f"{dataset.path.name}:{split}")


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
