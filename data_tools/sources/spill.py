"""Tables that do not fit in memory, as record batches of an Arrow IPC file that is memory-mapped."""

import contextlib
import itertools
import mmap
import tempfile
import typing
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from pipeline.data.storage.bucket import AnyPath

# A larger table is kept in a file, and worked on so many rows at a time: some 200 MB.
ROWS_IN_MEMORY = 2**19
# Rows looked at, of each part of a table, to divide it.
_SAMPLED = 64


@contextlib.contextmanager
def scratch_file(folder: AnyPath) -> Iterator[BinaryIO]:
    """A file without a name, so that a kill leaves nothing of it: in this folder, or in TMPDIR if that is in a
    bucket.
    """
    with tempfile.TemporaryFile(dir=folder if isinstance(folder, Path) else None) as file:
        yield typing.cast(BinaryIO, file)


class BatchWriter:
    """Writes tables of one schema to a file, each as one record batch. compression: "lz4" or None."""

    def __init__(self, file: BinaryIO, compression: str | None = "lz4") -> None:
        self.file, self.count = file, 0
        self._options = pa.ipc.IpcWriteOptions(compression=compression)
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    def __enter__(self) -> "BatchWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            self.file.flush()

    def write(self, table: pa.Table) -> int:
        """Append a table. Returns the number of its batch."""
        if self._writer is None:
            self._writer = pa.ipc.new_file(self.file, table.schema, options=self._options)
        (batch,) = table.combine_chunks().to_batches()
        self._writer.write_batch(batch)
        self.count += 1
        return self.count - 1


def stored(tables: Iterable[pa.Table], folder: AnyPath) -> pa.Table:
    """The tables, of one schema, as one that is mapped from a scratch file: the system may drop its pages from
    memory.
    """
    with scratch_file(folder) as file:
        empty = None
        with BatchWriter(file, compression=None) as writer:
            for table in tables:
                if len(table):
                    writer.write(table)
                else:
                    empty = table
        if not writer.count:
            assert empty is not None
            return empty
        with open_batches(file) as batches:
            return pa.Table.from_batches([batches.get_batch(number) for number in range(writer.count)])


def changed(table: pa.Table, change: Callable[[pa.Table], pa.Table], folder: AnyPath | None) -> pa.Table:
    """The table that `change` makes of this one, some rows at a time if it is large. folder: see `stored`; None for a
    table in memory.
    """
    if folder is None or len(table) <= ROWS_IN_MEMORY:
        return change(table).combine_chunks()
    return stored(map(change, slices(table)), folder)


def slices(table: pa.Table) -> Iterator[pa.Table]:
    """The table, some rows at a time."""
    for start in range(0, len(table), ROWS_IN_MEMORY):
        yield table.slice(start, ROWS_IN_MEMORY)


def sorted_by(table: pa.Table, columns: Sequence[str], folder: AnyPath | None) -> pa.Table:
    """The table sorted by these columns, as by `sort_by`. folder: see `changed`.

    A large table is first divided on disk by the first two columns, into parts that fit in memory.
    """
    order = [(name, "ascending") for name in columns]
    if folder is None or len(table) <= ROWS_IN_MEMORY:
        return table.sort_by(order).combine_chunks()
    return stored(_sorted_parts(table, order, folder), folder)


def _sorted_parts(table: pa.Table, order: list[tuple[str, str]], folder: AnyPath) -> Iterator[pa.Table]:
    first, second = (name for name, _ in order[:2])
    some = table.select([first, second]).take(pa.array(np.arange(0, len(table), max(ROWS_IN_MEMORY // _SAMPLED, 1))))
    limits = [tuple(row.values()) for row in some.sort_by(order[:2]).to_pylist()[_SAMPLED::_SAMPLED]]
    found: dict[int, list[int]] = defaultdict(list)
    with scratch_file(folder) as file:
        with BatchWriter(file) as writer:
            for rows in slices(table):
                ordered = rows.sort_by(order).combine_chunks()
                one, other = (ordered[name].chunk(0) for name in (first, second))
                ends = [
                    bisect_left(range(len(rows)), limit, key=lambda row: (one[row].as_py(), other[row].as_py()))
                    for limit in limits
                ]
                for part, (start, end) in enumerate(itertools.pairwise([0, *ends, len(rows)])):
                    if start < end:
                        found[part].append(writer.write(ordered.slice(start, end - start)))
        with open_batches(file) as batches:
            for part in sorted(found):
                yield pa.Table.from_batches([batches.get_batch(number) for number in found[part]]).sort_by(order)


@contextlib.contextmanager
def open_batches(file: AnyPath | BinaryIO) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """The record batches that `BatchWriter` wrote; a local file is memory-mapped."""
    if isinstance(file, Path):
        with file.open("rb") as local, open_batches(local) as batches:
            yield batches
    elif hasattr(file, "fileno"):
        yield pa.ipc.open_file(pa.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
    else:
        with file.open("rb") as opened:
            yield pa.ipc.open_file(opened)
