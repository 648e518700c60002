"""Folders in a bucket (`s3://bucket/prefix`, `gs://bucket/prefix`), with the names that pathlib gives to what we do with them.

`to_path` makes a `Path` of a local path and a `BucketPath` of a URL, and most code need not know which it has. A URL may
end in options, `s3://bucket/prefix?region=eu-west-1&endpoint_override=http://10.0.0.5:9000`; what it does not say comes
from the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ...), as with the vendor's own tools.

A request that fails for a reason that may pass (a reset, a time-out, a 503) is made again, with growing pauses, until
`Retry.seconds` are over, and counted (`retry.py`). What no waiting mends is a StorageError at once: it stops a run
with one line.
"""

import contextlib
import errno
import fnmatch
import functools
import io
import os
import posixpath
import shutil
import tempfile
import typing
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import fs

from pipeline.data.storage.retry import Retry, StorageError
from pipeline.errors import UserError

T = TypeVar("T")

# A connection that moves no byte for so long is given up, and the request made again.
STALL_SECONDS = 20.0
_CONNECT_SECONDS = 5.0
# Parts of an upload are sent again by the client library before the whole upload is: a shard of 1 GiB has 100 of them.
_ATTEMPTS_A_PART = 5
_READ_AHEAD = 2**20
# Of a whole object, in pieces: one connection to a bucket carries some 50-100 MB/s.
_PIECE, _CONNECTIONS = 8 * 2**20, 4
_OPTIONS = {"region", "endpoint_override", "scheme", "anonymous"}


class Stat(NamedTuple):
    """st_size: bytes of an object."""

    st_size: int


@dataclass(frozen=True)
class BucketPath:
    """An object or a folder (prefix) in a bucket. key: bucket/prefix/name. query: options of the URL."""

    scheme: str
    key: str
    query: str = ""
    retry: Retry = field(default_factory=Retry, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}" + (f"?{self.query}" if self.query else "")

    def __truediv__(self, name: str) -> "BucketPath":
        if not name:
            return self
        key = f"{self.key}/{name}".rstrip("/")
        # A bucket has no folder "..": what is meant is another name.
        return replace(self, key=posixpath.normpath(key) if ".." in name else key)

    def __lt__(self, other: "BucketPath") -> bool:
        return self.key < other.key

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def bucket(self) -> str:
        """Its URL."""
        return f"{self.scheme}://{self.key.partition('/')[0]}"

    @property
    def parent(self) -> "BucketPath":
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    @property
    def suffix(self) -> str:
        return "." + self.name.rpartition(".")[2] if "." in self.name else ""

    # ---------------------------------------------------------------- what is there
    def exists(self) -> bool:
        """Whether there is an object or a folder; an empty bucket is a folder. Raises StorageError without the bucket."""
        return self._info().type != fs.FileType.NotFound

    def is_dir(self) -> bool:
        return self._info().type == fs.FileType.Directory

    def is_file(self) -> bool:
        return self._info().type == fs.FileType.File

    def stat(self) -> Stat:
        """Size of the object. Raises FileNotFoundError."""
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return Stat(info.size)

    def version(self) -> str:
        """What the bucket calls this version of the object: S3's ETag, GCS's generation. Raises FileNotFoundError."""
        with self._try(lambda: self._filesystem().open_input_file(self.key)) as file:
            found = file.metadata()
        return (found.get("ETag") or found.get("generation", b"")).decode()

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the objects directly in this folder, from one listing; empty when there are none."""
        return {info.base_name: info.size for info in self._list() if info.is_file}

    def walk(self) -> Iterator[tuple["BucketPath", int]]:
        """(path, bytes) of every object below this folder."""
        for info in self._list(recursive=True):
            if info.is_file:
                yield replace(self, key=info.path), info.size

    def iterdir(self) -> Iterator["BucketPath"]:
        """Objects and folders directly in this folder."""
        if self.scheme == "gs":
            # There pyarrow names no folders. It asks for all that is below them in either case.
            names = dict.fromkeys(path.key.removeprefix(f"{self.key}/").partition("/")[0] for path, _ in self.walk())
            return (self / name for name in names)
        return (replace(self, key=info.path) for info in self._list())

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Objects and folders directly in this folder whose name fits."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # ---------------------------------------------------------------- reading
    def open(self, mode: str = "rb", buffering: int = _READ_AHEAD) -> BinaryIO:
        """The object as a seekable file that reads ahead by `buffering` bytes, 0 not at all. Raises FileNotFoundError."""
        assert mode == "rb", "objects are written whole, by `replacing`"
        reader = ObjectReader(self)
        reader.size()
        raw = _Raw(reader)
        return typing.cast(BinaryIO, io.BufferedReader(raw, buffering) if buffering else raw)

    def read_bytes(self) -> bytes:
        reader = ObjectReader(self)
        return reader.read_at(0, reader.size())

    def read_text(self) -> str:
        return self.read_bytes().decode()

    # ---------------------------------------------------------------- writing
    @contextlib.contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        """A local file that becomes the object when the block ends well; see `manifest.replacing`."""
        with _temporary_file("upload-") as file:
            yield file
            file.flush()
            self.upload(file.name)

    def upload(self, local: str) -> None:
        """Send a file; the object is there when all of it is.

        pyarrow has no way to abort an upload: a stream that is closed, or dropped, after an error in our code makes an
        object of the parts sent so far. So one call writes the whole, the settings in `_s3` make a failed part fail
        the close, and the size is compared at the end. Parts of a failed upload stay in the bucket, unseen, until its
        rule for incomplete uploads removes them.
        """
        size = os.path.getsize(local)

        def attempt() -> None:
            # Without compression=None, the name decides: x.gz would be packed again.
            stream = self._filesystem(writing=True).open_output_stream(self.key, compression=None)
            stream.write(content)
            stream.close()
            found = self._filesystem().get_file_info(self.key).size
            if found != size:
                raise OSError(f"{found} bytes arrived of {size}")

        # Not within the attempt: what this machine lacks, no waiting for the bucket mends.
        with pa.memory_map(local) if size else pa.BufferReader(b"") as source:
            content = source.read_buffer()
            self._try(attempt)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: in a bucket, a folder is there when an object is in it."""

    def rmdir(self) -> None:
        """Nothing, as with mkdir."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        try:
            self._try(lambda: self._filesystem().delete_file(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove every object below this folder, if there is one."""
        if self.exists():
            # On GCS pyarrow misses, after all that was in the folder, an object of the folder's own name.
            with contextlib.suppress(FileNotFoundError):
                self._try(lambda: self._filesystem().delete_dir(self.key))

    # ---------------------------------------------------------------- inside
    def _filesystem(self, writing: bool = False) -> fs.FileSystem:
        # By process: what a fork inherits holds locks and sockets of its parent.
        return _connect(self.scheme, self.key.partition("/")[0], self.query, writing, os.getpid())

    def _try(self, action: Callable[[], T]) -> T:
        try:
            return self.retry.trying(self, action)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from None

    def _info(self) -> fs.FileInfo:
        bucket = self.key.partition("/")[0]
        info = self._try(lambda: self._filesystem().get_file_info(self.key))
        if info.type == fs.FileType.NotFound:
            found = self._try(lambda: self._filesystem().get_file_info(bucket))
            if found.type == fs.FileType.NotFound:
                raise StorageError(f"{self}: no such bucket. Check its name (and the endpoint).")
        return info

    def _list(self, recursive: bool = False) -> list[fs.FileInfo]:
        selector = fs.FileSelector(self.key, recursive=recursive, allow_not_found=True)
        return self._try(lambda: self._filesystem().get_file_info(selector))


AnyPath = Path | BucketPath


class ObjectReader:
    """Reads byte ranges of one object; safe to call from many threads."""

    def __init__(self, path: BucketPath) -> None:
        self.path = path
        self._file: pa.NativeFile | None = None

    def size(self) -> int:
        """Bytes of the object, as it was when first asked. Raises FileNotFoundError."""
        return self.path._try(lambda: self._open().size())

    def read_at(self, offset: int, size: int) -> bytes:
        """Raises OSError when the object ends before, and FileNotFoundError."""
        if not size:
            return b""  # GCS answers a range of no bytes at an object's end with an error.

        def attempt() -> bytes | None:
            try:
                file = self._open()
                if offset + size > file.size():
                    return None
                data = file.read_at(size, offset)
                if len(data) != size:
                    raise OSError(f"{len(data)} bytes came of {size}")
            except OSError:
                self._file = None
                raise
            return data

        found = self.path._try(attempt)
        if found is None:
            raise OSError(f"{self.path} ends before byte {offset + size}")
        return found

    def copy_to(self, file: int) -> None:
        """Write the whole object into a file, from its start, over several connections. Raises OSError.

        file: a descriptor that can be written.
        """
        size = self.size()

        def piece(start: int) -> None:
            left = memoryview(self.read_at(start, min(_PIECE, size - start)))
            while left:  # A disk that is filling takes a part of it, and says so at the next.
                written = os.pwrite(file, left, start)
                left, start = left[written:], start + written

        with ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="download") as pool:
            for done in [pool.submit(piece, start) for start in range(0, size, _PIECE)]:
                try:
                    done.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise

    def _open(self) -> pa.NativeFile:
        file = self._file
        if file is None:
            file = self._file = self.path._filesystem().open_input_file(self.path.key)
        return file


class _Raw(io.RawIOBase):
    """An object as a raw stream, for io.BufferedReader."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader, self._position = reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size()}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self._reader.size() - self._position), 0)
        buffer[:size] = self._reader.read_at(self._position, size)
        self._position += size
        return size


def to_path(location: str | Path | BucketPath, retry: Retry | None = None) -> AnyPath:
    """A local path or a URL as a path; `~` is the home folder. Raises UserError for what is neither."""
    if not isinstance(location, str):
        return location
    scheme, is_url, rest = location.partition("://")
    if not is_url:
        return Path(location).expanduser()
    if scheme not in ("s3", "gs"):
        raise UserError(f"{location}: {scheme}:// is not known here. Use a local folder, s3://... or gs://...")
    key, _, query = rest.partition("?")
    key = "/".join(part for part in key.split("/") if part)
    unknown = set(urllib.parse.parse_qs(query, keep_blank_values=True)) - _OPTIONS
    if not key or unknown:
        what = f"has an unknown option {min(unknown)!r}" if unknown else "names no bucket"
        raise UserError(f"{location} {what}. Write {scheme}://bucket/folder, and options as ?region=...&scheme=http "
                        f"(known: {', '.join(sorted(_OPTIONS))}).")  # fmt: skip
    return BucketPath(scheme, key, query, retry or Retry())


def locate(folder: AnyPath, name: str) -> AnyPath:
    """Where a name leads that a file in `folder` holds: below it, unless the name is a URL or an absolute path."""
    if "://" in name or name.startswith("/"):
        return to_path(name, folder.retry if isinstance(folder, BucketPath) else None)
    return folder / name


@contextlib.contextmanager
def fetched(path: AnyPath) -> Iterator[BinaryIO]:
    """The file on a local disk, to be read in any order: of a bucket, a copy that is removed when the block ends.

    Raises FileNotFoundError.
    """
    if isinstance(path, Path):
        with open(path, "rb") as file:
            yield file
        return
    reader = ObjectReader(path)
    reader.size()
    with _temporary_file("download-") as copy:
        reader.copy_to(copy.fileno())
        yield copy


@contextlib.contextmanager
def _temporary_file(prefix: str) -> Iterator[BinaryIO]:
    try:
        with tempfile.NamedTemporaryFile(prefix=prefix) as file:
            yield typing.cast(BinaryIO, file)
    except OSError as error:
        # A failed write() does not know its file, and "no space left" is of little use without.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = f"{tempfile.gettempdir()} (TMPDIR)"
        raise


def walk_files(folder: AnyPath) -> Iterator[tuple[AnyPath, int]]:
    """(path, bytes) of every file below a folder."""
    if isinstance(folder, BucketPath):
        yield from folder.walk()
    else:
        yield from ((path, path.stat().st_size) for path in folder.rglob("*") if path.is_file())


def name_inside(path: AnyPath, folder: AnyPath) -> str | None:
    """The name of `path` relative to `folder`, with slashes; None when it lies elsewhere."""
    if isinstance(path, Path) and isinstance(folder, Path):
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else None
    if isinstance(path, BucketPath) and isinstance(folder, BucketPath) and path.scheme == folder.scheme:
        return path.key.removeprefix(folder.key).lstrip("/") if f"{path.key}/".startswith(f"{folder.key}/") else None
    return None


def version(path: AnyPath) -> str:
    """What changes when the file does: time of the last change in ns, or the bucket's own mark. Raises FileNotFoundError."""
    return path.version() if isinstance(path, BucketPath) else str(path.stat().st_mtime_ns)


def remove_tree(path: AnyPath) -> None:
    """Remove a folder and all that is in it, if it is there."""
    if isinstance(path, BucketPath):
        path.remove_tree()
    else:
        shutil.rmtree(path, ignore_errors=True)


@functools.lru_cache(maxsize=64)
def _connect(scheme: str, bucket: str, query: str, writing: bool, process: int) -> fs.FileSystem:
    options = dict(urllib.parse.parse_qsl(query))
    anonymous = options.get("anonymous", "").lower() in ("1", "true")
    if scheme == "gs":
        return fs.GcsFileSystem(
            anonymous=anonymous,
            endpoint_override=options.get("endpoint_override"),
            scheme=options.get("scheme"),
            retry_time_limit=timedelta(seconds=STALL_SECONDS if writing else _CONNECT_SECONDS),
        )
    # pyarrow does not read these two, though AWS's tools do.
    endpoint = (
        options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint and "amazonaws.com" not in endpoint:
        # Without credentials, the library asks the machine's cloud for some: 14 s at the start and 2 s a request where
        # nothing answers. Another endpoint is not that cloud's.
        os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return fs.S3FileSystem(
        anonymous=anonymous,
        region=region or ("us-east-1" if endpoint else fs.resolve_s3_region(bucket)),
        endpoint_override=endpoint,
        scheme=options.get("scheme"),
        proxy_options=_proxy(endpoint or "https://s3.amazonaws.com"),
        request_timeout=STALL_SECONDS,
        connect_timeout=_CONNECT_SECONDS,
        # Reads are retried, and counted, by Retry.
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS_A_PART if writing else 1),
        # Other values leave a truncated or empty object behind when a part of an upload, or its first request, fails
        # (pyarrow 25).
        background_writes=True,
        allow_delayed_open=False,
    )


def _proxy(endpoint: str) -> str | None:
    """The proxy that the environment (https_proxy, no_proxy, ...) names for an endpoint."""
    url = urllib.parse.urlparse(endpoint if "://" in endpoint else f"https://{endpoint}")
    proxy = urllib.request.getproxies().get(url.scheme)
    return None if not proxy or urllib.request.proxy_bypass(url.hostname or "") else proxy
