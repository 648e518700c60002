"""Creates or replaces files atomically. Standard library only.

A reader of a replaced file sees the old content or the new, never a part: the new content is written to a hidden file
in the same folder, which is then renamed or linked. A killed process leaves that hidden file behind, and nothing else;
`remove_unfinished` removes it. It is locked while it is written, so that those of other processes stay.
"""

import csv
import fcntl
import io
import os
import re
import shutil
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.base.errors import UserError
from pipeline.base.locks import FileLock

# Name of the hidden file of `replacing`, which `remove_unfinished` recognises.
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)


def as_bytes(text: str) -> bytes:
    """UTF-8, whatever the locale. Bytes of a file name that are not UTF-8 (lone surrogates in Python) are written as
    `\\udcXX`, which JSON reads back as the same name.
    """
    return text.encode(errors="backslashreplace")


def as_csv(rows: Iterable[Sequence[Any]]) -> bytes:
    """Rows as CSV, each with a line feed at its end."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return as_bytes(text.getvalue())


def table_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows with the same keys as CSV; the keys are its header."""
    header = list(rows[0]) if rows else []
    return as_csv([header, *([row[name] for name in header] for row in rows)])


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace a small file that only one process writes; it overwrites the hidden file that a killed process left.

    durable: flush the text to the disk before the rename, so that it survives a power failure.
    """
    with _replacing(path, path.with_name(f".{path.name}.tmp"), durable=durable) as file:
        file.write(as_bytes(text))


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends, and is removed when the block raises.

    Several processes may write the same path (a task and its retry): each has a hidden file of its own, so their bytes
    cannot mix. mode: permissions of a new file, before the umask.
    """
    with _replacing(path, _hidden(path), mode) as file:
        yield file
    sync_folder(path.parent)


def create(path: Path, content: bytes) -> bool:
    """Create a file unless it exists; returns whether this call did. Of several processes that create it, the first
    wins.
    """
    try:
        with _replacing(path, _hidden(path), appear=_link) as file:
            file.write(content)
    except FileExistsError:
        return False
    sync_folder(path.parent)
    return True


@contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """A new hidden folder beside `path`, in which a program may write what will be renamed to `path`. The block's end
    removes it.
    """
    hidden = _hidden(path)
    folder = hidden.with_suffix("")
    # The hidden file is there for its lock, and never appears.
    with _replacing(path, hidden, durable=False, appear=lambda hidden, _: hidden.unlink()):
        try:
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_output(out: Path, is_folder: bool) -> Iterator[Path]:
    """A path in a hidden folder beside `out`, which is renamed to `out` when the block succeeds. Missing parents of
    `out` are made.

    is_folder: whether `out` will be a folder; then nothing may be there. A file is replaced. Raises UserError for what
    is there.
    """
    if out.is_dir() or (is_folder and out.exists()):
        raise UserError(
            f"{out} is an existing {'folder' if out.is_dir() else 'file'}. Remove it, or choose another path."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(out.parent, [out.name])  # It may have gigabytes.
    try:
        with hidden_folder(out) as folder:
            yield folder / out.name
            if is_folder and out.exists():
                raise UserError(f"{out} was made by another process meanwhile. Choose another path.")
            for part in (folder / out.name, *(folder / out.name).rglob("*")):
                sync_folder(part)  # Not all of the libraries that write it do so.
            os.replace(folder / out.name, out)
            sync_folder(out.parent)
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(out), None  # The error names the hidden path, or none.
        raise


def remove_unfinished(folder: Path, names: Container[str]) -> None:
    """Remove what killed processes left when they replaced files of these names. What is being written now stays."""
    for hidden in folder.glob(".*.tmp"):
        match = _HIDDEN.fullmatch(hidden.name)
        if not match or match[1] not in names:
            continue
        # An error: it is gone meanwhile, it is another's, or the file system has no locks, so that it may be in use.
        with suppress(OSError), closing(FileLock(hidden, create=False)) as lock:
            if lock.acquire(wait=False) and lock.is_current():
                shutil.rmtree(hidden.with_suffix(""), ignore_errors=True)
                hidden.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder, and thus a rename, to the disk; of a file its content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(path: Path) -> Path:
    """A name that no other process uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _link(hidden: Path, path: Path) -> None:
    """Rename that raises FileExistsError where the path exists."""
    os.link(hidden, path)
    hidden.unlink()


@contextmanager
def _replacing(
    path: Path,
    hidden: Path,
    mode: int = 0o666,
    durable: bool = True,
    appear: Callable[[Path, Path], None] | None = None,
) -> Iterator[BinaryIO]:
    try:
        with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            with suppress(OSError):  # Without locks nothing is removed.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            (appear or os.replace)(hidden, path)  # While the file is open, and so locked.
    except BaseException as error:
        with suppress(OSError):  # On a disk that became read-only this fails for a missing file, too.
            hidden.unlink()
        # The error of a failed write() has no file name, and "no space left" is of little use without one, or with a
        # hidden one.
        if isinstance(error, OSError) and error.errno is not None and str(error.filename) in ("None", str(hidden)):
            error.filename = str(path)
        raise
