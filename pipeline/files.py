"""Atomic creation and replacement of local files: a reader sees the old content or the new, never a part. Standard library only.

The new content is written to a hidden file in the same folder, which is then renamed or linked. A killed process leaves that
hidden file behind, and nothing else.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def as_bytes(text: str) -> bytes:
    """UTF-8, whatever the locale. A byte of a file name that is no UTF-8 (a lone surrogate in Python) is written as `\\udcXX`.

    In JSON that is the escape from which the same name is read back.
    """
    return text.encode(errors="backslashreplace")


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace a small file that only one process writes; it overwrites the hidden file that a killed process left.

    durable: flush the text to the disk before the rename, so that it survives a power failure.
    """
    with _replacing(path, path.with_name(f".{path.name}.tmp"), 0o666, durable) as file:
        file.write(as_bytes(text))


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed when the block raises.

    Several processes may write the same path (a task and its retry): each has a hidden file of its own, so their bytes
    cannot mix. mode: permissions of a new file, before the umask.
    """
    with _replacing(path, _hidden(path), mode, durable=True) as file:
        yield file
    sync_folder(path.parent)


def create(path: Path, content: bytes) -> bool:
    """Create a file unless it exists; returns whether this call did. Of several processes that create it, the first wins."""
    try:
        with _replacing(path, _hidden(path), 0o666, durable=True, appear=_link) as file:
            file.write(content)
    except FileExistsError:
        return False
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder, and thus a rename, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path) -> Path:
    """A name that no other process uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _rename(hidden: Path, path: Path) -> None:
    os.replace(hidden, path)


def _link(hidden: Path, path: Path) -> None:
    """As a rename, but raises FileExistsError where the path exists."""
    os.link(hidden, path)
    hidden.unlink()


@contextmanager
def _replacing(
    path: Path, hidden: Path, mode: int, durable: bool, appear: Callable[[Path, Path], None] = _rename
) -> Iterator[BinaryIO]:
    try:
        with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        appear(hidden, path)
    except BaseException as error:
        hidden.unlink(missing_ok=True)
        # The error of a failed write() has no file name, and "no space left" is of little use without one.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
