"""ImageNet-21k as it is handed out: one tar for each class, `<wnid>.tar`, in a folder or in one big tar.

Each inner tar counts as the class folder `<wnid>/`; nothing is extracted.
"""

import tarfile
from pathlib import Path
from typing import BinaryIO

from data_tools.sources.archive import tar_members
from data_tools.sources.listing import Collector
from pipeline.errors import UserError


def is_tar_of_tars(source: Path) -> bool:
    """Whether the first file in a tar is itself a tar."""
    with open(source, "rb") as file:
        for name, is_folder, _, _ in tar_members(file, 0, source.stat().st_size):
            if not is_folder:
                return name.endswith(".tar")
    return False


def walk_folder(source: Path, collector: Collector) -> None:
    """Tell the collector the members of every tar below source."""
    for path in sorted(source.rglob("*")):
        if path.suffix == ".tar" and not path.name.startswith("."):
            with open(path, "rb") as file:
                try:
                    name = path.relative_to(source).as_posix()
                    _walk_class(file, name, 0, path.stat().st_size, collector.add_container(path), collector)
                except tarfile.TarError as error:
                    raise UserError(f"{path} is damaged ({error}). Fetch it again.") from None
        elif path.is_file():
            collector.file(path.relative_to(source).as_posix(), -1, 0, path.stat().st_size)


def walk_tar(source: Path, collector: Collector, inside: str = "") -> None:
    """Tell the collector the members of every tar inside a plain tar, as if it were the folder `inside`.

    Raises tarfile.TarError for a damaged one.
    """
    container = collector.add_container(source)
    # A second handle: the walk through an inner tar moves the file's position.
    with open(source, "rb") as outer, open(source, "rb") as inner:
        for name, is_folder, offset, size in tar_members(outer, 0, source.stat().st_size):
            if not is_folder and name.endswith(".tar"):
                _walk_class(inner, inside + name, offset, offset + size, container, collector)
            elif not is_folder:
                collector.file(inside + name, container, offset, size)


def _walk_class(file: BinaryIO, name: str, start: int, end: int, container: int, collector: Collector) -> None:
    folder = name.removesuffix(".tar")
    collector.folder(folder)
    for member, is_folder, offset, size in tar_members(file, start, end):
        if not is_folder:
            collector.file(f"{folder}/{member}", container, offset, size)
