"""ImageNet-21k as it is handed out: one tar for each class, `<wnid>.tar`, in a folder or in one big tar.

Each inner tar counts as the class folder `<wnid>/`; nothing is extracted. Between two headers lie 100 KB, so in a bucket
to list is to read nearly everything, a MiB a request: hence several tars at a time, and their lists are kept.
"""

import contextlib
import gzip
import json
import tarfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from data_tools.sources.layouts.archive import LIST, staged_path, tar_members
from data_tools.sources.listing import Collector, printable
from pipeline import json_record
from pipeline.data.storage.bucket import AnyPath, BucketPath, file_size, name_inside, walk_files
from pipeline.data.storage.whole import replacing
from pipeline.errors import UserError

# pyarrow's S3 client has 25 connections. Lists that wait for that of a slow tar before them are held in memory.
_THREADS, _AHEAD = 16, 64
_NAMED = 10


class _ClassTar(NamedTuple):
    """name: inside the source. path, start, end: where its bytes lie. container: see `Collector.file`."""

    name: str
    path: AnyPath
    start: int
    end: int
    container: int


# (name, offset of its bytes, size, fault) of each file of a tar, see `archive.Member`.
_Members = list[tuple[str, int, int, str]]


def is_tar_of_tars(source: AnyPath) -> bool:
    """Whether the first file in a tar is itself a tar."""
    with source.open("rb") as file:
        for member in tar_members(file, 0, file_size(source)):
            if not member.is_folder:
                return member.name.endswith(".tar")
    return False


def walk_folder(source: AnyPath, staging: AnyPath, collector: Collector) -> None:
    """Tell the collector the members of every tar below source. Raises UserError that names the damaged ones."""

    def tars() -> Iterator[_ClassTar]:
        for path, size in sorted(walk_files(source), key=lambda file: str(file[0])):
            name = name_inside(path, source)
            assert name
            if path.suffix == ".tar" and not path.name.startswith("."):
                yield _ClassTar(name, path, 0, size, collector.add_container(path))
            else:
                collector.file(name, -1, 0, size)

    _walk_classes(source, tars(), staging, collector)


def walk_tar(source: AnyPath, staging: AnyPath, collector: Collector, inside: str = "") -> None:
    """Tell the collector the members of every tar inside a plain tar, as if it were the folder `inside`.

    Raises tarfile.TarError when the outer tar is damaged, UserError that names the damaged ones inside.
    """
    container = collector.add_container(source)

    def tars() -> Iterator[_ClassTar]:
        with source.open("rb") as file:
            for name, is_folder, offset, size, fault in tar_members(file, 0, file_size(source)):
                if fault and name.endswith(".tar"):
                    raise tarfile.ReadError(f"{printable(name)}: {fault}")  # A whole class is more than one odd item.
                if not is_folder and name.endswith(".tar"):
                    yield _ClassTar(inside + name, source, offset, offset + size, container)
                elif not is_folder:
                    collector.file(inside + name, container, offset, size, fault=fault)

    _walk_classes(source, tars(), staging, collector)


def _walk_classes(source: AnyPath, tars: Iterable[_ClassTar], staging: AnyPath, collector: Collector) -> None:
    """Tell the collector every tar in its turn, however long those after it have been listed."""
    damaged: list[str] = []
    waiting: deque[tuple[_ClassTar, Future[_Members]]] = deque()

    def tell_first() -> None:
        tar, listed = waiting.popleft()
        folder = tar.name.removesuffix(".tar")
        collector.folder(folder)
        try:
            for name, offset, size, fault in listed.result():
                collector.file(f"{folder}/{name}", tar.container, offset, size, fault=fault)
        except tarfile.TarError as error:
            damaged.append(f"{tar.name} ({error})")

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="list")
    try:
        for tar in tars:
            waiting.append((tar, pool.submit(_list_members, tar, staging)))
            if len(waiting) == _AHEAD:
                tell_first()
        while waiting:
            tell_first()
    finally:
        pool.shutdown(cancel_futures=True)
    if damaged:
        more = f"; and {len(damaged) - _NAMED:,} more" if len(damaged) > _NAMED else ""
        raise UserError(
            f"{source} has {len(damaged):,} damaged tar{'s' * (len(damaged) > 1)}: {'; '.join(damaged[:_NAMED])}{more}. "
            f"Fetch {'them' if len(damaged) > 1 else 'it'} again."
        )


def _list_members(tar: _ClassTar, staging: AnyPath) -> _Members:
    """The files of a tar; of one in a bucket from the list in staging, if the tar has not changed since. In a thread.

    Raises tarfile.TarError.
    """
    kept = staged_path(tar.path, staging, f".{tar.start}{LIST}") if isinstance(tar.path, BucketPath) else None
    if kept is not None:
        with contextlib.suppress(FileNotFoundError):
            if (members := _read_list(kept)) is not None:
                return members
    with tar.path.open("rb") as file:
        members = [
            (member.name, member.offset, member.size, member.fault)
            for member in tar_members(file, tar.start, tar.end)
            if not member.is_folder
        ]
    if kept is not None:
        with replacing(kept) as file:
            file.write(gzip.compress(json.dumps(members).encode()))
    return members


def _read_list(kept: AnyPath) -> _Members | None:
    """A list that was kept; None for a damaged one, and one of an earlier version. Raises FileNotFoundError, StorageError."""
    content = kept.read_bytes()
    try:
        rows = json_record.parse(gzip.decompress(content), list, str(kept))
    except (UserError, EOFError, OSError, zlib.error):
        return None
    # Not by `json_record`, which would take minutes for 14 million rows.
    is_whole = all(
        type(row) is list
        and len(row) == 4
        and type(row[1]) is type(row[2]) is int
        and type(row[0]) is type(row[3]) is str
        for row in rows
    )
    return [tuple(row) for row in rows] if is_whole else None
