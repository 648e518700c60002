"""Numbers to predict of each image: found in file names, and described."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.sources import Listing
from data_tools.sources.labels import as_number
from data_tools.sources.listing import TABLE, with_columns
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable


def with_targets(listing: Listing, pattern: str) -> Listing:
    """The listing with the numbers that the named groups of `pattern` (target_pattern) find in the files' names without
    their suffix; itself without a pattern. A name that it does not match has none.

    Raises UserError for what is found and is not a number.
    """
    if not pattern:
        return listing
    compiled = re.compile(pattern)
    names = list(compiled.groupindex)

    def found(table: pa.Table) -> pa.Table:
        values = []
        for name in table["name"].to_pylist():
            match = compiled.search(os.path.splitext(name)[0])
            texts = [match and match[group] for group in names]
            values.append([as_number(text, name, group) for group, text in zip(names, texts, strict=True)])
        return with_columns(table, targets=pa.array(values, TABLE.field("targets").type))

    return replace(listing, targets=names, table=listing.changed(found))


def describe_targets(listing: Listing) -> Iterator[str]:
    """Lines to print: the values of each number in each split. Raises UserError for one that no image has."""
    if not listing.targets:
        return
    values = _values(listing)
    split = listing.table["split"].to_numpy()
    for place, name in enumerate(listing.targets):
        if not np.isfinite(values[:, place]).any():
            raise UserError(f"{listing.source}: no image has a value of {name!r} (target_columns, target_pattern).")
        for number, of_split in enumerate(listing.splits):
            found = values[split == number, place]
            present = found[np.isfinite(found)]
            line = f"{printable(name)}: {len(present):,} of {counted(len(found), 'image')} of {of_split} have a value"
            if len(present):
                line += f", {present.min():.6g} to {present.max():.6g}, mean {present.mean():.6g}"
            yield line


def _values(listing: Listing) -> np.ndarray:
    """float32 (samples, T), NaN for a missing one."""
    flat = pc.fill_null(pc.list_flatten(listing.table["targets"]), float("nan")).to_numpy()
    return flat.reshape(len(listing), len(listing.targets))
