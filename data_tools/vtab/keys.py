"""What a task's finished data set records of its origin: keys.parquet, with key and label of every sample from which
the splits are chosen, and the entry in dataset.json.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.sources.listing import Listing
from data_tools.vtab.datasets import DATASETS, UNREADABLE
from data_tools.vtab.readers.files import Pool
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet

KEYS_FILE = "keys.parquet"
# pool: a split of tensorflow_datasets. key: as hashed there (the key in shards is `split.shard_key` of it).
KEYS = pa.schema([("pool", pa.string()), ("key", pa.string()), ("label", pa.int32())])
_NAMED = 3


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


def by_pool(table: pa.Table) -> dict[str, tuple[list[str], list[int]]]:
    """Returns pool -> (keys, labels)."""
    names = table["pool"].unique().to_pylist()
    parts = {name: table.filter(pc.equal(table["pool"], name)) for name in names}
    return {name: (part["key"].to_pylist(), part["label"].to_pylist()) for name, part in parts.items()}


def digest(table: pa.Table) -> str:
    """Returns the hex SHA-256 of the content of a table of keys."""
    found = hashlib.sha256()
    for pool, key, label in zip(*(table[name].to_pylist() for name in KEYS.names), strict=True):
        found.update(f"{pool}\t{key}\t{label}\n".encode())
    return found.hexdigest()


def read_about(dataset: Dataset) -> dict[str, Any] | None:
    """Returns the entry of `prepare.py` in dataset.json, None for other data sets."""
    return dataset.info["source"].get("vtab")


def as_recorded(listing: Listing, out: AnyPath) -> Listing:
    """Returns the listing without its table of keys if the finished data set in out has another: dataset.json has the
    digest of that one.

    Another origin of the same samples lists the keys in another order. (The sharding job refuses other samples.)
    """
    table = listing.extra_tables.get(KEYS_FILE)
    about = read_about(open_dataset(out)) if table is not None and (out / INFO).exists() else None
    return listing if about is None or digest(table) == about.get("keys_sha256") else replace(listing, extra_tables={})


def wrong_counts(dataset: str, keys: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields a description of each pool of another number of samples than was published. keys: of each pool."""
    for pool, expected in DATASETS[dataset].counts.items():
        found = keys.get(pool, ())
        if len(found) - (UNREADABLE in found) != expected:
            yield f"has {counted(len(found), 'image')} of {pool!r}, but {expected:,} were published"


def changes(now: pa.Table, kept: pa.Table) -> Iterator[str]:
    """Yields a description of each difference between the keys and labels of a source and those of keys.parquet."""
    of_source, of_file = by_pool(now), by_pool(kept)
    for name in sorted(of_source.keys() | of_file.keys()):
        expected, found = (dict(zip(*pools.get(name, ([], [])), strict=True)) for pools in (of_source, of_file))
        yield from differences(f"{KEYS_FILE}, pool {name!r},", expected, found)


def differences(where: str, expected: Mapping[str, int], found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a description of each kind of difference between two mappings of keys to labels."""
    others = [key for key in expected.keys() & found.keys() if expected[key] != found[key]]
    for what, keys in (
        ("lacks", expected.keys() - found.keys()),
        ("has, and should not,", found.keys() - expected.keys()),
        ("has with another label", others),
    ):
        if keys:
            some = sorted(keys)[:_NAMED]
            yield f"{where} {what} {len(keys):,}: {', '.join(some)}{', ...' if len(keys) > _NAMED else ''}"
