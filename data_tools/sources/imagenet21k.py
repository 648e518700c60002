"""ImageNet-21k as it is handed out: one tar for each class, `<wnid>.tar`, in a folder or in one big tar.

Each inner tar counts as the class folder `<wnid>/`; nothing is extracted.
"""

import tarfile
from typing import BinaryIO

from data_tools.sources.archive import tar_members
from data_tools.sources.listing import Collector
from pipeline.data.bucket import AnyPath, name_inside, walk_files
from pipeline.errors import UserError


def is_tar_of_tars(source: AnyPath) -> bool:
    """Whether the first file in a tar is itself a tar."""
    with source.open("rb") as file:
        for name, is_folder, _, _ in tar_members(file, 0, source.stat().st_size):
            if not is_folder:
                return name.endswith(".tar")
    return False


def walk_folder(source: AnyPath, collector: Collector) -> None:
    """Tell the collector the members of every tar below source."""
    for path, size in sorted(walk_files(source), key=lambda file: str(file[0])):
        name = name_inside(path, source)
        assert name
        if path.suffix == ".tar" and not path.name.startswith("."):
            with path.open("rb") as file:
                try:
                    _walk_class(file, name, 0, size, collector.add_container(path), collector)
                except tarfile.TarError as error:
                    raise UserError(f"{path} is damaged ({error}). Fetch it again.") from None
        else:
            collector.file(name, -1, 0, size)


def walk_tar(source: AnyPath, collector: Collector, inside: str = "") -> None:
    """Tell the collector the members of every tar inside a plain tar, as if it were the folder `inside`.

    Raises tarfile.TarError for a damaged one.
    """
    container = collector.add_container(source)
    # A second handle: the walk through an inner tar moves the file's position.
    with source.open("rb") as outer, source.open("rb") as inner:
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
