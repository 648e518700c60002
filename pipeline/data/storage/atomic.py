"""Files and objects as a whole. They are replaced atomically: a reader sees the old content or the new, never a
part.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import BinaryIO

from pipeline.base import files
from pipeline.data.storage.bucket import AnyPath, BucketPath, make_folder


def replacing(path: AnyPath) -> AbstractContextManager[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed when the block raises.

    Locally this is `pipeline.base.files.replacing`; for a bucket, a temporary local file is uploaded at the end.
    """
    return path.replacing() if isinstance(path, BucketPath) else files.replacing(path)


def write_files(folder: AnyPath, contents: Mapping[str, bytes | str | None], mark: str = "") -> None:
    """Write files into a folder, which is created if it is missing. Each replaces an older one atomically; None removes
    it.

    Text is written as `files.as_bytes` does. On a full disk all older files stay. mark: name of the file without which
    a folder does not count as results: it is removed first, then the other older files, and it appears last, so a kill
    leaves no old and new files, such as an old page with a new picture. The next call for the same names removes the
    hidden files of a killed one.
    """
    make_folder(folder)
    if not isinstance(folder, BucketPath):
        files.remove_unfinished(folder, contents)
    ordered = sorted(contents, key=lambda name: name == mark)
    with ExitStack() as stack:
        for name in reversed(ordered):  # Files appear in the reverse of the order in which they are opened.
            content = contents[name]
            if content is not None:
                file = stack.enter_context(replacing(folder / name))
                file.write(files.as_bytes(content) if isinstance(content, str) else content)
                file.flush()
        for name in ordered[::-1]:
            if contents[name] is None or mark:
                (folder / name).unlink(missing_ok=True)
