"""Proves that the splits of prepared tasks are those of VTAB-1k: computes them again from the keys, and compares the
manifest.

keys.parquet has key and label of every sample from which the splits were chosen; dataset.json has its digest.

Images are not read; `launch/verify.py` compares the shards with the manifest.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.sharding.shard import resolve
from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.origin import MissingError, find_originals, read_original, wrong_counts
from data_tools.vtab.readers.files import Pool
from data_tools.vtab.split import choose, shard_key
from pipeline.base.errors import UserError
from pipeline.base.words import counted, first_of
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet
from pipeline.data.storage.retry import StorageError
from pipeline.experiment.vtab_tasks import Task
from pipeline.settings.commands.data import VtabPrepareConfig

KEYS_FILE = "keys.parquet"
# pool: a split of tensorflow_datasets. key: as hashed there (the key in shards is `split.shard_key` of it).
KEYS = pa.schema([("pool", "string"), ("key", "string"), ("label", "int32")])


def key_table(pools: Mapping[str, Pool]) -> pa.Table:
    """Returns one row per sample of each pool, in the order of the source."""
    tables = [
        pa.table([pa.repeat(pa.scalar(name), len(pool.keys)), pool.keys, pool.labels.astype(np.int32)], schema=KEYS)
        for name, pool in pools.items()
    ]
    return pa.concat_tables(tables).combine_chunks()


def read_keys(path: AnyPath) -> pa.Table:
    """Read keys.parquet. Raises OSError or pa.ArrowException for a missing or damaged file."""
    return open_parquet(path).read().cast(KEYS)


def by_pool(table: pa.Table) -> dict[str, dict[str, int]]:
    """Returns pool -> key -> label."""
    pools: dict[str, dict[str, int]] = {}
    for row in table.to_pylist():
        pools.setdefault(row["pool"], {})[row["key"]] = row["label"]
    return pools


def digest(table: pa.Table) -> str:
    """Returns the hex SHA-256 of the content of a table of keys."""
    found = hashlib.sha256()
    for row in table.to_pylist():
        found.update(f"{row['pool']}\t{row['key']}\t{row['label']}\n".encode())
    return found.hexdigest()


def prove(tasks: list[Task], config: VtabPrepareConfig) -> None:
    """Print for each task in config.out whether its splits are proved. Raises UserError if those of a task are not.

    If originals has the files of a task, its keys and labels are read again and compared as well.
    """
    out = resolve("out", config.out)
    there = [task for task in tasks if (out / task.name / INFO).exists()]
    absent = [task.name for task in tasks if task not in there]
    if not there or (config.tasks and absent):
        raise UserError(f"{out} has no data set {', '.join(absent)}. Make it first, without prove.")
    unproved = []
    for task in there:
        problems: list[str] = []
        again = ""
        try:
            dataset = open_dataset(out / task.name)
            problems.extend(_problems(task, dataset))
            if config.originals and not problems:
                try:
                    folder = find_originals(task, config)
                except MissingError:
                    again = "; keys and labels not read again (no originals)"
                else:
                    again = f"; keys and labels read again from {folder}"
                    problems.extend(_changes(task, folder, dataset))
        except StorageError:
            raise
        except UserError as error:  # Such as that its dataset.json is damaged.
            problems.append(str(error))
        if problems:
            unproved.append(task.name)
            print(f"{task.name}: NOT PROVED: {'; '.join(problems)}", flush=True)
        else:
            counts = ", ".join(f"{split} {count:,}" for split, count in dataset.info["samples"].items())
            notes = dataset.info["source"]["vtab"]["notes"]
            said = "proved with reservations" if notes else "proved"
            print("; ".join([f"{task.name}: {said}: {counts}{again}", *notes]), flush=True)
    if absent:
        print(f"not there: {', '.join(absent)}")
    if unproved:
        raise UserError(f"{len(unproved)} of {counted(len(there), 'task')} are not proved: {', '.join(unproved)}.")


def _problems(task: Task, dataset: Dataset) -> Iterator[str]:
    """Yields a description of each problem of the data set's splits."""
    about = dataset.info["source"].get("vtab")
    if about is None or about["task"] != task.name:
        yield f"it was not made as {task.name} by launch/vtab_prepare.py"
        return
    if dataset.damaged_tables():
        yield "the manifest's tables are not those that dataset.json was written with"
    try:
        table = read_keys(dataset.path / KEYS_FILE)
    except (OSError, pa.ArrowException) as error:
        yield f"{KEYS_FILE} cannot be read ({error}): run launch/vtab_prepare.py on it again"
        return
    if digest(table) != about["keys_sha256"]:
        yield f"{KEYS_FILE} is not the one that dataset.json was written with"
    pools = by_pool(table)
    keys = {name: list(of_pool) for name, of_pool in pools.items()}
    if about["published"]:
        yield from (f"{KEYS_FILE} {problem}" for problem in wrong_counts(task.dataset, keys))
    hashes = {}
    for split, rows in choose(DATASETS[task.dataset], keys).items():
        expected = {
            shard_key(name, key): [pools[name][key]]
            for name, of_pool in rows.items()
            for key in map(keys[name].__getitem__, of_pool.tolist())
        }
        found = dataset.table(split).read_all(["key", "labels", "xxh128"]).to_pylist()
        hashes[split] = {row["key"]: row["xxh128"] for row in found}
        yield from _differences(split, expected, {row["key"]: row["labels"] for row in found})
    if hashes["train800"] | hashes["val200"] != hashes["train800val200"]:
        yield "train800val200 has other images than train800 and val200"


def _changes(task: Task, folder: AnyPath, dataset: Dataset) -> Iterator[str]:
    """Yields a description of each difference between the keys and labels of the original files and those of
    keys.parquet.
    """
    with tempfile.TemporaryDirectory() as staging:  # For what has to be unpacked.
        original = read_original(task, folder, Path(staging), dataset.info["source"]["vtab"]["published"])
    of_source, of_file = by_pool(key_table(original.pools)), by_pool(read_keys(dataset.path / KEYS_FILE))
    for name in sorted(of_source.keys() | of_file.keys()):
        yield from _differences(f"{KEYS_FILE}, pool {name!r},", of_source.get(name, {}), of_file.get(name, {}))


def _differences(where: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a description of each kind of difference between two mappings of keys to labels."""
    others = [key for key in expected.keys() & found.keys() if expected[key] != found[key]]
    for what, keys in (
        ("lacks", expected.keys() - found.keys()),
        ("has, and should not,", found.keys() - expected.keys()),
        ("has with another label", others),
    ):
        if keys:
            yield f"{where} {what} {len(keys):,}: {first_of(sorted(keys), 3)}"
