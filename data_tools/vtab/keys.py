"""keys.parquet: every sample that a task's splits could have been made of, with its key and its label."""

import hashlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.vtab.readers.original import Pool
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet

KEYS_FILE = "keys.parquet"
# pool: a split of tensorflow_datasets. key: as it is hashed there (in shards it is `split.shard_key` of it).
KEYS = pa.schema([("pool", pa.string()), ("key", pa.string()), ("label", pa.int32())])


def key_table(pools: Mapping[str, Pool]) -> pa.Table:
    """A row for each sample of each pool, in the order of the source."""
    tables = [
        pa.table([pa.repeat(pa.scalar(name), len(pool.keys)), pool.keys, pool.labels.astype(np.int32)], schema=KEYS)
        for name, pool in pools.items()
    ]
    return pa.concat_tables(tables).combine_chunks()


def read_keys(path: AnyPath) -> pa.Table:
    """Raises OSError or pa.ArrowException for a file that is missing or damaged."""
    return open_parquet(path).read().cast(KEYS)


def by_pool(table: pa.Table) -> dict[str, tuple[list[str], np.ndarray]]:
    """Pool -> (keys, (n,) int32 labels)."""
    names = table["pool"].unique().to_pylist()
    parts = {name: table.filter(pc.equal(table["pool"], name)) for name in names}
    return {name: (part["key"].to_pylist(), part["label"].to_numpy()) for name, part in parts.items()}


def digest(table: pa.Table) -> str:
    """Hex sha256 over the content of a table of keys."""
    lines = zip(*(table[name].to_pylist() for name in KEYS.names), strict=True)
    found = hashlib.sha256()
    for pool, key, label in lines:
        found.update(f"{pool}\t{key}\t{label}\n".encode())
    return found.hexdigest()
