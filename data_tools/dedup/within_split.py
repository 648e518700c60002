"""Finds the images of a split that are copies of one another, and keeps the largest of those that are alike.

Images are taken from the largest (by pixels, then by bytes) to the smallest, in blocks: an index finds an image that
shows a part of an indexed one, and a part has fewer pixels. One Ray task compares the images of a block in this order,
each with those before it that are kept. Then all smaller images are compared with what is kept of the block, one task
per shard; those that are copies are in no later block. So every marked image is a copy of one that is kept, and a
thousand images of one scene cost about a thousand comparisons, not a million.

The pairs of each task are in dedup/search/, one folder per choice of images and of max_distance, so a killed job goes
on.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from data_tools.dedup import search_shard
from data_tools.dedup.search_shard import ImagesJob, Pairs, SearchJob, read_pairs, write_images
from data_tools.dedup.thumbnails import (
    FINE,
    PLAIN,
    ComparedSplit,
    read_arrays,
    run_tasks,
    unfinished,
)
from data_tools.sharding.copies import first_halves
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import DedupConfig

# Images of a block: its index takes 0.2 GiB in each worker. A kill loses the comparisons within one block.
_BLOCK = 20_000


def search(own: ComparedSplit, states: np.ndarray, elsewhere: np.ndarray, config: DedupConfig) -> Pairs:
    """Returns every copy (rows, ascending), a kept image of which it is one (others), and their distance.

    elsewhere: rows that are not compared.
    """
    usable = (states == FINE) | (states == PLAIN)
    usable[elsewhere] = False
    table = own.dataset.table(own.split).read_all(["width", "height", "size"])
    # Pixels of 0 are unknown.
    width, height, size = (table[name].fill_null(0).to_numpy().astype(np.int64) for name in table.column_names)
    order = np.lexsort((-size, -width * height))
    order = order[usable[order]]
    # Equal files first, plain ones too: they need no comparison.
    of_files = first_halves(np.concatenate([read_arrays(job.out, "hashes")["hashes"] for job in own.jobs]))
    _, first, inverse = np.unique(of_files[order], return_index=True, return_inverse=True)
    file = np.full(len(own), -1)
    file[order] = order[first[inverse]]
    original, distances = np.arange(len(own)), np.zeros(len(own), np.float32)
    for pairs in _compare(own, order[(file[order] == order) & (states[order] == FINE)], config):
        original[pairs.rows], distances[pairs.rows] = pairs.others, pairs.distances
    copies = np.sort(order[original[file[order]] != order])
    return Pairs(copies, original[file[copies]], distances[file[copies]])


def _compare(own: ComparedSplit, left: np.ndarray, config: DedupConfig) -> Iterator[Pairs]:
    """Yields the copies among the images left (rows, the largest first), each once, with the nearest of the kept ones
    of one block.
    """
    names = [job.name for job in own.jobs]
    folder = search_shard.results_folder(own, "within-", [_BLOCK, config.max_distance, *names], left.tobytes())
    starts = [job.first_row for job in own.jobs]
    number = 0
    while len(left):
        number += 1
        print(f"block {number}: {counted(len(left), 'image')} left to compare", flush=True)
        block, left = left[:_BLOCK], left[_BLOCK:]
        alike = _compare_block(own, block, folder, number, config)
        yield alike
        kept, tests = block[~np.isin(block, alike.rows)], folder / f"{number}-kept.npz"
        # Results are of these: a block that is compared again, on another CPU say, may keep others.
        name = f"{number}-{hashlib.sha256(kept.tobytes()).hexdigest()[:8]}"
        parts = np.split(np.sort(left), np.searchsorted(np.sort(left), starts[1:]))
        jobs = [
            SearchJob(shard, str(tests), str(folder / f"{name}-{shard.first_row}.npz"), part - shard.first_row)
            for shard, part in zip(own.jobs, parts, strict=True)
            if len(part)
        ]
        if missing := unfinished(jobs, folder):
            write_images(own.jobs, tests, kept)
            run_tasks(search_shard.search_shard, missing, "compared", own, config)
        tests.unlink(missing_ok=True)
        is_copy = np.zeros(len(own), bool)
        for job in jobs:
            nearest = read_pairs(job.out, job.shard.first_row).within(config.max_distance).nearest()
            yield nearest._replace(others=kept[nearest.others])
            is_copy[nearest.rows] = True
        left = left[~is_copy[left]]


def _compare_block(own: ComparedSplit, block: np.ndarray, folder: AnyPath, number: int, config: DedupConfig) -> Pairs:
    """The copies among the images of a block."""
    images = folder / f"{number}-images.npz"
    amount = len(block), int(np.concatenate([job.sizes for job in own.jobs])[block].sum())
    job = ImagesJob(str(images), str(folder / f"{number}.npz"), amount, config.max_distance)
    if unfinished([job], folder):
        write_images(own.jobs, images, block)
        run_tasks(search_shard.compare_block, [job], "compared", own, config)
    images.unlink(missing_ok=True)
    pairs = read_pairs(job.out)
    return Pairs(block[pairs.rows], block[pairs.others], pairs.distances)
