"""Finds the images of a split that are copies of one another, keeps the largest of those that are alike, and marks the
others.

Images are taken from the largest (by pixels, then by bytes) to the smallest, in blocks: an index finds an image that
shows a part of an indexed one, and a part has fewer pixels. One Ray task compares the images of a block in this order,
each with those before it that are kept. Then all smaller images are compared with what is kept of the block, one task
per shard; those that are copies are in no later block. So every marked image is a copy of one that is kept, and a
thousand images of one scene cost about a thousand comparisons, not a million.

All output is in the data set's folder: exclude/near_copies.parquet, dedup/near_copies.json, dedup/near_copies.png, and
dedup/search/ (one folder per choice of images and of max_distance, with the pairs of each task, so a killed job goes
on).
"""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.dedup import search_shard
from data_tools.dedup.compared import (
    FOLDER,
    SEARCH,
    THUMBNAILS,
    ComparedSplit,
    about,
    compared_split,
    histogram_edges,
    print_not_compared,
    read_images,
    run_tasks,
)
from data_tools.dedup.marks import describe, finish
from data_tools.dedup.pair_sheet import draw_pairs
from data_tools.dedup.search_shard import BlockJob, Pairs, SearchJob, read_pairs, write_images
from data_tools.dedup.thumbnails import FINE, PLAIN, load
from pipeline.base.locks import only_writer
from pipeline.base.words import aligned, counted
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.exclusion import NEAR_COPIES, excluded_rows, paths_of_lists
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.storage.bucket import AnyPath, make_folder, remove_tree, to_path
from pipeline.settings.commands.data import DedupConfig

LIST, REPORT, SHEET = NEAR_COPIES, "near_copies.json", "near_copies.png"
# How the folders of results begin.
_OURS = "within-"
# Images of a block: its index takes 0.2 GiB in each worker. A kill loses the comparisons within one block.
_BLOCK = 20_000


def run(config: DedupConfig) -> dict[str, Any]:
    """Search, write the report and the exclusion list; returns the report's content. After a UserError no list is
    written.
    """
    data = open_dataset(ray_tasks.shared_path("data", config.data))
    own = compared_split(data, config.split, data.path / FOLDER / THUMBNAILS)
    with only_writer(data.path / FOLDER):
        return _run(own, config)


def _run(own: ComparedSplit, config: DedupConfig) -> dict[str, Any]:
    started = time.monotonic()
    states = read_images([own], config)[0]
    # An image that another list excludes cannot stand for its copies.
    others = [name for name in paths_of_lists(own.dataset) if name != LIST]
    elsewhere, _ = excluded_rows(own.dataset, own.split, others)
    copies = _search(own, states, elsewhere, config)
    marks, pictures, other_labels = _describe(own, copies)
    _, groups = np.unique(copies.others, return_counts=True)
    edges = histogram_edges(config)
    report = {
        "data": {
            **about(own, np.delete(states, elsewhere)),
            "images": len(own),
            "excluded_otherwise": len(elsewhere),
            "copies": len(copies.rows),
            "images_with_copies": len(groups),
            "most_copies_of_one": int(groups.max(initial=0)),
            "copies_with_other_labels": other_labels,
        },
        "max_distance": config.max_distance,
        "marked": not config.dry_run,
        "histogram_edges": edges.round(6).tolist(),
        "histogram": np.histogram(copies.distances, edges)[0].tolist(),
        "seconds": round(time.monotonic() - started, 1),
    }
    sheet = draw_pairs(pictures, "Kept images") if pictures else None
    done = finish(own, LIST, marks, report, REPORT, (SHEET, sheet))
    _print(report)
    print(done)
    return report


def _search(own: ComparedSplit, states: np.ndarray, elsewhere: np.ndarray, config: DedupConfig) -> Pairs:
    """Returns every copy (rows, ascending), a kept image of which it is one (others), and their distance."""
    usable = (states == FINE) | (states == PLAIN)
    usable[elsewhere] = False
    order = _largest_first(own)
    order = order[usable[order]]
    # Equal files first, plain ones too: they need no comparison.
    digests = np.concatenate([load(job, "hashes")["hashes"][:, :8] for job in own.jobs]).copy().view(np.uint64)[:, 0]
    _, first, inverse = np.unique(digests[order], return_index=True, return_inverse=True)
    file = np.full(len(own), -1)
    file[order] = order[first[inverse]]
    original, distances = np.arange(len(own)), np.zeros(len(own), np.float32)
    for pairs in _compare(own, order[(file[order] == order) & (states[order] == FINE)], config):
        original[pairs.rows], distances[pairs.rows] = pairs.others, pairs.distances
    copies = np.sort(order[original[file[order]] != order])
    return Pairs(copies, original[file[copies]], distances[file[copies]])


def _largest_first(own: ComparedSplit) -> np.ndarray:
    """All rows of the split, by pixels and then by bytes of the file, descending. Pixels of 0 are unknown."""
    table = pa.concat_tables(own.dataset.table(own.split, verify=False).read(["width", "height", "size"]))
    width, height, size = (table[name].fill_null(0).to_numpy().astype(np.int64) for name in table.column_names)
    return np.lexsort((-size, -width * height))


def _compare(own: ComparedSplit, left: np.ndarray, config: DedupConfig) -> Iterator[Pairs]:
    """Yields the copies among the images left (rows, the largest first), each once, with the nearest of the kept ones
    of one block.
    """
    names = [f"{job.tar} {to_path(job.out).name}" for job in own.jobs]
    choice = hashlib.sha256(
        "\n".join([str(search_shard.FORMAT), str(_BLOCK), str(config.max_distance), *names]).encode()
    )
    choice.update(left.tobytes())
    folder = own.dataset.path / FOLDER / SEARCH / f"{_OURS}{choice.hexdigest()[:16]}"
    make_folder(folder)
    for other in folder.parent.glob(f"{_OURS}*"):  # For other images or another max_distance.
        if other.name != folder.name:
            remove_tree(other)
    starts = [job.first_row for job in own.jobs]
    is_copy, number = np.zeros(len(own), bool), 0
    while len(left):
        number += 1
        there = {str(path) for path in folder.iterdir()}
        print(f"block {number}: {counted(len(left), 'image')} left to compare", flush=True)
        block, left = left[:_BLOCK], left[_BLOCK:]
        alike = _compare_block(own, block, folder, f"{number}", there, config)
        yield alike
        is_copy[alike.rows] = True
        kept, tests = block[~is_copy[block]], folder / f"{number}-kept.npz"
        # Results are of these: a block that is compared again, on another CPU say, may keep others.
        name = f"{number}-{hashlib.sha256(kept.tobytes()).hexdigest()[:8]}"
        rows = np.sort(left)
        parts = zip(own.jobs, np.split(rows, np.searchsorted(rows, starts[1:])), strict=True)
        jobs = [
            SearchJob(shard, str(tests), str(folder / f"{name}-{shard.first_row}.npz"), part - shard.first_row)
            for shard, part in parts
            if len(part)
        ]
        missing = [job for job in jobs if job.out not in there]
        if missing:
            write_images(own.jobs, tests, kept)
            run_tasks(search_shard.search_shard, missing, [job.amount for job in missing], "compared", own, config)
        tests.unlink(missing_ok=True)
        for job in jobs:
            nearest = read_pairs(job.out, job.shard.first_row).within(config.max_distance).nearest()
            yield Pairs(nearest.rows, kept[nearest.others], nearest.distances)
            is_copy[nearest.rows] = True
        left = left[~is_copy[left]]


def _compare_block(
    own: ComparedSplit, block: np.ndarray, folder: AnyPath, name: str, there: set[str], config: DedupConfig
) -> Pairs:
    """The copies among the images of a block. there: files of an earlier run."""
    out, images = folder / f"{name}.npz", folder / f"{name}-images.npz"
    if str(out) not in there:
        write_images(own.jobs, images, block)
        sizes = np.concatenate([job.sizes for job in own.jobs])
        job = BlockJob(str(images), config.max_distance, str(out))
        run_tasks(search_shard.compare_block, [job], [(len(block), int(sizes[block].sum()))], "compared", own, config)
    images.unlink(missing_ok=True)
    pairs = read_pairs(str(out))
    return Pairs(block[pairs.rows], block[pairs.others], pairs.distances)


def _describe(own: ComparedSplit, copies: Pairs) -> tuple[pa.Table, list[tuple[Any, Any]], int]:
    """Returns the exclusion list (EXCLUDED), pairs to draw, largest distance first, and how many copies have other
    labels.
    """
    table = own.dataset.table(own.split, verify=False)
    there, kept = (table.rows(rows, ["key", "labels"]) for rows in (copies.rows, copies.others))
    of = kept["key"].to_pylist()
    differ = [a != b for a, b in zip(there["labels"].to_pylist(), kept["labels"].to_pylist(), strict=True)]
    notes = [", which has other labels" * other for other in differ]
    marks, pictures = describe(own, copies, of, notes, lambda i: own.tile(int(copies.others[i]), of[i]))
    return marks, pictures, sum(differ)


def _print(report: dict[str, Any]) -> None:
    data, edges = report["data"], report["histogram_edges"]
    counted_by = [f"{count:,}" for count in report["histogram"]]
    for line in aligned([["distance", *(f"<{edge:.2g}" for edge in edges[1:])], ["copies", *counted_by]], 1):
        print(line)
    print(
        f"{data['copies']:,} of the {counted(data['images'], 'image')} of {data['name']} are copies of"
        f" {data['images_with_copies']:,} others, which are kept (at most {data['most_copies_of_one']:,} of one);"
        f" {data['copies_with_other_labels']:,} of them have other labels than the kept image"
    )
    if data["excluded_otherwise"]:
        print(f"not compared, since other lists exclude them: {counted(data['excluded_otherwise'], 'image')}")
    print_not_compared([data], report["seconds"])
