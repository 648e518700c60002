"""Which samples each shard holds, in a file from which each task reads its own.

Within a split, samples are ordered by a hash of seed and key. A large listing is first divided by the first bits of the
hash, on disk, so that only one part of it is sorted in memory at a time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_tools.sharding.holdout import hash_keys
from data_tools.sources import spill
from data_tools.sources.listing import Listing, SourceImage, images_of
from data_tools.sources.spill import BatchWriter, open_batches, scratch_file, slices
from data_tools.sources.split_files import PARTS
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import ShardConfig

# In the parts folder: Arrow IPC, a record batch for each shard with its samples in tar order.
PLANNED = "planned.arrow"


class PlannedShard(NamedTuple):
    """name: of its tar. samples: their number."""

    name: str
    split: str
    samples: int


def make_plan(listing: Listing, config: ShardConfig, out: AnyPath) -> list[PlannedShard]:
    """Shuffle each split by a hash of seed and key, and divide it into shards. Writes the samples of each to the file
    PLANNED of the data set `out`, for `read_images`.
    """
    plan = []
    with replacing(out / PARTS / PLANNED) as file, BatchWriter(file) as writer:
        for split, tables in _shuffled(listing, f"{config.seed}:", out):
            name = listing.splits[split]
            for number, table in enumerate(_in_pieces(tables, config.samples_per_shard)):
                writer.write(table)
                plan.append(PlannedShard(f"{name}-{number:06d}.tar", name, len(table)))
    return plan


def read_images(out: AnyPath, number: int, root: AnyPath) -> list[SourceImage]:
    """The samples of the shard with this number, in tar order. root: see `Listing`."""
    with open_batches(out / PARTS / PLANNED) as batches:
        return images_of(pa.Table.from_batches([batches.get_batch(number)]), root)


def _shuffled(listing: Listing, prefix: str, out: AnyPath) -> Iterator[tuple[int, Iterator[pa.Table]]]:
    """Yields (number of a split, its planned samples in the order of their hashes, part by part)."""
    num_bits = ((len(listing) - 1) // spill.ROWS_IN_MEMORY).bit_length()
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    with scratch_file(out / PARTS) as file:
        with BatchWriter(file) as writer:
            for table in slices(listing.table):
                mix = hash_keys(table["key"], prefix)
                part = (mix >> np.uint64(1)) >> np.uint64(63 - num_bits)
                of = table["split"].to_numpy().astype(np.int64) << num_bits | part.astype(np.int64)
                order = np.lexsort((mix, of))
                planned = listing.planned(table).append_column("mix", pa.array(mix)).take(pa.array(order))
                starts = np.flatnonzero(np.diff(of[order], prepend=-1)).tolist()
                for first, end in zip(starts, [*starts[1:], len(order)], strict=True):
                    split, bits = divmod(int(of[order[first]]), 1 << num_bits)
                    found[split, bits].append(writer.write(planned.slice(first, end - first)))
        with open_batches(file) as batches:
            for split in range(len(listing.splits)):
                parts = [found[split, bits] for bits in range(1 << num_bits) if (split, bits) in found]
                yield split, (_merged([batches.get_batch(number) for number in numbers]) for numbers in parts)


def _merged(batches: list[pa.RecordBatch]) -> pa.Table:
    """One table in the order of the hashes, of batches that are each in this order; ties stay in the listing's."""
    table = pa.Table.from_batches(batches)
    if len(batches) > 1:
        table = table.take(pa.array(np.argsort(table["mix"].to_numpy(), kind="stable")))
    return table.drop_columns("mix")


def _in_pieces(tables: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The tables one after the other, cut into tables of so many rows; the last may have fewer."""
    rest: list[pa.Table] = []
    for table in tables:
        whole = pa.concat_tables([*rest, table])
        end = len(whole) // rows * rows
        yield from (whole.slice(start, rows) for start in range(0, end, rows))
        rest = [whole.slice(end)]
    if rest and len(rest[0]):
        yield rest[0]
