"""Files and objects as a whole. They are replaced atomically: a reader sees the old content or the new, never a part."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

from pipeline.base import files
from pipeline.data.storage.bucket import AnyPath, BucketPath, make_folder


def read_bytes(path: AnyPath) -> bytes:
    """The content of a file: see `pipeline.base.files.read_bytes`; or of an object. Raises FileNotFoundError."""
    return path.read_bytes() if isinstance(path, BucketPath) else files.read_bytes(path)


@contextmanager
def replacing(path: AnyPath) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed when the block raises.

    Locally this is `pipeline.base.files.replacing`; for a bucket, a temporary local file is uploaded at the end.
    """
    with path.replacing() if isinstance(path, BucketPath) else files.replacing(path) as file:
        yield file


def write_files(folder: AnyPath, contents: Mapping[str, bytes | str | None]) -> None:
    """Write files into a folder, which is created if it is missing. Each replaces an older one atomically; None removes it.

    Text is written as `files.as_bytes` does.
    """
    make_folder(folder)
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
            continue
        with replacing(folder / name) as file:
            file.write(files.as_bytes(content) if isinstance(content, str) else content)
