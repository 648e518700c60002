"""The files of a source data set: in its folder, and in its archives, from which they are read without unpacking."""

import functools
import hashlib
import itertools
import tarfile
from collections.abc import Iterable
from typing import NamedTuple

from data_tools.progress import reading
from data_tools.sources import Reader
from data_tools.sources.layouts import archive
from data_tools.sources.listing import is_hidden
from data_tools.vtab.datasets import DataSet, PublishedFile
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, file_size, name_inside, version, walk_files

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
# Other archives with the same files.
_ALSO = {"caltech101": ["101_ObjectCategories.tar.gz"]}
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


class MissingError(UserError):
    """A data set, or one of its files, is missing."""


class DatasetFiles:
    """All files of one data set, by name. Published archives take precedence over unpacked folders.

    staging: folder for files that must be unpacked for random access. check: compare size and checksum of published
    files. Raises UserError for a damaged archive, or a file that fails the check.
    """

    def __init__(self, dataset: DataSet, folder: AnyPath, staging: AnyPath, check: bool) -> None:
        self.dataset, self.folder, self._staging = dataset, folder, staging
        self._own = {name: (path, size) for path, size, _ in walk_files(folder) if (name := name_inside(path, folder))}
        files, other = dataset.files, dataset.alternative
        if other and other.name in self._own and files[0].name not in self._own:
            files = (other,)
        known = [*(file.name for file in files), *_ALSO.get(dataset.name, [])]
        archives = [self._own[name][0] for name in known if name.endswith(_ARCHIVES) and name in self._own]
        if check:
            for file in files:
                if file.name in self._own:
                    _check(self._own[file.name][0], file)
        self.unchecked = [file.name for file in files if not file.sha256 or file.name not in self._own]
        self._places: dict[str, FileLocation] = {}
        for path in archives:
            with archive.damage_named(path, Exception):
                for place in self._members(path):
                    self._places.setdefault(place.name, place)
        for name, (_, size) in self._own.items():
            self._places.setdefault(name, FileLocation(name, "", 0, size))

    def below(self, *folders: str) -> dict[str, FileLocation]:
        """Returns name inside the folder -> place, for all files in folders of these names at any depth. Raises
        MissingError.
        """
        found: dict[str, FileLocation] = {}
        for folder, (name, place) in itertools.product(folders, self._places.items()):
            before, mark, rest = f"/{name}".partition(f"/{folder}/")
            if mark and not is_hidden(before) and not is_hidden(rest):
                found.setdefault(rest, place)
        if not found:
            raise self.missing(f"a folder {' or '.join(folders)}")
        return dict(sorted(found.items()))

    def beginning(self, start: str) -> list[FileLocation]:
        """Returns all files whose name, without folders, begins with start, sorted. Raises MissingError if there are
        none.
        """
        found = [place for name, place in self._places.items() if name.rpartition("/")[2].startswith(start)]
        if not found:
            raise self.missing(f"{start}*")
        return sorted(found)

    def find(self, name: str) -> FileLocation | None:
        """Returns the file whose path ends in this name, or None."""
        return next((place for other, place in self._places.items() if f"/{other}".endswith(f"/{name}")), None)

    def text(self, name: str) -> str:
        """Returns the text of the file of this name. Raises MissingError."""
        place = self.find(name)
        if place is None:
            raise self.missing(name)
        return self.read([place])[0].decode()

    def read(self, places: Iterable[FileLocation]) -> list[bytes]:
        """Returns the bytes of each file. Raises UserError for one that cannot be read."""
        with Reader() as reader:
            return [self._read(reader, place) for place in places]

    def _read(self, reader: Reader, place: FileLocation) -> bytes:
        try:
            return reader.read(place.archive or str(self.folder / place.name), *place[2:])
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder}: {place.name} cannot be read ({error}). Fetch it again.") from None

    def plain(self, name: str) -> AnyPath:
        """Returns the path of a file for random access, of an unpacked copy for <name>.gz. Raises MissingError."""
        place = self.find(name)
        if place is not None and not place.archive:
            return self.folder / place.name
        packed = self.find(f"{name}.gz")
        if packed is None or packed.archive:
            raise self.missing(name)
        return archive.unpack(self.folder / packed.name, "gzip", self._staging)

    def missing(self, what: str) -> MissingError:
        """Returns an error that names the sources of the data set."""
        return MissingError(f"{self.folder}: {what} is missing. {sources_of(self.dataset)}")

    def _members(self, path: AnyPath) -> Iterable[FileLocation]:
        plain = archive.plain_path(path, self._staging)
        for member in archive.members(plain):
            if member.fault and member.is_file:
                raise tarfile.ReadError(f"{printable(member.name)}: {member.fault}")
            place = FileLocation(member.name.removeprefix("./"), str(plain), member.offset, member.size, member.packed)
            inner = place.name.rpartition("/")[2]
            if member.packed and inner in _ALSO.get(self.dataset.name, []) and not is_hidden(place.name):
                yield from self._members(self._unpacked(path, place, inner))
            elif member.is_file:
                yield place

    def _unpacked(self, path: AnyPath, place: FileLocation, name: str) -> AnyPath:
        """Extract an archive of this name from a zip; returns its path."""
        inner = archive.staged_path(path, self._staging, f".{name}")
        if not inner.exists():
            (content,) = self.read([place])
            with replacing(inner) as file:
                file.write(content)
        return inner


def sources_of(dataset: DataSet) -> str:
    """Returns a sentence that names the files, their URLs and how to get them."""
    files = ", ".join(f"{file.name} ({file.url})" for file in dataset.files)
    if other := dataset.alternative:
        files += f", or of {other.name} ({other.url})"
    return f"{dataset.name} consists of {files}{f'; {dataset.hint}' if dataset.hint else ''}."


def _check(path: AnyPath, file: PublishedFile) -> None:
    size = file_size(path)
    if file.size and size != file.size:
        raise UserError(
            f"{path} has {counted(size, 'byte')}, but {file.size:,} were published. Fetch it again: {file.url}"
        )
    if file.sha256 and _sha256(path, size, version(path)) != file.sha256:
        raise UserError(f"{path} does not have the published checksum. Fetch it again: {file.url}")


@functools.cache
def _sha256(path: AnyPath, size: int, version: str) -> str:
    """Returns the hex SHA-256, cached by version of the file, because tasks share source data sets."""
    digest = hashlib.sha256()
    with reading(path, "hashed") as content:
        while part := content.read(_BLOCK):
            digest.update(part)
    return digest.hexdigest()
