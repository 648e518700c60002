"""ImageNet-21k as published: one tar for each class, `<wnid>.tar`, in a folder or in one big tar.

Each inner tar is treated as the class folder `<wnid>/`; nothing is extracted. Headers are about 100 KB apart, so
listing a tar in an object store reads nearly all of it: tars are listed in parallel, and their member lists are cached.
"""

import contextlib
import gzip
import itertools
import json
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from data_tools.sources.layouts import archive
from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.loading.decode import is_hidden
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, BucketPath, name_inside, walk_files
from pipeline.settings.commands.data import ShardConfig

# pyarrow's S3 client has 25 connections. _AT_ONCE bounds the lists in memory.
_THREADS, _AT_ONCE = 16, 64
_NAMED = 10


class _ClassTar(NamedTuple):
    """name: inside the source. path, start, end: where its bytes are. container: see `Collector.file`."""

    name: str
    path: AnyPath
    start: int
    end: int
    container: int


def is_tar_of_tars(source: AnyPath) -> bool:
    """Whether the first file in a tar, hidden ones apart, is itself a tar."""
    for member in archive.members(source):
        if not member.is_folder and not is_hidden(member.name.rpartition("/")[2]):
            return member.name.endswith(".tar")
    return False


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report the members of every class's tar to the collector. (A zip is read as one of class folders.)"""
    if source.is_dir():
        _walk_folder(source, staging, collector)
    elif archive.kind(source) == "zip":
        archive.walk(source, collector)
    else:
        walk_tar(source, staging, collector)


def _walk_folder(source: AnyPath, staging: AnyPath, collector: Collector) -> None:
    """Report the members of every tar below source to the collector. Raises UserError with the damaged tars."""

    def tars() -> Iterator[_ClassTar]:
        for path, size, mtime in sorted(walk_files(source), key=lambda file: str(file[0])):
            name = name_inside(path, source)
            assert name
            if path.suffix == ".tar" and not path.name.startswith("."):
                yield _ClassTar(name, path, 0, size, collector.add_container(path, mtime))
            else:
                collector.file(name, -1, 0, size, mtime=mtime)

    _walk_classes(source, tars(), staging, collector)


def walk_tar(source: AnyPath, staging: AnyPath, collector: Collector, inside: str = "") -> None:
    """Report the members of every tar inside a plain tar to the collector, as if in the folder `inside`.

    Raises tarfile.TarError when the outer tar is damaged, UserError with the damaged tars inside.
    """
    container = collector.add_container(source)

    def tars() -> Iterator[_ClassTar]:
        for name, is_folder, offset, size, fault, *_ in archive.members(source):
            # Not the ._n01440764.tar beside a class's tar, in a tar made on a Mac.
            is_tar = name.endswith(".tar") and not is_hidden(name.rpartition("/")[2])
            if fault and is_tar:
                # It holds a whole class: not an item to skip.
                raise tarfile.ReadError(f"{printable(name)}: {fault}")
            if not is_folder and is_tar:
                yield _ClassTar(inside + name, source, offset, offset + size, container)
            elif not is_folder:
                collector.file(inside + name, container, offset, size, fault=fault)

    _walk_classes(source, tars(), staging, collector)


def _walk_classes(source: AnyPath, tars: Iterator[_ClassTar], staging: AnyPath, collector: Collector) -> None:
    """List tars in parallel, and report them to the collector in order."""
    damaged: list[str] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="list") as pool:
        while some := list(itertools.islice(tars, _AT_ONCE)):
            for tar, found in zip(some, pool.map(lambda tar: _list_members(tar, staging), some), strict=True):
                folder = tar.name.removesuffix(".tar")
                collector.folder(folder)
                if isinstance(found, str):
                    damaged.append(f"{tar.name} ({found})")
                    continue
                for name, _, offset, size, fault, *_ in found:
                    collector.file(f"{folder}/{name}", tar.container, offset, size, fault=fault)
    if damaged:
        raise UserError(
            f"{source} has {counted(len(damaged), 'damaged tar')}, to be fetched again:"
            f" {'; '.join(damaged[:_NAMED])}{'; ...' * (len(damaged) > _NAMED)}"
        )


def _list_members(tar: _ClassTar, staging: AnyPath) -> list[archive.Member] | str:
    """The files of a tar; for an object store the cached list in staging, if the tar has not changed. Runs in a thread.

    Returns what is wrong with a damaged tar.
    """
    cached = (
        archive.staged_path(tar.path, staging, f".{tar.start}{archive.LIST}")
        if isinstance(tar.path, BucketPath)
        else None
    )
    if cached is not None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(gzip.decompress(cached.read_bytes()))
    try:
        with tar.path.open("rb") as file:
            found = archive.tar_members(file, tar.start, tar.end)
            members = [member for member in found if not member.is_folder]
    except tarfile.TarError as error:
        return str(error)
    if cached is not None:
        with replacing(cached) as file:
            file.write(gzip.compress(json.dumps(members).encode()))
    return members
