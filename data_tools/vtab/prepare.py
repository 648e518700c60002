"""Makes a data set of each task of VTAB-1k: a task is a source of the sharding job, with a key, a label and a split per
sample.

keys.parquet, beside the manifest, has pool, key and label of every sample from which the splits were chosen, so that
`prove.py` can compute them again from the data set alone.
"""

import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from data_tools.sharding import shard
from data_tools.sources.images import png
from data_tools.sources.listing import Collector, Listing
from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.origin import MissingError, find_originals, read_original
from data_tools.vtab.prove import KEYS_FILE, digest, key_table, prove
from data_tools.vtab.readers.files import FileLocation, Pool
from data_tools.vtab.split import SPLITS, choose, shard_key
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import INFO, open_dataset
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, make_folder, to_path
from pipeline.experiment.vtab_tasks import TASKS, Task
from pipeline.settings.commands.data import ShardConfig, VtabPrepareConfig


def run(config: VtabPrepareConfig) -> None:
    """Make, complete or verify the data set of every task whose files exist, and list the missing ones; or prove the
    splits.

    A failed task does not stop the others. A task whose data set exists counts as ready without its files. Raises
    UserError, after all tasks, if one failed or a requested one is missing.
    """
    tasks = _tasks(config.tasks)
    if config.prove:
        prove(tasks, config)
        return
    ready, missing, failed = [], {}, {}
    for task in tasks:
        try:
            out = shard.resolve("out", config.out) / task.name
            about = open_dataset(out).info["source"].get("vtab") if (out / INFO).exists() else None
            folder = find_originals(task, config)
            print(f"{task.title} ({task.name}):", flush=True)
            settings = ShardConfig(
                source=str(folder),
                out=str(out),
                splits=dict.fromkeys(SPLITS, ""),
                samples_per_shard=config.samples_per_shard,
                num_tasks=config.num_tasks,
            )
            shard.run(settings, partial(_list, task, config.published))
            ready.append(task.name)
        except MissingError as error:
            if about and about["task"] == task.name:  # The original files are large and may have been deleted.
                ready.append(f"{task.name} (made before)")
            else:
                missing[task.name] = str(error)
                print(f"missing: {task.name}: {error}")
        except UserError as error:
            failed[task.name] = str(error)
            print(f"failed: {task.name}: {error}", file=sys.stderr, flush=True)
    print(f"{len(ready)} of {counted(len(TASKS), 'task')} are ready: {', '.join(ready) or 'none'}", flush=True)
    wrong = failed | (missing if config.tasks else {})
    if wrong:
        errors = "; ".join(f"{name}: {error}" for name, error in wrong.items())
        raise UserError(f"{len(wrong)} of {counted(len(tasks), 'task')} were not made: {errors}")
    if not ready:
        raise UserError("No task has its files. Each data set has a folder of its own in originals (docs/vtab.md).")


def _tasks(names: list[str]) -> list[Task]:
    known = {task.name: task for task in TASKS}
    for name in names:
        if name not in known:
            raise UserError(f"tasks: there is no task {name!r}. There are: {', '.join(known)}.")
    return [known[name] for name in names or known]


def _list(task: Task, published: bool, source: AnyPath, settings: ShardConfig, staging: AnyPath) -> Listing:
    """List the samples of a task; see `shard.Lister`."""
    original = read_original(task, source, staging, published)
    chosen = choose(DATASETS[task.dataset], {name: pool.keys for name, pool in original.pools.items()})
    collector = Collector(source, settings.splits, by_folders=False, classes=original.classes)
    for name, pool in original.pools.items():
        wanted = {split: pools[name].tolist() for split, pools in chosen.items() if name in pools}
        places = _places(pool, sorted({*itertools.chain(*wanted.values())}), staging / f"{name}.images")
        for split, rows in wanted.items():
            for row in rows:
                place, label = places[row], int(pool.labels[row])
                container = collector.add_container(to_path(place.archive), 0) if place.archive else -1
                if not 0 <= label < len(original.classes):
                    raise UserError(
                        f"{source}: {pool.keys[row]} has label {label} of {counted(len(original.classes), 'class')}."
                    )
                key = shard_key(name, pool.keys[row])
                collector.sample(split, key, [original.classes[label]], place.name, container, *place[2:])
    table, listing = key_table(original.pools), collector.finish()
    about = {
        "task": task.name,
        "published": published,
        "notes": original.notes,
        "keys_sha256": digest(table),
    }
    return replace(
        listing,
        notes=[*listing.notes, *original.notes],
        about={"vtab": about},
        convert=original.convert,
        extra_tables={KEYS_FILE: table},
        needs_all=True,  # A missing test image would change the score.
    )


def _places(pool: Pool, rows: list[int], staged: AnyPath) -> Mapping[int, FileLocation]:
    """Returns row -> place of its image file. staged: file to which pixel arrays are written, as concatenated PNGs."""
    if isinstance(pool.images, list):
        return {row: pool.images[row] for row in rows}
    make_folder(staged.parent)
    places, offset = {}, 0
    with replacing(staged) as file:
        for row, pixels in zip(rows, pool.images(np.array(rows), len(pool.keys)), strict=True):
            size = file.write(png(pixels))
            places[row] = FileLocation(f"image {row}", str(staged), offset, size)
            offset += size
    return places
