"""Finds the images of a data set that are copies of test images: thumbnails of all images, then a search, one Ray task per shard.

All output is in the data set's folder: exclude/test_copies.parquet, dedup/report.json, dedup/pairs.png, dedup/thumbnails/
(one file per shard, named by the shard's sha256) and dedup/search/ (one folder per choice of test images, with one file per
searched shard). Shards whose file exists are not read or searched again.
"""

import contextlib
import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.dedup import search_shard
from data_tools.dedup.pair_sheet import draw_pairs, read_tile
from data_tools.dedup.search_shard import Pairs, SearchJob, read_pairs, write_tests
from data_tools.dedup.thumbnails import BAD, CHANGED, PLAIN, ThumbnailJob, jobs, make_thumbnails, read_states
from data_tools.driver import only_driver, remove_leftovers
from data_tools.tasks import tasks_on_cluster
from pipeline import ray_tasks
from pipeline.base.errors import UserError
from pipeline.base.gallery import Tile
from pipeline.base.progress import PROGRESS_FILE, duration
from pipeline.base.words import aligned, counted
from pipeline.data.dataset.bad_budget import BadBudget
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.exclusion import EXCLUDED, excluded_rows, read_lists, write_list
from pipeline.data.dataset.manifest import Dataset, location_and_split, open_dataset
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath, BucketPath, make_folder, to_path
from pipeline.data.storage.retry import StorageError
from pipeline.settings.commands.data import DedupConfig

LIST, FOLDER, REPORT, SHEET = "test_copies", "dedup", "report.json", "pairs.png"
THUMBNAILS, SEARCH, TESTS = "thumbnails", "search", "tests.npz"
# How the reason of a marked image begins; then come the test set, "/" and the key of the test image.
_COPY_OF = "copy of "
_HISTOGRAM_BINS = 10
_MAX_PICTURED = 96


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
        return read_tile(job.tar, int(job.offsets[at]), int(job.sizes[at]), caption)


def run(config: DedupConfig) -> dict[str, Any]:
    """Search, write the report and the exclusion list; returns the content of report.json. After a UserError no list is written."""
    searched, tests = _open(config)
    with only_driver(searched.dataset.path / FOLDER):
        return _run(searched, tests, config)


def _run(searched: ComparedSplit, tests: list[ComparedSplit], config: DedupConfig) -> dict[str, Any]:
    started = time.monotonic()
    folder = searched.dataset.path / FOLDER
    make_folder(folder / THUMBNAILS)
    remove_leftovers(folder, pattern="**/.*.tmp")
    # A killed job leaves it for good if this one has no tasks: they would replace it, and remove it at their end.
    remove_leftovers(folder, pattern=PROGRESS_FILE)
    states = _read_images([searched, *tests], config)
    _check_readable([searched, *tests], states, config.max_bad_share)
    pairs = _search(searched, tests, states, config)

    nearest = _nearest(pairs)
    marks, pictures = _describe(searched, tests, nearest)
    report = _report(config, searched, tests, states, pairs, time.monotonic() - started)
    sheet = draw_pairs(pictures) if pictures else None
    if not config.dry_run:
        earlier = _earlier_marks(searched.dataset)
        in_split = pc.equal(earlier["split"], searched.split)
        _tell_unmarked(searched.dataset, tests, earlier.filter(in_split)["reason"].to_pylist())
        # An older report speaks of the older list. Without one, readers say "not searched".
        (folder / REPORT).unlink(missing_ok=True)
        of_others = _usable(searched.dataset, earlier.filter(pc.invert(in_split)))
        path = write_list(searched.dataset, LIST, pa.concat_tables([marks, of_others]))
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    write_files(folder, {REPORT: text, SHEET: sheet}, mark=REPORT)
    _print(report)
    if config.dry_run:
        print(
            f"dry_run: none of the {counted(len(marks), 'copy')} was marked; report and sheet of pairs are in {folder}"
        )
    else:
        print(
            f"marked {counted(len(marks), 'copy')} in {path}; look at {folder / SHEET}"
            if len(marks)
            else f"wrote {path}"
        )
        if len(of_others):
            splits = ", ".join(of_others["split"].unique().to_pylist())
            print(f"kept {counted(len(of_others), 'mark')} of earlier searches in {splits}")
    return report


def _open(config: DedupConfig) -> tuple[ComparedSplit, list[ComparedSplit]]:
    """Returns the searched split and the splits of test images."""
    data = open_dataset(ray_tasks.shared_path("data", config.data))
    folder = data.path / FOLDER / THUMBNAILS
    searched = _part(data, config.split, folder)
    tests: dict[tuple[AnyPath, str], ComparedSplit] = {}
    for entry in config.against:
        path, split = location_and_split(entry)
        dataset = open_dataset(ray_tasks.shared_path("against", path))
        splits = [split] if split else dataset.splits
        if (dataset.path == data.path or dataset.fingerprint == data.fingerprint) and config.split in splits:
            raise UserError(
                f"against = {entry} is the searched split itself: every image would be its own copy. Name another "
                f"split of this data set (against={path}:{next((s for s in dataset.splits if s != config.split), 'test')}) or "
                "another data set."
            )
        for name in splits:
            tests[dataset.path, name] = _part(dataset, name, folder)
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


def _part(dataset: Dataset, split: str, folder: AnyPath) -> ComparedSplit:
    if not dataset.info["samples"].get(split, 0):
        known = ", ".join(name for name, count in dataset.info["samples"].items() if count) or "none"
        raise UserError(f"{dataset.path} has no images of a split {split!r}. It has: {known}.")
    return ComparedSplit(dataset, split, list(jobs(dataset, split, folder)), f"{dataset.path.name}:{split}")


def _read_images(parts: Sequence[ComparedSplit], config: DedupConfig) -> list[np.ndarray]:
    """Make the thumbnails of every shard that has none, and of each that was damaged. Returns the states of the images of each part."""
    every = {job.out: job for part in parts for job in part.jobs}
    folder = parts[0].dataset.path / FOLDER / THUMBNAILS
    there = {str(path) for path in folder.iterdir()}
    states = {out: read_states(job) for out, job in every.items() if out in there}
    # A shard may have been repaired since, which does not change its name.
    missing = [job for out, job in every.items() if out not in states or (states[out] == CHANGED).any()]
    print(
        f"{counted(sum(map(len, parts)), 'image')} in {counted(len(every), 'shard')}; {len(every) - len(missing):,} were read before",
        flush=True,
    )
    _run_tasks(make_thumbnails, missing, missing, "read", parts[0], config)
    states |= {job.out: read_states(job) for job in missing}
    return [np.concatenate([states[job.out] for job in part.jobs]) for part in parts]


def _run_tasks(
    function: Callable[[Any], None],
    tasks: Sequence[Any],
    shards: Sequence[ThumbnailJob],
    done: str,
    searched: ComparedSplit,
    config: DedupConfig,
) -> None:
    """Run one task per shard. done: the verb in the past tense for progress, such as "read"."""
    if not tasks:
        return
    total, folder = sum(len(job.offsets) for job in shards), searched.dataset.path / FOLDER
    with tasks_on_cluster(function, tasks, config.num_tasks, total, len(shards), folder, done) as (results, progress):
        for number, _ in results:
            progress.add(len(shards[number].offsets), int(shards[number].sizes.sum()))


def _check_readable(parts: Sequence[ComparedSplit], states: Sequence[np.ndarray], max_bad_share: float) -> None:
    for part, of_part in zip(parts, states, strict=True):
        bad = np.flatnonzero(_is_unreadable(of_part))
        if len(bad) > BadBudget(max_bad_share).allowed(len(part)):
            keys = ", ".join(part.keys(bad[:3]))
            raise UserError(
                f"{len(bad):,} of the {counted(len(part), 'image')} of {part.name} cannot be decoded{_or_changed(of_part)}, more than "
                f"max_bad_share = {max_bad_share} allows: {keys}. Repair or remove them and shard again, or raise max_bad_share."
            )


def _is_unreadable(states: np.ndarray) -> np.ndarray:
    return (states == BAD) | (states == CHANGED)


def _or_changed(states: np.ndarray) -> str:
    count = int((states == CHANGED).sum())
    return (
        f" or have other bytes than in the manifest ({count:,} of them; launch/verify.py lists them)" if count else ""
    )


def _search(
    searched: ComparedSplit, tests: Sequence[ComparedSplit], states: Sequence[np.ndarray], config: DedupConfig
) -> Pairs:
    """Returns every pair of a searched image and a test image with equal bytes or within max_distance."""
    test_jobs = [job for part in tests for job in part.jobs]
    names = [
        f"{job.tar} {_searched_name(job, of_part)}"
        for part, of_part in zip(tests, states[1:], strict=True)
        for job in part.jobs
    ]
    choice = hashlib.sha256("\n".join([str(search_shard.FORMAT), *names]).encode()).hexdigest()[:16]
    folder = searched.dataset.path / FOLDER / SEARCH / choice
    make_folder(folder)
    every = [SearchJob(job, str(folder / TESTS), str(folder / _searched_name(job, states[0]))) for job in searched.jobs]
    there = {str(path) for path in folder.iterdir()}
    missing = [job for job in every if job.out not in there]
    if missing and str(folder / TESTS) not in there:
        write_tests(test_jobs, folder / TESTS)
    print(
        f"{len(every) - len(missing):,} of {counted(len(every), 'shard')} were searched earlier for these test images",
        flush=True,
    )
    _run_tasks(search_shard.search_shard, missing, [job.shard for job in missing], "searched", searched, config)
    found = [read_pairs(job) for job in every]
    rows, others, distances = (
        np.concatenate(column) for column in zip(*((p.rows, p.tests, p.distances) for p in found), strict=True)
    )
    kept = distances <= config.max_distance
    return Pairs(rows[kept], others[kept], distances[kept])


def _searched_name(job: ThumbnailJob, of_split: np.ndarray) -> str:
    """File name of the pairs of a shard. That of a damaged shard tells which images were not compared: a repair may bring them back."""
    name = to_path(job.out).name
    changed = np.flatnonzero(of_split[job.first_row : job.first_row + len(job.offsets)] == CHANGED)
    return f"{hashlib.sha256(changed.astype('<i8').tobytes()).hexdigest()[:8]}-{name}" if len(changed) else name


def _nearest(pairs: Pairs) -> Pairs:
    """Keep the nearest test image of each row."""
    order = np.lexsort((pairs.tests, pairs.distances, pairs.rows))
    _, first = np.unique(pairs.rows[order], return_index=True)
    return Pairs(pairs.rows[order][first], pairs.tests[order][first], pairs.distances[order][first])


def _describe(
    searched: ComparedSplit, tests: Sequence[ComparedSplit], nearest: Pairs
) -> tuple[pa.Table, list[tuple[Tile, Tile]]]:
    """Returns the exclusion list (schema EXCLUDED) and pairs to draw, (test image, copy), largest distance first."""
    starts = np.cumsum([0] + [len(part) for part in tests])
    of_part = np.searchsorted(starts, nearest.tests, side="right") - 1
    rows = nearest.tests - starts[of_part]
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
    for i in np.argsort(-nearest.distances, kind="stable")[:_MAX_PICTURED].tolist():
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
    edges = np.linspace(0, config.max_distance or 1e-6, _HISTOGRAM_BINS + 1)
    starts = np.cumsum([0] + [len(part) for part in tests])

    def counts(of_part: np.ndarray) -> dict[str, int]:
        return {
            "images": len(of_part),
            "plain": int((of_part == PLAIN).sum()),
            "unreadable": int(_is_unreadable(of_part).sum()),
            "changed": int((of_part == CHANGED).sum()),
        }

    against = []
    for number, part in enumerate(tests):
        chosen = (pairs.tests >= starts[number]) & (pairs.tests < starts[number + 1])
        of_part = Pairs(pairs.rows[chosen], pairs.tests[chosen], pairs.distances[chosen])
        against.append(
            {
                "name": part.name,
                "path": str(part.dataset.path),
                "fingerprint": part.dataset.fingerprint,
                **counts(states[number + 1]),
                "images_with_copies": len(np.unique(of_part.tests)),
                "copies": len(np.unique(of_part.rows)),
                "histogram": np.histogram(_nearest(of_part).distances, edges)[0].tolist(),
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


def _earlier_marks(data: Dataset) -> pa.Table:
    """The list of earlier searches (schema EXCLUDED)."""
    try:  # Not the report, which a dry run has replaced, too.
        return read_lists(data, LIST)[LIST]
    except StorageError:
        raise
    except UserError:  # There is none, or it is of other data.
        return EXCLUDED.empty_table()


def _usable(data: Dataset, marks: pa.Table) -> pa.Table:
    """These marks; none if their rows are not those of the manifest, as after indexing again."""
    splits = marks["split"].unique().to_pylist()
    try:
        for split in splits:
            data.table(split, verify=False)
            excluded_rows(data, split, LIST)
    except StorageError:
        raise
    except UserError as error:
        print(f"note: the earlier marks in {', '.join(splits)} are dropped: {error}")
        return EXCLUDED.empty_table()
    return marks


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
        counts = [part["images"], part["images_with_copies"], part["copies"], *part["histogram"]]
        rows.append([part["name"], *(f"{count:,}" for count in counts)])
    for line in aligned(rows, 1):
        print(line)
    everything = [data, *report["against"]]
    plain, bad, changed = (sum(part[name] for part in everything) for name in ("plain", "unreadable", "changed"))
    print(
        f"{data['copies']:,} of the {counted(data['images'], 'image')} of {data['name']} are copies of test images; they are "
        f"counted by distance to the nearest test image. With too little detail to compare (only equal "
        f"files are found): {counted(plain, 'image')}; not decodable: {bad - changed:,}; {duration(report['seconds'])}"
    )
    if changed:
        print(
            f"{counted(changed, 'image')} could not be compared, with other bytes than in the manifest. Repair them (launch/verify.py "
            "lists them), and run the same command again."
        )
