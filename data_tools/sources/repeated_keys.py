"""Keys that occur twice in a split of a sample table (`listing.TABLE`): finds them, and makes them distinct."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def sorted_by_key(table: pa.Table) -> pa.Table:
    """The table sorted by split and key, in one chunk."""
    # Also by name, so that errors about a repeated key are the same on every machine.
    order = pc.sort_indices(table, sort_keys=[("split", "ascending"), ("key", "ascending"), ("name", "ascending")])
    return table.take(order).combine_chunks()


def repeated(table: pa.Table) -> np.ndarray:
    """Rows of a sorted table that have the split and key of the next row."""
    keys, splits = table["key"], table["split"]
    return np.flatnonzero(pc.and_(pc.equal(keys[1:], keys[:-1]), pc.equal(splits[1:], splits[:-1])).to_numpy())


def with_extensions(table: pa.Table, twice: np.ndarray) -> pa.Table:
    """The table with the extension of the file added to the keys of these rows and of those after them: a/1 to
    a/1_jpg.
    """
    rows = np.union1d(twice, twice + 1)
    names = table["name"].take(pa.array(rows)).to_pylist()
    keys = np.array(table["key"].to_pylist(), object)
    keys[rows] = [f"{keys[row]}_{name.rpartition('.')[2]}" for row, name in zip(rows, names, strict=True)]
    return _with_keys(table, pa.array(keys, pa.large_string()))


def with_prefixes(table: pa.Table, prefixes: Sequence[str]) -> pa.Table:
    """The table with the prefix of its container before each key. prefixes: one for each container."""
    of_rows = pa.array([prefix.replace(".", "_") for prefix in prefixes], pa.large_string()).take(table["container"])
    return _with_keys(table, pc.binary_join_element_wise(of_rows, table["key"], pa.scalar("/", pa.large_string())))


def _with_keys(table: pa.Table, keys: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index("key"), "key", keys)
