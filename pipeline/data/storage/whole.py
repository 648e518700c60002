"""Atomic replacement of files and objects: a reader sees the old content or the new, never a part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from pipeline import files
from pipeline.data.storage.bucket import AnyPath, BucketPath


@contextmanager
def replacing(path: AnyPath) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed when the block raises.

    Locally this is `pipeline.files.replacing`; for a bucket, a temporary local file is uploaded at the end.
    """
    with path.replacing() if isinstance(path, BucketPath) else files.replacing(path) as file:
        yield file
