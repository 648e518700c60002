"""Chooses the samples of VTAB-1k's train800, val200 and test from their keys alone, so that anyone can check the
splits.

tensorflow_datasets stores the samples of each of its splits (here: pools) in the order of md5(name of the pool + key),
and VTAB takes ranges of that order as its splits.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence

import numpy as np

from data_tools.vtab.datasets import DataSet, PoolSlice
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.loading.decode import EXTENSIONS

NUM_TRAIN, NUM_VAL = 800, 200
SPLITS = ("train800", "val200", "train800val200", "test")
# Pool -> rows of its samples.
Rows = dict[str, np.ndarray]


def hashed_order(pool: str, keys: Sequence[str]) -> np.ndarray:
    """Returns the rows of the keys in the order of md5(pool + key), (n,) int64."""
    digests = [hashlib.md5(f"{pool}{key}".encode(), usedforsecurity=False).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=digests.__getitem__), np.int64)


def choose(dataset: DataSet, pools: Mapping[str, Sequence[str]]) -> dict[str, Rows]:
    """Returns the rows of each of SPLITS, in the order of the hash. pools: name -> keys of all its samples.

    Raises UserError for a missing pool, a duplicate key, or too few samples.
    """
    slices = {
        "train800": (PoolSlice("train"), NUM_TRAIN),
        "val200": (dataset.val, NUM_VAL),
        "test": (dataset.test, None),
    }
    orders = {pool: hashed_order(pool, keys) for pool, keys in pools.items()}
    rows: dict[str, Rows] = {}
    ends: dict[str, int] = {}
    for split, (part, count) in slices.items():
        keys = pools.get(part.pool, ())
        start = part.percent * len(keys) // 100
        end = start + count if count else len(keys)
        if not ends.get(part.pool, 0) <= start < end <= len(keys) == len(set(keys)):
            raise UserError(
                f"{dataset.name}: {counted(len(keys), 'sample')} of {part.pool!r}, {len(set(keys)):,} of them with keys"
                " of their own, are too few for its splits."
            )
        ends[part.pool] = end
        rows[split] = {part.pool: orders[part.pool][start:end]}
    train, val = rows["train800"], rows["val200"]
    union = {pool: np.concatenate([part[pool] for part in (train, val) if pool in part]) for pool in train | val}
    return {split: rows.get(split, union) for split in SPLITS}


def shard_key(pool: str, key: str) -> str:
    """Returns the key in shards, such as train/banded/banded_0002, without dots and leading slashes, which have a
    meaning there.
    """
    stem, ext = os.path.splitext(key)
    return f"{pool}/{(stem if ext.lower() in EXTENSIONS else key).lstrip('/')}".replace(".", "_")
