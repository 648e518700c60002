"""Files and objects of which a reader sees the old content or the new, never a part."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

from pipeline import files
from pipeline.data.storage.bucket import AnyPath, BucketPath


@contextmanager
def replacing(path: AnyPath) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves nothing behind when it does not.

    Of a folder as `pipeline.files.replacing`; for a bucket it is a temporary file of this machine, which is then uploaded.
    """
    with path.replacing() if isinstance(path, BucketPath) else files.replacing(path) as file:
        yield file


def write_files(folder: AnyPath, contents: Mapping[str, bytes | None]) -> None:
    """Write files into a folder, which is created if it is missing. Each replaces an older one atomically; None removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
            continue
        with replacing(folder / name) as file:
            file.write(content)
