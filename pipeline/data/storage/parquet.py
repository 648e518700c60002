"""Parquet files on disks and in buckets, and what is said of damaged ones."""

import contextlib
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.errors import UserError, raise_outage
from pipeline.base.words import on_one_line
from pipeline.data.storage.bucket import AnyPath, is_utf8

REMEDY = "Copy it again, or run the same launch/shard.py again to re-make it."


@contextlib.contextmanager
def reading(path: AnyPath, remedy: str = REMEDY) -> Iterator[None]:
    """Turn every exception that reading a missing or damaged table may raise into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {remedy}") from None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise_outage(error, path)
        message = on_one_line(error)[:200]
        raise UserError(f"{path} is damaged ({message}). {remedy}") from None


def open_parquet(path: AnyPath, memory_map: bool = True, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises FileNotFoundError, pa.ArrowException or OSError for a damaged one, and UserError for a name that is not
    UTF-8.
    """
    if isinstance(path, Path):
        if not is_utf8(str(path)):
            raise UserError(f"{path}: its path is not UTF-8, as Arrow requires. Rename it.")
        return pq.ParquetFile(path, memory_map=memory_map, **options)
    return SingleThreaded(path.open(), **options)


class SingleThreaded(pq.ParquetFile):
    """Reads a Python file without Arrow's threads, which sometimes abort the process when it ends (apache/arrow issues
    34314 and 50482)."""

    read = partialmethod(pq.ParquetFile.read, use_threads=False)
    read_row_group = partialmethod(pq.ParquetFile.read_row_group, use_threads=False)
    iter_batches = partialmethod(pq.ParquetFile.iter_batches, use_threads=False)
