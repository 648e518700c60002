"""Describes the numbers to predict of the images."""

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from data_tools.sources import Listing
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable


def describe_targets(listing: Listing) -> Iterator[str]:
    """Lines to print: the values of each number in each split. Raises UserError for one that no image has."""
    if not listing.targets:
        return
    values = _values(listing)
    split = listing.table["split"].to_numpy()
    for place, name in enumerate(listing.targets):
        if not np.isfinite(values[:, place]).any():
            raise UserError(f"{listing.source}: no image has a value of {name!r} (target_columns).")
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
