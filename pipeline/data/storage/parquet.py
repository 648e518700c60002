"""Parquet files on disks and in buckets."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline.base.errors import UserError
from pipeline.data.storage.bucket import AnyPath, is_utf8


def open_parquet(path: AnyPath, memory_map: bool = True, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises FileNotFoundError, pa.ArrowException or OSError for a damaged one, and UserError for a name that is not
    UTF-8.
    """
    if isinstance(path, Path):
        if not is_utf8(str(path)):
            raise UserError(f"{path}: its path is not UTF-8, as Arrow requires. Rename it.")
        return pq.ParquetFile(path, memory_map=memory_map, **options)
    return _SingleThreaded(path.open(), **options)


class _SingleThreaded(pq.ParquetFile):
    """Reads a Python file without Arrow's threads, which sometimes abort the process when it ends (apache/arrow issues
    34314 and 50482)."""

    read = partialmethod(pq.ParquetFile.read, use_threads=False)
    read_row_group = partialmethod(pq.ParquetFile.read_row_group, use_threads=False)
    iter_batches = partialmethod(pq.ParquetFile.iter_batches, use_threads=False)
