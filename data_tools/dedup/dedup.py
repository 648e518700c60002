"""Finds the images of a data set that are copies of test images: thumbnails of all images, then a search, one Ray task
per shard.

Copies within a split are found by within_split.py.

All output is in the data set's folder: exclude/test_copies.parquet, dedup/report.json, dedup/pairs.png,
dedup/thumbnails/ (one file per shard, named by the shard's sha256) and dedup/search/ (one folder per choice of test
images, with one file per searched shard). Shards whose file exists are not read or searched again.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.dedup import search_shard, within_split
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
from data_tools.dedup.search_shard import Pairs, SearchJob, read_pairs, write_images
from pipeline.base.errors import UserError
from pipeline.base.gallery import Tile
from pipeline.base.locks import only_writer
from pipeline.base.words import aligned, counted
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import location_and_split, open_dataset
from pipeline.data.storage.bucket import AnyPath, make_folder, to_path
from pipeline.settings.commands.data import DedupConfig

LIST, REPORT, SHEET, TESTS = "test_copies", "report.json", "pairs.png", "tests.npz"


def run(config: DedupConfig) -> dict[str, Any]:
    """Search, write the report and the exclusion list; returns the report's content. After a UserError no list is
    written.
    """
    if config.within_split:
        return within_split.run(config)
    searched, tests = _open(config)
    with only_writer(searched.dataset.path / FOLDER):
        return _run(searched, tests, config)


def _run(searched: ComparedSplit, tests: list[ComparedSplit], config: DedupConfig) -> dict[str, Any]:
    started = time.monotonic()
    states = read_images([searched, *tests], config)
    pairs = _search(searched, tests, config)

    nearest = pairs.nearest()
    marks, pictures = _describe(searched, tests, nearest)
    report = _report(config, searched, tests, states, pairs, time.monotonic() - started)
    sheet = draw_pairs(pictures) if pictures else None
    done = finish(searched, LIST, marks, report, REPORT, (SHEET, sheet))
    _print(report)
    print(done)
    return report


def _open(config: DedupConfig) -> tuple[ComparedSplit, list[ComparedSplit]]:
    """Returns the searched split and the splits of test images."""
    data = open_dataset(ray_tasks.shared_path("data", config.data))
    folder = data.path / FOLDER / THUMBNAILS
    searched = compared_split(data, config.split, folder)
    tests: dict[tuple[AnyPath, str], ComparedSplit] = {}
    for entry in config.against:
        path, split = location_and_split(entry)
        dataset = open_dataset(ray_tasks.shared_path("against", path))
        splits = [split] if split else dataset.splits
        if (dataset.path == data.path or dataset.fingerprint == data.fingerprint) and config.split in splits:
            raise UserError(
                f"against = {entry} is the searched split itself: every image would be its own copy. Name another split"
                f" of this data set (against={path}:{next((s for s in dataset.splits if s != config.split), 'test')})"
                " or another data set. within_split=true finds near copies within the split."
            )
        for name in splits:
            tests[dataset.path, name] = compared_split(dataset, name, folder)
    # Folders of one name are told apart by their paths.
    folders = Counter(path.name for path in {path for path, _ in tests})
    return searched, [
        part if folders[path.name] == 1 else replace(part, name=f"{path}:{split}")
        for (path, split), part in tests.items()
    ]


def _search(searched: ComparedSplit, tests: Sequence[ComparedSplit], config: DedupConfig) -> Pairs:
    """Returns every pair of a searched image and a test image with equal bytes or within max_distance."""
    test_jobs = [job for part in tests for job in part.jobs]
    names = [f"{job.tar} {to_path(job.out).name}" for job in test_jobs]
    choice = hashlib.sha256("\n".join([str(search_shard.FORMAT), *names]).encode()).hexdigest()[:16]
    folder = searched.dataset.path / FOLDER / SEARCH / choice
    make_folder(folder)
    every = [SearchJob(job, str(folder / TESTS), str(folder / to_path(job.out).name)) for job in searched.jobs]
    there = {str(path) for path in folder.iterdir()}
    missing = [job for job in every if job.out not in there]
    if missing and str(folder / TESTS) not in there:
        write_images(test_jobs, folder / TESTS)
    print(
        f"searched earlier for these test images: {len(every) - len(missing):,} of {counted(len(every), 'shard')}",
        flush=True,
    )
    run_tasks(search_shard.search_shard, missing, [job.amount for job in missing], "searched", searched, config)
    found = [read_pairs(job.out, job.shard.first_row) for job in every]
    columns = zip(*((p.rows, p.others, p.distances) for p in found), strict=True)
    return Pairs(*(np.concatenate(column) for column in columns)).within(config.max_distance)


def _describe(
    searched: ComparedSplit, tests: Sequence[ComparedSplit], nearest: Pairs
) -> tuple[pa.Table, list[tuple[Tile, Tile]]]:
    """Returns the exclusion list (schema EXCLUDED) and pairs to draw, (test image, copy), largest distance first."""
    starts = np.cumsum([0] + [len(part) for part in tests])
    of_part = np.searchsorted(starts, nearest.others, side="right") - 1
    rows = nearest.others - starts[of_part]
    theirs = [""] * len(of_part)
    for number, part in enumerate(tests):
        chosen = np.flatnonzero(of_part == number)
        for i, key in zip(chosen.tolist(), part.keys(rows[chosen]), strict=True):
            theirs[i] = f"{part.name}/{key}"
    return describe(
        searched, nearest, theirs, [""] * len(theirs), lambda i: tests[of_part[i]].tile(int(rows[i]), theirs[i])
    )


def _report(
    config: DedupConfig,
    searched: ComparedSplit,
    tests: Sequence[ComparedSplit],
    states: Sequence[np.ndarray],
    pairs: Pairs,
    seconds: float,
) -> dict[str, Any]:
    edges = histogram_edges(config)
    starts = np.cumsum([0] + [len(part) for part in tests])

    against = []
    for number, part in enumerate(tests):
        of_part = pairs.take((pairs.others >= starts[number]) & (pairs.others < starts[number + 1]))
        against.append(
            {
                **about(part, states[number + 1]),
                "images_with_copies": len(np.unique(of_part.others)),
                "copies": len(np.unique(of_part.rows)),
                "histogram": np.histogram(of_part.nearest().distances, edges)[0].tolist(),
            }
        )
    return {
        "data": {
            **about(searched, states[0]),
            "copies": len(np.unique(pairs.rows)),
        },
        "max_distance": config.max_distance,
        "marked": not config.dry_run,
        "histogram_edges": edges.round(6).tolist(),
        "against": against,
        "seconds": round(seconds, 1),
    }


def _print(report: dict[str, Any]) -> None:
    data, edges = report["data"], report["histogram_edges"]
    rows = [["evaluation set", "images", "with copies", "copies", *(f"<{edge:.2g}" for edge in edges[1:])]]
    for part in report["against"]:
        numbers = [part["images"], part["images_with_copies"], part["copies"], *part["histogram"]]
        rows.append([part["name"], *(f"{count:,}" for count in numbers)])
    for line in aligned(rows, 1):
        print(line)
    print(
        f"{data['copies']:,} of the {counted(data['images'], 'image')} of {data['name']} are copies of test images;"
        " they are counted by distance to the nearest test image"
    )
    print_not_compared([data, *report["against"]], report["seconds"])
