"""Tables that do not fit in memory, as record batches of Arrow IPC files without a name."""

import itertools
import mmap
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.data.storage.bucket import AnyPath

# A larger table is kept in a file, and worked on so many rows at a time: some 200 MB.
ROWS_IN_MEMORY = 2**19
COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")
# Rows looked at, of each part of a table, to divide it.
_SAMPLED = 64


class Spill:
    """Tables of one schema in a file in `folder`, or in TMPDIR if that is in a bucket; a kill leaves nothing of it."""

    def __init__(self, folder: AnyPath, options: pa.ipc.IpcWriteOptions | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder if isinstance(folder, Path) else None)  # noqa: SIM115
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._options, self._count = options, 0

    def write(self, table: pa.Table) -> int:
        """Append a table as one record batch. Returns its number. An empty one has none."""
        self._writer = self._writer or pa.ipc.new_file(self._file, table.schema, options=self._options)
        self._writer.write_table(table.combine_chunks())
        self._count += bool(len(table))
        return self._count - 1

    def mapped(self) -> pa.ipc.RecordBatchFileReader:
        """All that was written, after at least one `write`, which ends writing. What is not compressed is memory that
        the system may drop.
        """
        assert self._writer is not None
        self._writer.close()
        with self._file as file:
            file.flush()
            return pa.ipc.open_file(pa.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))


def changed(table: pa.Table, change: Callable[[pa.Table], pa.Table], folder: AnyPath | None) -> pa.Table:
    """The table that `change` makes of this one, some rows at a time if it is large. folder: for the file of a large
    table; None keeps it in memory.
    """
    if folder is None or len(table) <= ROWS_IN_MEMORY:
        return change(table).combine_chunks()
    return _stored(map(change, slices(table)), folder)


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
    deciding = table.select(columns[:2])
    some = deciding.take(pa.array(np.arange(0, len(table), max(ROWS_IN_MEMORY // _SAMPLED, 1))))
    limits = [tuple(row.values()) for row in some.sort_by(order[:2]).to_pylist()[_SAMPLED::_SAMPLED]]
    pairs = (zip(*(column.to_pylist() for column in rows.columns), strict=True) for rows in slices(deciding))
    numbers = (np.array([bisect_right(limits, pair) for pair in of_slice]) for of_slice in pairs)
    parts = divided(zip(slices(table), numbers, strict=True), folder)
    return _stored((part.sort_by(order) for _, part in parts), folder)


def divided(tables: Iterable[tuple[pa.Table, np.ndarray]], folder: AnyPath) -> Iterator[tuple[int, pa.Table]]:
    """Yields (number of a part, its rows in the order of the tables), ascending. tables: each with the number of the
    part of each row, (rows,) int64. folder: for a file.
    """
    spill, batches = Spill(folder, COMPRESSED), defaultdict[int, list[int]](list)
    for table, numbers in tables:
        order = np.argsort(numbers, kind="stable")
        parts, starts = np.unique(numbers[order], return_index=True)
        table = table.take(pa.array(order))
        for part, (start, end) in zip(parts.tolist(), itertools.pairwise([*starts.tolist(), len(table)]), strict=True):
            batches[part].append(spill.write(table.slice(start, end - start)))
    mapped = spill.mapped()
    for part in sorted(batches):
        yield part, pa.Table.from_batches(map(mapped.get_batch, batches[part]))


def _stored(tables: Iterable[pa.Table], folder: AnyPath) -> pa.Table:
    spill = Spill(folder)
    for table in tables:
        spill.write(table)
    return spill.mapped().read_all()
