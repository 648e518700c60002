"""keys.parquet: key and label of every sample from which the splits of a task are chosen."""

import hashlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.vtab.readers.original import Pool
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet

KEYS_FILE = "keys.parquet"
# pool: a split of tensorflow_datasets. key: as hashed there (the key in shards is `split.shard_key` of it).
KEYS = pa.schema([("pool", pa.string()), ("key", pa.string()), ("label", pa.int32())])


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


def by_pool(table: pa.Table) -> dict[str, tuple[list[str], np.ndarray]]:
    """Returns pool -> (keys, (n,) int32 labels)."""
    names = table["pool"].unique().to_pylist()
    parts = {name: table.filter(pc.equal(table["pool"], name)) for name in names}
    return {name: (part["key"].to_pylist(), part["label"].to_numpy()) for name, part in parts.items()}


def digest(table: pa.Table) -> str:
    """Returns the hex SHA-256 of the content of a table of keys."""
    lines = zip(*(table[name].to_pylist() for name in KEYS.names), strict=True)
    found = hashlib.sha256()
    for pool, key, label in lines:
        found.update(f"{pool}\t{key}\t{label}\n".encode())
    return found.hexdigest()
