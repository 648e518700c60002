"""Saves the samples of a source beside the data set, to find and report what changed when the source differs later."""

import contextlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools.sources import Listing
from data_tools.sources.listing import NAMED, with_columns
from pipeline.base.words import counted, first_of
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet

SOURCE_TABLE = "source.parquet"
# Instead of the time of change of an image that has to be compared with its shard.
COMPARE = -1


def save(listing: Listing, path: AnyPath) -> None:
    """Write split, key, size in bytes and time of change of every sample, in the listing's order."""
    split = pa.DictionaryArray.from_arrays(listing.table["split"].combine_chunks(), listing.splits)
    table = pa.table({"split": split, **{name: listing.table[name] for name in ("key", "size", "mtime")}})
    # Sorted keys share long prefixes: a few bytes per sample.
    encoding = {"key": "DELTA_BYTE_ARRAY", "size": "DELTA_BINARY_PACKED", "mtime": "DELTA_BINARY_PACKED"}
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", use_dictionary=["split"], column_encoding=encoding)


def mark_changed(listing: Listing, path: AnyPath) -> tuple[Listing, str]:
    """(the listing with the mtime COMPARE where path, which `save` wrote of the same samples, has another; text that
    counts and names these).

    In all rows if path cannot be read.
    """
    is_same = np.zeros(len(listing), bool)
    with contextlib.suppress(OSError, pa.ArrowInvalid, KeyError):
        before = open_parquet(path).read(columns=["mtime"])["mtime"]
        is_same = pc.equal(before, listing.table["mtime"]).to_numpy()
    rows = np.flatnonzero(~is_same)
    if not len(rows):
        return listing, ""
    marked = pc.if_else(pa.array(is_same), listing.table["mtime"], COMPARE)
    keys = listing.table["key"].take(pa.array(rows[: NAMED + 1])).to_pylist()
    what = f"{counted(len(rows), 'image')} with another time of change than at the last start"
    return replace(listing, table=with_columns(listing.table, mtime=marked)), f"{what} ({first_of(keys, NAMED)})"


def difference(path: AnyPath, listing: Listing) -> str:
    """Describes which samples came, went or changed in size since `save` wrote path; empty for none."""
    columns = ["split", "key", "size"]
    splits = pa.array(listing.splits, pa.string()).take(listing.table["split"])
    new = with_columns(listing.table, split=splits).select(columns)
    old = open_parquet(path).read(columns=columns).select(columns).cast(new.schema)
    found = []
    for what, one, other in (("came", new, old), ("went", old, new)):
        rows = one.join(other, columns, join_type="left anti").sort_by([(name, "ascending") for name in columns])
        some = rows.slice(0, NAMED + 1).to_pylist()
        keys = [f"{row['split']}/{row['key']} ({row['size']} bytes)" for row in some]
        if keys:
            found.append(f"{len(rows):,} {what} ({first_of(keys, NAMED)})")
    return "; ".join(found)
