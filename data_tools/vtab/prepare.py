"""Makes a data set of each task of VTAB-1k: a task is a source of the sharding job, with a key, a label and a split per
sample.

keys.parquet, beside the manifest, has pool, key and label of every sample from which the splits were chosen, so that
`prove.py` can compute them again from the data set alone.
"""

import functools
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from data_tools.sharding import shard
from data_tools.sources.listing import Collector, Listing
from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.keys import KEYS_FILE, digest, key_table
from data_tools.vtab.origin import Origin, find_origin, given, read_original
from data_tools.vtab.prove import prove
from data_tools.vtab.readers import lists
from data_tools.vtab.readers.convert import as_stored
from data_tools.vtab.readers.files import MissingError
from data_tools.vtab.readers.original import Original, places_of
from data_tools.vtab.recorded import as_recorded, read_about
from data_tools.vtab.split import SPLITS, choose, shard_key
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import INFO, open_dataset
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.experiment.vtab_tasks import TASKS, Task
from pipeline.settings.commands.data import ShardConfig, VtabPrepareConfig


def run(config: VtabPrepareConfig) -> None:
    """Make, complete or verify the data set of every task whose files exist, and list the missing ones; or prove the
    splits.

    A failed task does not stop the others. A task whose data set exists counts as ready without its files. Raises
    UserError for a setting that is not a folder; and, after all tasks, if one failed or a requested one is missing.
    """
    places = given(config)
    tasks = _tasks(config.tasks)
    if config.prove:
        prove(tasks, config)
        return
    ready, missing, failed = [], {}, {}
    for task in tasks:
        try:
            try:
                origin = find_origin(task, config)
            except MissingError as error:
                # The original files are large and may have been deleted.
                if _is_made(task, _folder(task, config)):
                    ready.append(f"{task.name} (made before)")
                else:
                    missing[task.name] = str(error)
                continue
            print(f"{task.title} ({task.name}), from {origin.kind}:", flush=True)
            _make(task, origin, config)
            ready.append(task.name)
        except UserError as error:
            failed[task.name] = str(error)
            print(f"failed: {task.name}: {error}", file=sys.stderr, flush=True)
    _report(ready, missing)
    wrong = failed | (missing if config.tasks else {})
    if wrong:
        few = "; ".join(f"{name}: {error}" for name, error in [*wrong.items()][:2])
        raise UserError(f"{len(wrong)} of {counted(len(tasks), 'task')} were not made: {few}")
    if not ready:
        where = " or ".join(f"{name} = {value}" for name, value in places.items())
        raise UserError(
            f"No task has its files in {where}. Each data set has a folder of its own there (docs/vtab.md)."
        )


def _tasks(names: list[str]) -> list[Task]:
    known = {task.name: task for task in TASKS}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"tasks: there is no task {unknown[0]!r}. There are: {', '.join(known)}.")
    return [known[name] for name in names] or list(TASKS)


def _folder(task: Task, config: VtabPrepareConfig) -> AnyPath:
    return shard.resolve("out", config.out) / task.name


def _is_made(task: Task, folder: AnyPath) -> bool:
    """Whether a data set of this task was finished in the folder. Raises UserError for a damaged dataset.json."""
    if not (folder / INFO).exists():
        return False
    about = read_about(open_dataset(folder))
    return about is not None and about["task"] == task.name


def _make(task: Task, origin: Origin, config: VtabPrepareConfig) -> None:
    settings = ShardConfig(
        source=str(origin.folder),
        out=str(_folder(task, config)),
        splits=dict.fromkeys(SPLITS, ""),
        samples_per_shard=config.samples_per_shard,
        num_tasks=config.num_tasks,
    )
    shard.run(settings, functools.partial(_list, task, origin, config.published))


def _list(
    task: Task, origin: Origin, published: bool, source: AnyPath, settings: ShardConfig, staging: AnyPath
) -> Listing:
    """List the samples of a task; see `shard.Lister`."""
    about: dict[str, Any] = {"task": task.name, "from": origin.kind, "published": published, "notes": []}
    if origin.kind == "lists":
        listing = lists.listing(task, source, published)
    else:
        original = read_original(task, origin, staging, published)
        listing = _listing(task, original, source, settings.splits, staging)
        about["notes"] = original.notes
        about["keys_sha256"] = digest(listing.extra_tables[KEYS_FILE])
    # A missing test image would change the score.
    listing = replace(listing, notes=[*listing.notes, *about["notes"]], about={"vtab": about}, needs_all=True)
    return as_recorded(listing, to_path(settings.out))


def _listing(task: Task, original: Original, source: AnyPath, splits: dict[str, str], staging: AnyPath) -> Listing:
    chosen = choose(DATASETS[task.dataset], {name: pool.keys for name, pool in original.pools.items()})
    collector = Collector(source, splits, by_folders=False, classes=original.classes)
    places = {
        name: places_of(pool, np.concatenate(wanted), staging / f"{name}.images")
        for name, pool in original.pools.items()
        if (wanted := [rows[name] for rows in chosen.values() if name in rows])
    }
    containers: dict[str, int] = {"": -1}
    for split, pools in chosen.items():
        for name, rows in pools.items():
            pool = original.pools[name]
            for row in rows.tolist():
                place = places[name][row]
                if place.archive not in containers:
                    containers[place.archive] = collector.add_container(to_path(place.archive), 0)
                label = int(pool.labels[row])
                if not 0 <= label < len(original.classes):
                    raise UserError(
                        f"{source}: {pool.keys[row]} has label {label} of {counted(len(original.classes), 'class')}."
                    )
                collector.sample(
                    split,
                    shard_key(name, pool.keys[row]),
                    [original.classes[label]],
                    place.name,
                    containers[place.archive],
                    place.offset,
                    place.size,
                    place.packed,
                )
    table = key_table(original.pools)
    convert = original.convert or as_stored
    return replace(collector.finish(), convert=convert, extra_tables={KEYS_FILE: table})


def _report(ready: list[str], missing: dict[str, str]) -> None:
    for name, where in missing.items():
        print(f"missing: {name}: {where}")
    print(
        f"{len(ready)} of {counted(len(TASKS), 'task')} are ready{': ' if ready else ''}{', '.join(ready)}", flush=True
    )
