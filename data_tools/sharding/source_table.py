"""Saves the samples of a source beside the data set, to find and report what changed when the source differs later."""

import contextlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.sources import Listing
from data_tools.sources.listing import TABLE
from pipeline.base.words import counted
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet

SOURCE_TABLE = "source.parquet"
# Instead of the time of change of an image that has to be compared with its shard.
COMPARE = -1
_NAMED = 3
_BATCH = 2**16


def save(listing: Listing, path: AnyPath) -> None:
    """Write split, key, size in bytes and time of change of every sample, in the listing's order."""
    split = pa.DictionaryArray.from_arrays(listing.table["split"].combine_chunks(), listing.splits)
    table = pa.table({"split": split, **{name: listing.table[name] for name in ("key", "size", "mtime")}})
    # Sorted keys share long prefixes: a few bytes per sample.
    encoding = {"key": "DELTA_BYTE_ARRAY", "size": "DELTA_BINARY_PACKED", "mtime": "DELTA_BINARY_PACKED"}
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", use_dictionary=["split"], column_encoding=encoding)


def mark_changed(listing: Listing, path: AnyPath, compare_all: bool) -> tuple[Listing, str]:
    """(the listing with the mtime COMPARE where path, which `save` wrote of the same samples, has another; text that counts and names these).

    In all rows if compare_all, or if path cannot be read.
    """
    mtimes, column = listing.table["mtime"].to_numpy(), TABLE.get_field_index("mtime")
    is_same = np.zeros(len(listing), bool)
    if not compare_all:
        with contextlib.suppress(OSError, pa.ArrowInvalid, KeyError):
            is_same = mtimes == open_parquet(path).read(columns=["mtime"])["mtime"].to_numpy()
    marked = pa.array(np.where(is_same, mtimes, COMPARE))
    rows = np.flatnonzero(~is_same)
    what = f"{counted(len(rows), 'image')} {'to compare' if compare_all else 'with another time of change than at the last start'}"
    text = few(what, len(rows), listing.table["key"].take(pa.array(rows[:_NAMED])).to_pylist())
    return replace(listing, table=listing.table.set_column(column, "mtime", marked)), text


def difference(path: AnyPath, listing: Listing) -> str:
    """Describes which samples came, went or changed since `save` wrote path; less precise if it cannot be read."""
    try:
        old = open_parquet(path).read(columns=["split", "key", "size"])
    except (OSError, pa.ArrowInvalid):
        return "with other names, sizes, classes or splits"
    new = listing.table
    old_ids = _ids(old["split"].cast(pa.string()), old["key"])
    new_ids = _ids(
        pa.chunked_array([pa.array(listing.splits).take(chunk) for chunk in new["split"].chunks]), new["key"]
    )
    _, in_old, in_new = np.intersect1d(old_ids, new_ids, return_indices=True)
    is_changed = old["size"].to_numpy()[in_old] != new["size"].to_numpy()[in_new]
    found = [
        _named("came", new["key"], np.delete(np.arange(len(new_ids)), in_new)),
        _named("went", old["key"], np.delete(np.arange(len(old_ids)), in_old)),
        _named("changed in size", new["key"], np.sort(in_new[is_changed])),
    ]
    return "; ".join(filter(None, found)) or (
        "the same images, but in other classes or groups (where labels are numbers, label_names=FILE with the class names of the data set "
        "that was made keeps its classes)"
    )


def _ids(splits: pa.ChunkedArray, keys: pa.ChunkedArray) -> np.ndarray:
    """(samples,) int64: hashes of (split, key), valid in this process only."""
    parts = []
    for start in range(0, len(keys), _BATCH):
        pairs = zip(splits.slice(start, _BATCH).to_pylist(), keys.slice(start, _BATCH).to_pylist(), strict=True)
        parts.append(np.fromiter(map(hash, pairs), np.int64))
    return np.concatenate(parts)


def _named(what: str, keys: pa.ChunkedArray, rows: np.ndarray) -> str:
    return few(f"{len(rows):,} {what}", len(rows), keys.take(pa.array(rows[:_NAMED])).to_pylist())


def few(what: str, count: int, keys: list[str]) -> str:
    """`what` with the first keys, as `4 images changed (a, b, c, ...)`; empty for none."""
    return f"{what} ({', '.join(keys[:_NAMED])}{', ...' * (count > _NAMED)})" if count else ""
