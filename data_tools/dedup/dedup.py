"""Finds the images of a data set that are copies of test images: thumbnails of all images, then a search, one Ray task per shard.

Copies within a split are found by within_split.py.

All output is in the data set's folder: exclude/test_copies.parquet, dedup/report.json, dedup/pairs.png, dedup/thumbnails/
(one file per shard, named by the shard's sha256) and dedup/search/ (one folder per choice of test images, with one file per
searched shard). Shards whose file exists are not read or searched again.
"""

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup import search_shard, within_split
from data_tools.dedup.compared import (
    FOLDER,
    HISTOGRAM_BINS,
    MAX_PICTURED,
    SEARCH,
    THUMBNAILS,
    ComparedSplit,
    compared_split,
    counts,
    print_not_compared,
    read_images,
    run_tasks,
    searched_name,
)
from data_tools.dedup.marks import finish
from data_tools.dedup.pair_sheet import draw_pairs
from data_tools.dedup.search_shard import Pairs, SearchJob, read_pairs, write_images
from pipeline import ray_tasks
from pipeline.base.errors import UserError
from pipeline.base.gallery import Tile
from pipeline.base.locks import only_writer
from pipeline.base.words import aligned, counted
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.exclusion import EXCLUDED, earlier_list
from pipeline.data.dataset.manifest import Dataset, location_and_split, open_dataset
from pipeline.data.storage.bucket import AnyPath, BucketPath, make_folder
from pipeline.settings.commands.data import DedupConfig

LIST, REPORT, SHEET, TESTS = "test_copies", "report.json", "pairs.png", "tests.npz"
# How the reason of a marked image begins; then come the test set, "/" and the key of the test image.
_COPY_OF = "copy of "


def run(config: DedupConfig) -> dict[str, Any]:
    """Search, write the report and the exclusion list; returns the report's content. After a UserError no list is written."""
    if config.within_split:
        return within_split.run(config)
    searched, tests = _open(config)
    with only_writer(searched.dataset.path / FOLDER):
        return _run(searched, tests, config)


def _run(searched: ComparedSplit, tests: list[ComparedSplit], config: DedupConfig) -> dict[str, Any]:
    started = time.monotonic()
    states = read_images([searched, *tests], config)
    pairs = _search(searched, tests, states, config)

    nearest = pairs.nearest()
    marks, pictures = _describe(searched, tests, nearest)
    report = _report(config, searched, tests, states, pairs, time.monotonic() - started)
    sheet = draw_pairs(pictures) if pictures else None
    if not config.dry_run:
        earlier = earlier_list(searched.dataset, LIST)  # Not the report, which a dry run has replaced, too.
        in_split = earlier.filter(pc.equal(earlier["split"], searched.split))
        _tell_unmarked(searched.dataset, tests, in_split["reason"].to_pylist())
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
                f"against = {entry} is the searched split itself: every image would be its own copy. Name another "
                f"split of this data set (against={path}:{next((s for s in dataset.splits if s != config.split), 'test')}) or "
                "another data set. within_split=true finds near copies within the split."
            )
        for name in splits:
            tests[dataset.path, name] = compared_split(dataset, name, folder)
    folders = _short_names(list(dict.fromkeys(path for path, _ in tests)))
    return searched, [replace(part, name=f"{folders[path]}:{split}") for (path, split), part in tests.items()]


def _short_names(folders: Sequence[AnyPath]) -> dict[AnyPath, str]:
    """The last name of each folder, after as many of its parents as tell it from the others."""
    names = {folder: (folder.key if isinstance(folder, BucketPath) else str(folder)).split("/") for folder in folders}

    def short(folder: AnyPath) -> str:
        ends = (names[folder][-count:] for count in range(1, len(names[folder]) + 1))
        alone = (end for end in ends if sum(other[-len(end) :] == end for other in names.values()) == 1)
        return "/".join(next(alone, [str(folder)]))  # The same in two buckets' stores.

    return {folder: short(folder) for folder in folders}


def _search(
    searched: ComparedSplit, tests: Sequence[ComparedSplit], states: Sequence[np.ndarray], config: DedupConfig
) -> Pairs:
    """Returns every pair of a searched image and a test image with equal bytes or within max_distance."""
    test_jobs = [job for part in tests for job in part.jobs]
    names = [
        f"{job.tar} {searched_name(job, of_part)}"
        for part, of_part in zip(tests, states[1:], strict=True)
        for job in part.jobs
    ]
    choice = hashlib.sha256("\n".join([str(search_shard.FORMAT), *names]).encode()).hexdigest()[:16]
    folder = searched.dataset.path / FOLDER / SEARCH / choice
    make_folder(folder)
    every = [SearchJob(job, str(folder / TESTS), str(folder / searched_name(job, states[0]))) for job in searched.jobs]
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
    own, theirs = searched.keys(nearest.rows), [""] * len(of_part)
    for number, part in enumerate(tests):
        chosen = np.flatnonzero(of_part == number)
        for i, key in zip(chosen.tolist(), part.keys(rows[chosen]), strict=True):
            theirs[i] = f"{part.name}/{key}"
    columns = {
        "split": [searched.split] * len(own),
        "row": nearest.rows.tolist(),
        "key": own,
        "reason": [
            f"{_COPY_OF}{other}, distance {distance:.3f}"
            for other, distance in zip(theirs, nearest.distances.tolist(), strict=True)
        ],
    }
    pictures = []
    for i in np.argsort(-nearest.distances, kind="stable")[:MAX_PICTURED].tolist():
        test = tests[of_part[i]].tile(int(rows[i]), theirs[i])
        copy = searched.tile(int(nearest.rows[i]), f"{nearest.distances[i]:.3f}  {own[i]}")
        pictures.append((test, copy))
    return pa.Table.from_pydict(columns, EXCLUDED), pictures


def _report(
    config: DedupConfig,
    searched: ComparedSplit,
    tests: Sequence[ComparedSplit],
    states: Sequence[np.ndarray],
    pairs: Pairs,
    seconds: float,
) -> dict[str, Any]:
    edges = np.linspace(0, config.max_distance or 1e-6, HISTOGRAM_BINS + 1)
    starts = np.cumsum([0] + [len(part) for part in tests])

    against = []
    for number, part in enumerate(tests):
        chosen = (pairs.others >= starts[number]) & (pairs.others < starts[number + 1])
        of_part = Pairs(pairs.rows[chosen], pairs.others[chosen], pairs.distances[chosen])
        against.append(
            {
                "name": part.name,
                "path": str(part.dataset.path),
                "fingerprint": part.dataset.fingerprint,
                **counts(states[number + 1]),
                "images_with_copies": len(np.unique(of_part.others)),
                "copies": len(np.unique(of_part.rows)),
                "histogram": np.histogram(of_part.nearest().distances, edges)[0].tolist(),
            }
        )
    return {
        "data": {
            "name": searched.name,
            "path": str(searched.dataset.path),
            "fingerprint": searched.dataset.fingerprint,
            **counts(states[0]),
            "copies": len(np.unique(pairs.rows)),
        },
        "max_distance": config.max_distance,
        "marked": not config.dry_run,
        "histogram_edges": edges.round(6).tolist(),
        "against": against,
        "seconds": round(seconds, 1),
    }


def _tell_unmarked(data: Dataset, tests: Sequence[ComparedSplit], reasons: Sequence[str]) -> None:
    """Print of which test images an earlier search marked copies that this search will replace. reasons: of its marks."""
    # The folder may have several names, and the key, too.
    named = (reason.removeprefix(_COPY_OF).partition(":") for reason in reasons)
    marked = sorted({f"{folder}:{rest.partition('/')[0]}" for folder, _, rest in named})
    now, before = {test.name: test.dataset.fingerprint for test in tests}, _marked_before(data)
    others = [name for name in marked if name not in now]
    others += [f"another {name}" for name in marked if name in now and before.get(name, now[name]) != now[name]]
    if others:
        print(
            f"note: an earlier search marked copies of {', '.join(others)}; the list is now of this search alone. To mark both, name all test "
            "images in one command: against=[...]"
        )


def _marked_before(data: Dataset) -> dict[str, str]:
    """Name -> fingerprint of the test sets of an earlier search; none after a dry run, whose report is of no list."""
    with contextlib.suppress(FileNotFoundError, UserError):
        report = read_dedup_report(data.path)
        return {part.name: part.fingerprint for part in report.against} if report.marked else {}
    return {}


def _print(report: dict[str, Any]) -> None:
    data, edges = report["data"], report["histogram_edges"]
    rows = [["evaluation set", "images", "with copies", "copies", *(f"<{edge:.2g}" for edge in edges[1:])]]
    for part in report["against"]:
        numbers = [part["images"], part["images_with_copies"], part["copies"], *part["histogram"]]
        rows.append([part["name"], *(f"{count:,}" for count in numbers)])
    for line in aligned(rows, 1):
        print(line)
    print(
        f"{data['copies']:,} of the {counted(data['images'], 'image')} of {data['name']} are copies of test images; they are "
        "counted by distance to the nearest test image"
    )
    print_not_compared([data, *report["against"]], report["seconds"])
