"""The files of a source data set, in its folder and in its archives, from which they are read without unpacking; and
what readers make of them: pools of samples with keys, labels and images.
"""

import functools
import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from data_tools.progress import reading
from data_tools.sources import Reader
from data_tools.sources.layouts import archive
from data_tools.vtab.datasets import DataSet, PublishedFile
from data_tools.vtab.readers.convert import as_stored
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.cluster.ray_tasks import LostError
from pipeline.data.loading.decode import is_hidden
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, file_size, name_inside, walk_files

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
# The archive inside of Caltech101's.
_INNER = "101_ObjectCategories.tar.gz"
_BLOCK = 2**24


class FileLocation(NamedTuple):
    """Location of the bytes of a file; see `sources.listing.TABLE`. archive: path, or "" for a file outside
    archives.
    """

    name: str
    archive: str
    offset: int
    size: int
    packed: int = 0


# Reads some rows, in ascending order, of an array of as many images as there are labels: yields the pixels of each,
# uint8 (H, W) or (H, W, 3).
Pixels = Callable[[np.ndarray, int], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Pool:
    """All samples of a split of tensorflow_datasets. keys: n, as hashed there. labels: (n,) int64, of the task.

    images: places of n image files; or, for pixel arrays, a function that reads some of them.
    """

    keys: list[str]
    labels: np.ndarray
    images: list[FileLocation] | Pixels


@dataclass(frozen=True)
class Original:
    """The samples of a task. pools: by name. classes: names, by label; none if they are the task's (labels.py).

    notes: differences from the official data. convert: see `Listing`.
    """

    pools: dict[str, Pool]
    classes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    convert: Callable[[bytes], bytes] = as_stored


class DatasetFiles:
    """All files of one data set, by name. Published archives take precedence over unpacked folders.

    staging: folder for files that must be unpacked for random access. check: compare size and checksum of published
    files. Raises UserError for a damaged archive, or a file that fails the check.
    """

    def __init__(self, dataset: DataSet, folder: AnyPath, staging: AnyPath, check: bool) -> None:
        self.dataset, self.folder, self._staging = dataset, folder, staging
        own = {name: (path, size) for path, size, _ in walk_files(folder) if (name := name_inside(path, folder))}
        self.unchecked = [file.name for file in dataset.files if not file.sha256 or file.name not in own]
        self._places: dict[str, FileLocation] = {}
        for file in dataset.files:
            if file.name not in own:
                continue
            path, _ = own[file.name]
            if check:
                _check(path, file)
            if file.name.endswith(_ARCHIVES):
                with archive.damage_named(path, Exception):
                    for place in self._members(path):
                        self._places.setdefault(place.name, place)
        for name, (_, size) in own.items():
            self._places.setdefault(name, FileLocation(name, "", 0, size))

    def below(self, folder: str) -> dict[str, FileLocation]:
        """Returns name inside the folder -> place, for all files in folders of this name at any depth. Raises
        UserError.
        """
        found: dict[str, FileLocation] = {}
        for name, place in self._places.items():
            before, mark, rest = f"/{name}".partition(f"/{folder}/")
            if mark and not is_hidden(before) and not is_hidden(rest):
                found.setdefault(rest, place)
        if not found:
            raise self.missing(f"a folder {folder}")
        return dict(sorted(found.items()))

    def matching(self, pattern: str) -> list[FileLocation]:
        """Returns all files whose path ends in this pattern, in which * stands for any characters."""
        return [place for name, place in self._places.items() if fnmatchcase(f"/{name}", f"*/{pattern}")]

    def find(self, name: str) -> FileLocation | None:
        """Returns the file whose path ends in this name, or None."""
        return next(iter(self.matching(name)), None)

    def place(self, name: str) -> FileLocation:
        """Like `find`, but raises UserError."""
        if (place := self.find(name)) is None:
            raise self.missing(name)
        return place

    def text(self, name: str) -> str:
        """Returns the text of the file of this name. Raises UserError."""
        return self.read([self.place(name)])[0].decode()

    def read(self, places: Iterable[FileLocation]) -> list[bytes]:
        """Returns the bytes of each file. Raises UserError for one that cannot be read."""
        found = []
        with Reader() as reader:
            for place in places:
                try:
                    found.append(reader.read(place.archive or str(self.folder / place.name), *place[2:]))
                except (OSError, ValueError, LostError) as error:
                    raise UserError(f"{self.folder}: {place.name} cannot be read ({error}). Fetch it again.") from None
        return found

    def plain(self, name: str) -> AnyPath:
        """Returns the path of a file for random access, of an unpacked copy for <name>.gz. Raises UserError."""
        place = self.find(name)
        if place is not None and not place.archive:
            return self.folder / place.name
        packed = self.find(f"{name}.gz")
        if packed is None or packed.archive:
            raise self.missing(name)
        return archive.plain_path(self.folder / packed.name, self._staging)

    def missing(self, what: str) -> UserError:
        """Returns an error that names the sources of the data set."""
        return UserError(f"{self.folder}: {what} is missing. {sources_of(self.dataset)}")

    def _members(self, path: AnyPath) -> Iterable[FileLocation]:
        plain = archive.plain_path(path, self._staging)
        for member in archive.members(plain):
            if member.fault and member.is_file:
                raise tarfile.ReadError(f"{printable(member.name)}: {member.fault}")
            place = FileLocation(member.name.removeprefix("./"), str(plain), member.offset, member.size, member.packed)
            if place.name.rpartition("/")[2] == _INNER and not is_hidden(place.name):
                inner = archive.staged_path(path, self._staging, f".{_INNER}")
                with replacing(inner) as file:
                    file.write(self.read([place])[0])
                yield from self._members(inner)
            elif member.is_file:
                yield place


def sources_of(dataset: DataSet) -> str:
    """Returns a sentence that names the files, their URLs and how to get them."""
    files = ", ".join(f"{file.name} ({file.url})" for file in dataset.files)
    return f"{dataset.name} consists of {files}{f'; {dataset.hint}' if dataset.hint else ''}."


@functools.cache
def _check(path: AnyPath, file: PublishedFile) -> None:
    """Raise UserError for another size or SHA-256 than was published. Once for a file, as tasks share data sets."""
    size = file_size(path)
    if file.size and size != file.size:
        raise UserError(
            f"{path} has {counted(size, 'byte')}, but {file.size:,} were published. Fetch it again: {file.url}"
        )
    if file.sha256:
        digest = hashlib.sha256()
        with reading(path, "hashed") as content:
            while part := content.read(_BLOCK):
                digest.update(part)
        if digest.hexdigest() != file.sha256:
            raise UserError(f"{path} does not have the published checksum. Fetch it again: {file.url}")
