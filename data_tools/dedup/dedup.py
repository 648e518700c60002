"""Finds the images of a data set that are copies of test images, or of one another (within_split.py): thumbnails of all
images, then a search, one Ray task per shard.

All output is in the data set's folder: a list of excluded samples, a report and a sheet of pairs
(exclude/test_copies.parquet, dedup/report.json and dedup/pairs.png, or near_copies in place of these names),
dedup/thumbnails/ (one file per shard, named by the shard's sha256) and dedup/search/ (one folder per choice of images,
with one file per searched shard). Shards whose file exists are not read or searched again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup import search_shard, within_split
from data_tools.dedup.search_shard import ImagesJob, Pairs, SearchJob, read_pairs, write_images, write_index
from data_tools.dedup.thumbnails import (
    BAD,
    FOLDER,
    PLAIN,
    THUMBNAILS,
    ComparedSplit,
    compared_split,
    located,
    read_images,
    run_tasks,
    unfinished,
)
from pipeline.base.errors import UserError
from pipeline.base.gallery import Tile, folded, gallery
from pipeline.base.locks import only_writer
from pipeline.base.page import png
from pipeline.base.words import counted, printable
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.exclusion import (
    EXCLUDED,
    NEAR_COPIES,
    earlier_list,
    excluded_rows,
    paths_of_lists,
    write_list,
)
from pipeline.data.dataset.manifest import location_and_split, open_dataset
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import remove_tree, to_path
from pipeline.settings.commands.data import DedupConfig

TESTS = "tests.npz"
_MAX_PICTURED = 96
_SIDE = 224  # More pixels of an image are not drawn.
_GREY = np.full((_SIDE, _SIDE, 3), 128, np.uint8)  # An unreadable image: equal files are copies, also damaged ones.


def run(config: DedupConfig) -> dict[str, Any]:
    """Search, write the report and the exclusion list; returns the report's content. After a UserError no list is
    written.
    """
    data = open_dataset(ray_tasks.shared_path("data", config.data))
    searched = compared_split(data, config.split, data.path / FOLDER / THUMBNAILS)
    tests = [] if config.within_split else _tests(searched, config)
    with only_writer(data.path / FOLDER):
        states = read_images([searched, *tests], config)
        if tests:
            names = "test_copies", "report.json", "pairs.png", "Test images"
            copies, found = _against(searched, tests, states, config)
            of = _names(tests, copies.others)
        else:
            names = NEAR_COPIES, "near_copies.json", "near_copies.png", "Kept images"
            copies, found = _within(searched, states[0], config)
            of = searched.keys(copies.others)
        report = {"max_distance": config.max_distance, **found}
        keys = searched.keys(copies.rows)
        reasons = [
            f"copy of {other}, distance {distance:.3f}"
            for other, distance in zip(of, copies.distances.tolist(), strict=True)
        ]
        columns = {"split": [searched.split] * len(keys), "row": copies.rows.tolist(), "key": keys, "reason": reasons}
        pictures = []
        for i in np.argsort(-copies.distances, kind="stable")[:_MAX_PICTURED].tolist():
            other = _tile(tests or [searched], int(copies.others[i]), of[i])
            copy = _tile([searched], int(copies.rows[i]), f"{copies.distances[i]:.3f}", keys[i])
            pictures.append((other, copy))
        _print(report)
        _write(searched, names, pa.Table.from_pydict(columns, EXCLUDED), report, pictures)
        return report


def _tests(searched: ComparedSplit, config: DedupConfig) -> list[ComparedSplit]:
    """The splits of test images."""
    data = searched.dataset
    tests = {}
    for entry in config.against:
        path, split = location_and_split(entry)
        dataset = open_dataset(ray_tasks.shared_path("against", path))
        splits = [split] if split else dataset.splits
        if (dataset.path == data.path or dataset.fingerprint == data.fingerprint) and config.split in splits:
            raise UserError(
                f"against = {entry} is the searched split itself: every image would be its own copy. Name another split"
                f" of this data set (against={path}:SPLIT) or another data set. within_split=true finds near copies"
                " within the split."
            )
        for name in splits:
            tests[dataset.path, name] = compared_split(dataset, name, data.path / FOLDER / THUMBNAILS)
    return [*tests.values()]


def _against(
    searched: ComparedSplit, tests: list[ComparedSplit], states: list[np.ndarray], config: DedupConfig
) -> tuple[Pairs, dict[str, Any]]:
    """Returns the copies of test images, each with the nearest of these, and what the report says of them."""
    pairs = _search(searched, tests, config)
    against, (of_part, _) = [], located(map(len, tests), pairs.others)
    for number, part in enumerate(tests):
        found = pairs.take(of_part == number)
        against.append(
            {
                **_about(part, states[number + 1]),
                "images_with_copies": len(np.unique(found.others)),
                "copies": len(np.unique(found.rows)),
            }
        )
    copies = pairs.nearest()
    return copies, {"data": {**_about(searched, states[0]), "copies": len(copies.rows)}, "against": against}


def _search(searched: ComparedSplit, tests: Sequence[ComparedSplit], config: DedupConfig) -> Pairs:
    """Returns every pair of a searched image and a test image with equal bytes or within max_distance."""
    test_jobs = [job for part in tests for job in part.jobs]
    folder = search_shard.results_folder(searched, "", [job.name for job in test_jobs])
    every = [SearchJob(job, str(folder / TESTS), str(folder / to_path(job.out).name)) for job in searched.jobs]
    missing = unfinished(every, folder)
    if missing and not (folder / TESTS).exists():
        write_images(test_jobs, folder / TESTS, np.arange(sum(map(len, tests))))
    print(
        f"searched earlier for these test images: {len(every) - len(missing):,} of {counted(len(every), 'shard')}",
        flush=True,
    )
    index = search_shard.index_folder(folder / TESTS)
    if missing and isinstance(index, Path):
        amount = np.sum([job.amount for job in test_jobs], axis=0).tolist()
        run_tasks(write_index, [ImagesJob(str(folder / TESTS), str(index), amount)], "indexed", searched, config)
    run_tasks(search_shard.search_shard, missing, "searched", searched, config)
    remove_tree(index)
    found = [read_pairs(job.out, job.shard.first_row) for job in every]
    return Pairs(*map(np.concatenate, zip(*found, strict=True))).within(config.max_distance)


def _within(own: ComparedSplit, states: np.ndarray, config: DedupConfig) -> tuple[Pairs, dict[str, Any]]:
    """Returns the copies of kept images of the split, and what the report says of them."""
    # An image that another list excludes cannot stand for its copies.
    others = [name for name in paths_of_lists(own.dataset) if name != NEAR_COPIES]
    elsewhere, _ = excluded_rows(own.dataset, own.split, ",".join(others) or "none")
    copies = within_split.search(own, states, elsewhere, config)
    data = {
        **_about(own, np.delete(states, elsewhere)),
        "images": len(own),
        "excluded_otherwise": len(elsewhere),
        "copies": len(copies.rows),
        "images_with_copies": len(np.unique(copies.others)),
    }
    return copies, {"data": data}


def _about(part: ComparedSplit, states: np.ndarray) -> dict[str, Any]:
    """For a report: the split, its number of images, and how many of them were not compared, by reason."""
    return {
        "name": part.name,
        "path": str(part.dataset.path),
        "fingerprint": part.dataset.fingerprint,
        "images": len(states),
        "plain": int((states == PLAIN).sum()),
        "unreadable": int((states == BAD).sum()),
    }


def _names(tests: Sequence[ComparedSplit], rows: np.ndarray) -> list[str]:
    """FOLDER:SPLIT/KEY of test images."""
    of_part, rows = located(map(len, tests), rows)
    names = np.empty(len(rows), object)
    for number, part in enumerate(tests):
        names[of_part == number] = [f"{part.name}/{key}" for key in part.keys(rows[of_part == number])]
    return names.tolist()


def _tile(parts: Sequence[ComparedSplit], row: int, *lines: str) -> Tile:
    """An image with lines over it. row: counted over all parts."""
    (part,), (place,) = located(map(len, parts), np.array([row]))
    pixels = parts[part].thumbnail(int(place), _SIDE)
    return Tile(_GREY if pixels is None else pixels, [*map(printable, lines)])


def _write(
    searched: ComparedSplit,
    names: tuple[str, str, str, str],
    marks: pa.Table,
    report: dict[str, Any],
    pictures: list[tuple[Tile, Tile]],
) -> None:
    """Write the list, then the report and the sheet of pairs.

    names: of the list, the files of the report and the sheet, and of the upper images of the sheet. marks: EXCLUDED.
    """
    name, report_file, sheet_file, upper = names
    folder = searched.dataset.path / FOLDER
    # An older report speaks of the older list. Without one, readers say "not searched".
    (folder / report_file).unlink(missing_ok=True)
    # The marks of the searched split are replaced, those of other splits kept.
    earlier = earlier_list(searched.dataset, name)
    of_others = earlier.filter(pc.not_equal(earlier["split"], searched.split))
    path = write_list(searched.dataset, name, pa.concat_tables([marks, of_others]))
    sheet = None  # Removes an older one.
    if pictures:
        title = f"{upper}, and below each its copy, with the distance"
        sheet = png(gallery(folded([*zip(*pictures, strict=True)]), title), dpi=100)
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_files(folder, {report_file: text, sheet_file: sheet}, mark=report_file)
    print(f"marked {counted(len(marks), 'copy')} in {path}" + f"; look at {folder / sheet_file}" * bool(pictures))


def _print(report: dict[str, Any]) -> None:
    data, against = report["data"], report.get("against", [])
    for part in against or [{**data, "name": "one another, which are kept"}]:
        print(
            f"{part['copies']:,} of the {counted(data['images'], 'image')} of {data['name']} are copies of"
            f" {part['images_with_copies']:,} of {part['name']}"
        )
    if left_out := data.get("excluded_otherwise"):
        print(f"not compared, since other lists exclude them: {counted(left_out, 'image')}")
    plain, bad = (sum(part[name] for part in (data, *against)) for name in ("plain", "unreadable"))
    print(
        f"with too little detail to compare (only equal files are found): {counted(plain, 'image')}; "
        f"not decodable: {bad:,}"
    )
