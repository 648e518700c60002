"""Addresses of files: local paths, and URLs of objects and folders in a bucket (`s3://bucket/prefix`, `gs://bucket/prefix`).

`to_path` turns a local path into a `Path` and a URL into a `BucketPath`, which has those methods of `Path` that mean the same
in a bucket; the functions below are for both. A URL may end in options,
`s3://bucket/prefix?region=eu-west-1&endpoint_override=http://10.0.0.5:9000`; other settings come from the environment
(AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ...), as with the vendor's own tools.
"""

import contextlib
import errno
import fnmatch
import io
import os
import posixpath
import shutil
import sys
import tempfile
import typing
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular
from pipeline.data.storage.retry import Retry

if typing.TYPE_CHECKING:  # It imports pyarrow, which takes a tenth of a second; local files need none.
    from pipeline.data.storage.object_store import ObjectReader, Store

_READ_AHEAD = 2**20
# Of a URL, each with its values in lower case; none is any text.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "region": (),
    "endpoint_override": (),
    "scheme": ("http", "https"),
    "anonymous": ("true", "false", "1", "0"),
}


@dataclass(frozen=True)
class BucketPath:
    """The address of an object or a folder (prefix). key: bucket/prefix/name. query: options of the URL.

    Methods that make a request raise StorageError when the store cannot be used.
    """

    scheme: str
    key: str
    query: str = ""
    retry: Retry = field(default_factory=Retry, repr=False, compare=False)

    def __str__(self) -> str:
        return self.store.url(self.key)

    def __truediv__(self, name: str) -> "BucketPath":
        if not name:
            return self
        key = f"{self.key}/{name}".rstrip("/")
        # Object stores do not resolve "..".
        return replace(self, key=posixpath.normpath(key) if ".." in name else key)

    def __lt__(self, other: "BucketPath") -> bool:
        return self.key < other.key

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "BucketPath":
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def suffix(self) -> str:
        return "." + self.name.rpartition(".")[2] if "." in self.name else ""

    @property
    def store(self) -> "Store":
        """The bucket; equal for all its objects."""
        from pipeline.data.storage.object_store import Store

        return Store(self.scheme, self.key.partition("/")[0], self.query, self.retry)

    # ---------------------------------------------------------------- listing
    def exists(self) -> bool:
        """Whether there is such an object or folder; an empty bucket is a folder."""
        return self.store.info(self.key).type.name != "NotFound"

    def is_dir(self) -> bool:
        return self.store.info(self.key).type.name == "Directory"

    def is_file(self) -> bool:
        return self.store.info(self.key).type.name == "File"

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the objects directly in this folder, from one listing."""
        return {info.base_name: info.size for info in self.store.list_folder(self.key) if info.is_file}

    def walk(self) -> Iterator[tuple["BucketPath", int]]:
        """(path, bytes) of every object below this folder."""
        for info in self.store.list_folder(self.key, recursive=True):
            if info.is_file:
                yield replace(self, key=info.path), info.size

    def iterdir(self) -> Iterator["BucketPath"]:
        """Objects and folders directly in this folder."""
        if self.scheme == "gs":
            # There, pyarrow's listings have no folders. (It lists all objects below in either case.)
            names = dict.fromkeys(path.key.removeprefix(f"{self.key}/").partition("/")[0] for path, _ in self.walk())
            return (self / name for name in names)
        return (replace(self, key=info.path) for info in self.store.list_folder(self.key))

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Objects and folders directly in this folder whose name matches."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # ---------------------------------------------------------------- reading
    def reader(self) -> "ObjectReader":
        from pipeline.data.storage.object_store import ObjectReader

        return ObjectReader(self.store, self.key)

    def open(self, mode: str = "rb", buffering: int = _READ_AHEAD) -> BinaryIO:
        """The object as a seekable file. buffering: bytes to read ahead, or 0. Raises FileNotFoundError."""
        assert mode == "rb", "objects are written as a whole, by `replacing`"
        raw = _ObjectFile(self.reader())
        return typing.cast(BinaryIO, io.BufferedReader(raw, buffering) if buffering else raw)

    def read_bytes(self) -> bytes:
        reader = self.reader()
        return reader.read_at(0, reader.size())

    def read_text(self) -> str:
        return self.read_bytes().decode()

    # ---------------------------------------------------------------- writing
    @contextlib.contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        """A temporary local file, uploaded when the block ends without an exception (see `atomic.replacing`)."""
        with _temporary_file("upload-") as file:
            yield file
            file.flush()
            self.upload(file.name)

    def upload(self, local: str) -> None:
        """Store a local file as this object, which appears once all of it has arrived."""
        self.store.upload(local, self.key)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            self.store.delete(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise


AnyPath = Path | BucketPath


class _ObjectFile(io.RawIOBase):
    """An object as a raw stream, for io.BufferedReader. Raises FileNotFoundError."""

    def __init__(self, reader: "ObjectReader") -> None:
        self._reader, self._size, self._position = reader, reader.size(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self._size - self._position), 0)
        buffer[:size] = self._reader.read_at(self._position, size)
        self._position += size
        return size


def to_path(location: str | Path | BucketPath, retry: Retry | None = None) -> AnyPath:
    """A local path or a URL as a path. Raises UserError for a URL of another kind."""
    if not isinstance(location, str):
        return location
    scheme, is_url, rest = location.partition("://")
    if not is_url:
        return Path(location)
    if scheme not in ("s3", "gs"):
        raise UserError(f"{location}: {scheme}:// is not supported. Use a local folder, s3://... or gs://...")
    from pipeline.data.storage.object_store import key_of_url

    key, _, query = rest.partition("?")
    key = key_of_url("/".join(part for part in key.split("/") if part))
    options = urllib.parse.parse_qs(query, keep_blank_values=True)
    unknown = options.keys() - _OPTIONS.keys()
    if not key or unknown:
        what = f"has an unknown option {min(unknown)!r}" if unknown else "names no bucket"
        raise UserError(f"{location} {what}. Write {scheme}://bucket/folder, and options as ?region=...&scheme=http "
                        f"(known: {', '.join(sorted(_OPTIONS))}).")  # fmt: skip
    for name, values in options.items():
        if (known := _OPTIONS[name]) and values[-1].lower() not in ("", *known):
            raise UserError(f"{location}: {name}={values[-1]} is not one of {', '.join(known)}.")
    return BucketPath(scheme, key, query, retry or Retry())


def locate(folder: AnyPath, name: str) -> AnyPath:
    """The path of a name that a file in `folder` holds: below the folder, unless the name is a URL or an absolute path."""
    if "://" in name or name.startswith("/"):
        return to_path(name, folder.retry if isinstance(folder, BucketPath) else None)
    return folder / name


def file_size(path: AnyPath) -> int:
    """Bytes of a file. Raises FileNotFoundError."""
    return path.store.size(path.key) if isinstance(path, BucketPath) else path.stat().st_size


def version(path: AnyPath) -> str:
    """Changes when the file does: time of its last change in ns, or the store's own version. Raises FileNotFoundError."""
    return path.store.version(path.key) if isinstance(path, BucketPath) else str(path.stat().st_mtime_ns)


def open_file(path: AnyPath) -> BinaryIO:
    """A file or an object to read its bytes. Raises FileNotFoundError, and UserError for a local path that is no regular file."""
    return path.open() if isinstance(path, BucketPath) else open_regular(path)


@contextlib.contextmanager
def fetched(path: AnyPath) -> Iterator[BinaryIO]:
    """The file on a local disk, for random access: an object is downloaded to a temporary file. Raises FileNotFoundError."""
    if isinstance(path, Path):
        with open_regular(path) as file:
            yield file
        return
    with _temporary_file("download-") as copy:
        path.reader().copy_to(copy.fileno())
        yield copy


@contextlib.contextmanager
def _temporary_file(prefix: str) -> Iterator[BinaryIO]:
    try:
        with tempfile.NamedTemporaryFile(prefix=prefix) as file:
            yield typing.cast(BinaryIO, file)
    except OSError as error:
        # The error of a failed write() has no file name, and "no space left" is of little use without one.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = f"{tempfile.gettempdir()} (TMPDIR)"
        raise


def walk_files(folder: AnyPath, broken: list[Path] | None = None) -> Iterator[tuple[AnyPath, int]]:
    """(path, bytes) of every file below a folder, also in linked folders. Raises OSError for a folder that cannot be read.

    broken: links to what is not there are appended.
    """
    if isinstance(folder, BucketPath):
        yield from folder.walk()
        return
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while waiting:
        here, parents = waiting.pop()
        status = here.stat()
        own = status.st_dev, status.st_ino
        if own in parents:
            continue  # A link to a folder that it lies in: following it would not end.
        for path in here.iterdir():
            if path.is_dir():
                waiting.append((path, parents | {own}))
            elif path.is_file():
                yield path, path.stat().st_size
            elif broken is not None and path.is_symlink():
                broken.append(path)


def name_inside(path: AnyPath, folder: AnyPath) -> str | None:
    """The name of `path` relative to `folder`, with slashes; None when it lies elsewhere."""
    if isinstance(path, Path) and isinstance(folder, Path):
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else None
    if isinstance(path, BucketPath) and isinstance(folder, BucketPath) and path.scheme == folder.scheme:
        return path.key.removeprefix(folder.key).lstrip("/") if f"{path.key}/".startswith(f"{folder.key}/") else None
    return None


def is_utf8(name: str) -> bool:
    """Whether a name decoded with `surrogateescape` is valid UTF-8, as tables and manifests require."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def utf8_fault(name: str, way_out: str) -> str:
    """Says why a name is not `is_utf8`, as "is not UTF-8" and `way_out`: it may be UTF-8, which Python decodes by another encoding."""
    try:
        os.fsencode(name).decode()
    except UnicodeError:
        return f"is not UTF-8{way_out}"
    return f"is UTF-8, but Python reads names as {sys.getfilesystemencoding()} here: set PYTHONUTF8=1"


def make_folder(folder: AnyPath) -> None:
    """Create a local folder and its parents, if missing; object stores have no folders to create."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


def remove_if_empty(folder: AnyPath) -> None:
    """Remove a local folder, unless something is in it."""
    if isinstance(folder, Path):
        with contextlib.suppress(OSError):
            folder.rmdir()


def remove_tree(folder: AnyPath) -> None:
    """Remove a folder and everything in it, if it exists."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        # On GCS, pyarrow at last deletes an object of the folder's own name, and fails where there is none.
        with contextlib.suppress(FileNotFoundError):
            folder.store.delete_folder(folder.key)
