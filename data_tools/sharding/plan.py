"""Which samples each shard holds, in a file from which each task reads its own.

Within a split, samples are ordered by a hash of seed and key. A large listing is first divided by the first bits of the
hash, on disk, so that only one part of it is sorted in memory at a time.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_tools.sharding.selection import hash_keys
from data_tools.sources import spill
from data_tools.sources.listing import Listing, SourceImage, images_of
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
    schema = listing.planned(listing.table.slice(0, 0)).schema
    with (
        replacing(out / PARTS / PLANNED) as file,
        pa.ipc.new_file(file, schema, options=spill.COMPRESSED) as writer,
    ):
        shuffled = _shuffled(listing, f"{config.seed}:", out)
        for split, parts in itertools.groupby(shuffled, lambda pair: listing.splits[pair[0]]):
            for number, table in enumerate(_in_pieces((part for _, part in parts), config.samples_per_shard)):
                writer.write_table(table.combine_chunks())
                plan.append(PlannedShard(f"{split}-{number:06d}.tar", split, len(table)))
    return plan


def read_images(out: AnyPath, number: int, root: AnyPath) -> list[SourceImage]:
    """The samples of the shard with this number, in tar order. root: see `Listing`."""
    # A thread for each of the small buffers would take twice as long.
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with (out / PARTS / PLANNED).open("rb") as file:
        return images_of(pa.Table.from_batches([pa.ipc.open_file(file, options=options).get_batch(number)]), root)


def _shuffled(listing: Listing, prefix: str, out: AnyPath) -> Iterator[tuple[int, pa.Table]]:
    """Yields (number of a split, some of its planned samples), in the order of their hashes; ties stay in the
    listing's.
    """
    num_bits = ((len(listing) - 1) // spill.ROWS_IN_MEMORY).bit_length()

    def hashed(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
        mix = hash_keys(table["key"].to_pylist(), prefix)
        first_bits = (mix >> np.uint64(1)) >> np.uint64(63 - num_bits)
        parts = table["split"].to_numpy().astype(np.int64) << num_bits | first_bits.astype(np.int64)
        return listing.planned(table).append_column("mix", pa.array(mix)), parts

    for part, table in spill.divided(map(hashed, spill.slices(listing.table)), out / PARTS):
        order = np.argsort(table["mix"].to_numpy(), kind="stable")
        yield part >> num_bits, table.take(pa.array(order)).drop_columns("mix")


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
