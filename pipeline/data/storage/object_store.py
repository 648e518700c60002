"""Objects and folders of a bucket: S3 and what speaks its protocol, and Google Cloud Storage, both through pyarrow.

A request that fails for a passing reason (connection reset, timeout, status 503) is retried and counted (`retry.py`).
Other failures raise StorageError at once. pyarrow is imported where it is used: it takes a tenth of a second, and local
files need none.
"""

import contextlib
import errno
import fnmatch
import functools
import io
import os
import posixpath
import tempfile
import threading
import typing
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from pipeline.base.words import counted
from pipeline.data.storage.retry import Retry, StorageError

if typing.TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

T = TypeVar("T")

_READ_AHEAD = 2**20
_CONNECT_SECONDS = 5.0
# Attempts of the client library per part before the whole upload is retried: a shard of 1 GiB has 100 parts.
_PART_ATTEMPTS = 5
# A whole object is downloaded in pieces, because one connection carries only some 50-100 MB/s.
_PIECE, _CONNECTIONS = 8 * 2**20, 4


class ObjectStat(NamedTuple):
    """Size and modification time of an object, with the names of `os.stat_result`."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class BucketPath:
    """The address of an object or a folder (prefix), with those methods of `Path` that mean the same in a bucket.

    key: bucket/prefix/name. query: options of the URL. Every request raises StorageError when the store cannot be used,
    and FileNotFoundError for an object that is missing.
    """

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
        # Object stores do not resolve "..".
        return replace(self, key=posixpath.normpath(key) if ".." in name else key)

    def __lt__(self, other: "BucketPath") -> bool:
        return self.key < other.key

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def parent(self) -> "BucketPath":
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def stem(self) -> str:
        return PurePosixPath(self.key).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def bucket(self) -> str:
        return self.key.partition("/")[0]

    # ---------------------------------------------------------------- listing
    def exists(self) -> bool:
        """Whether there is such an object or folder; an empty bucket is a folder."""
        return self._info().type.name != "NotFound"

    def is_dir(self) -> bool:
        return self._info().type.name == "Directory"

    def is_file(self) -> bool:
        return self._info().is_file

    def stat(self) -> ObjectStat:
        info = self._info()
        if not info.is_file:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return ObjectStat(info.size, info.mtime_ns or 0)

    def version(self) -> str:
        """The store's identifier of this version of the object: S3's ETag, GCS's generation."""
        with self.request(lambda: self.connection().open_input_file(self.key)) as file:
            metadata = file.metadata()
        return (metadata.get("ETag") or metadata.get("generation", b"")).decode()

    def walk(self, recursive: bool = True) -> Iterator[tuple["BucketPath", int, int]]:
        """(path, bytes, time of the last change in ns) of every object below this folder, or directly in it."""
        for info in self._list(recursive):
            if info.is_file:
                yield replace(self, key=info.path), info.size, info.mtime_ns or 0

    def iterdir(self) -> Iterator["BucketPath"]:
        """Objects and folders directly in this folder."""
        if self.scheme == "gs":
            # There, pyarrow's listings have no folders. (It lists all objects below in either case.)
            names = dict.fromkeys(path.key.removeprefix(f"{self.key}/").partition("/")[0] for path, *_ in self.walk())
            return (self / name for name in names)
        return (replace(self, key=info.path) for info in self._list())

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Objects and folders directly in this folder whose name matches."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # ---------------------------------------------------------------- reading
    def reader(self, expected: int | None = None) -> "ObjectReader":
        return ObjectReader(self, expected)

    def open(self, mode: str = "rb", buffering: int = _READ_AHEAD) -> BinaryIO:
        """The object as a seekable file. buffering: bytes to read ahead, or 0. Raises FileNotFoundError."""
        assert mode == "rb", "objects are written as a whole, by `replacing`"
        reader = self.reader()
        reader.size()  # A missing object raises now.
        return typing.cast(BinaryIO, io.BufferedReader(reader, buffering) if buffering else reader)

    def read_bytes(self) -> bytes:
        reader = self.reader()
        return reader.read_at(0, reader.size())

    # ---------------------------------------------------------------- writing
    @contextlib.contextmanager
    def replacing(self) -> Iterator[BinaryIO]:
        """A temporary local file, uploaded when the block ends without an exception (see `atomic.replacing`)."""
        with temporary_file("upload-") as file:
            yield file
            file.flush()
            self.upload(file.name)

    def upload(self, local: str) -> None:
        """Store a local file as this object, which appears once all of it has arrived.

        pyarrow cannot abort an upload: when a stream is closed or dropped after an error in our code, the parts sent so
        far become the object. So the file is written by one call, the options of `_connect` make a failed part fail the
        close, and the size is compared at the end. Parts of a failed upload remain in the bucket, invisible, until its
        rule for incomplete uploads removes them.
        """
        import pyarrow as pa

        size = os.path.getsize(local)

        def attempt() -> None:
            # Without compression=None, pyarrow would compress an object named x.gz once more.
            stream = self.connection(writing=True).open_output_stream(self.key, compression=None)
            stream.write(content)
            stream.close()
            arrived = self.connection().get_file_info(self.key).size
            if arrived != size:
                raise OSError(f"{counted(arrived, 'byte')} arrived of {size:,}")

        # Outside of the attempt: retrying does not help when this machine runs out of memory.
        with pa.memory_map(local) if size else pa.BufferReader(b"") as source:
            content = source.read_buffer()
            self.request(attempt, is_transfer=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            self.request(lambda: self.connection().delete_file(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    # ---------------------------------------------------------------- requests
    def request(self, action: Callable[[], T], is_transfer: bool = False) -> T:
        """Call `action`, with retries; see `Retry.call`."""
        import pyarrow as pa

        try:
            return self.retry.call(str(self), _under_way.watched(action), is_transfer)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from None
        except pa.ArrowInvalid as error:  # An impossible setting, or a key with an empty part (a//b).
            raise StorageError(f"{self} cannot be used: {error}.") from None

    def connection(self, writing: bool = False) -> "fs.FileSystem":
        # One for each process: a forked process must not use the locks and sockets of its parent.
        return _connect(self.scheme, self.bucket, self.query, self.retry.stall_seconds, writing, os.getpid())

    def _info(self) -> "fs.FileInfo":
        info = self.request(lambda: self.connection().get_file_info(self.key))
        if info.type.name == "NotFound":
            bucket = self.request(lambda: self.connection().get_file_info(self.bucket))
            if bucket.type.name == "NotFound":
                raise StorageError(f"{self}: no such bucket. Check its name (and the endpoint).")
        return info

    def _list(self, recursive: bool = False) -> "list[fs.FileInfo]":
        """The content of the folder, from one listing; empty for a missing folder."""
        from pyarrow import fs

        selector = fs.FileSelector(self.key, recursive=recursive, allow_not_found=True)
        return self.request(lambda: self.connection().get_file_info(selector))


class RangeReader(io.RawIOBase):
    """A raw stream over `size` and `read_at`, which subclasses define."""

    _position = 0

    def size(self) -> int:
        raise NotImplementedError

    def read_at(self, offset: int, size: int) -> bytes | memoryview:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size()}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self.size() - self._position), 0)
        buffer[:size] = self.read_at(self._position, size)
        self._position += size
        return size


class ObjectReader(RangeReader):
    """Reads byte ranges of one object, safe to call from many threads; as a raw stream, for one."""

    def __init__(self, path: BucketPath, expected: int | None = None) -> None:
        """expected: its bytes by a manifest. Raises OSError if it has others."""
        self.path = path
        self._file: pa.NativeFile | None = None
        if expected is not None and (size := self.size()) != expected:
            raise OSError(
                f"{path} has {counted(size, 'byte')}, but {expected:,} in the manifest: it was replaced or damaged."
            )

    def size(self) -> int:
        """Bytes of the object, as of the first call. Raises FileNotFoundError."""
        return self.path.request(lambda: self._open().size())

    def read_at(self, offset: int, size: int) -> bytes:
        """Raises OSError when the object ends before, and FileNotFoundError."""
        if not size:
            return b""  # GCS answers an empty range at the end of an object with an error.

        def attempt() -> bytes | None:
            try:
                file = self._open()
                if offset + size > file.size():
                    return None
                data = file.read_at(size, offset)
                if len(data) != size:
                    raise OSError(f"{counted(len(data), 'byte')} arrived of {size:,}")
            except OSError:
                self._file = None
                raise
            return data

        data = self.path.request(attempt)
        if data is None:
            raise OSError(f"{self.path} ends before byte {offset + size}")
        return data

    def copy_to(self, file: int) -> None:
        """Write the whole object to a file descriptor, over several connections. Raises OSError."""
        size = self.size()

        def copy_piece(start: int) -> None:
            left = memoryview(self.read_at(start, min(_PIECE, size - start)))
            while left:  # A disk that fills up takes a part of the data first, and raises at the next call.
                written = os.pwrite(file, left, start)
                left, start = left[written:], start + written

        # Not an executor, all of whose work the interpreter waits for when it exits.
        pool = ThreadPool(_CONNECTIONS)
        try:
            list(pool.imap_unordered(copy_piece, range(0, size, _PIECE)))
        finally:  # The file's number may soon be another one's: requests under way are waited for.
            pool.terminate()
            pool.join()

    def _open(self) -> "pa.NativeFile":
        file = self._file
        if file is None:
            file = self._file = self.path.connection().open_input_file(self.path.key)
        return file


class _RequestsUnderWay:
    """Makes a fork wait for requests of other threads, and new requests for the fork.

    The S3 client's locks are copied by a fork as they are: where another thread has one, the child waits for it forever
    (a quarter of all forks beside two downloads).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._requests, self._forking = 0, False
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork)

    def watched(self, action: Callable[[], T]) -> Callable[[], T]:
        """The same action, as one request."""

        def request() -> T:
            with self._changed:
                self._changed.wait_for(lambda: not self._forking)
                self._requests += 1
            try:
                return action()
            finally:
                with self._changed:
                    self._requests -= 1
                    self._changed.notify_all()

        return request

    def _before_fork(self) -> None:
        self._changed.acquire()  # Until the fork is over.
        self._changed.wait_for(lambda: not self._forking)
        self._forking = True
        self._changed.wait_for(lambda: not self._requests)

    def _after_fork(self) -> None:
        self._forking = False
        self._changed.notify_all()
        self._changed.release()


_under_way = _RequestsUnderWay()


@contextlib.contextmanager
def temporary_file(prefix: str) -> Iterator[BinaryIO]:
    """A local file with a name, removed at the end of the block."""
    try:
        with tempfile.NamedTemporaryFile(prefix=prefix) as file:
            yield typing.cast(BinaryIO, file)
    except OSError as error:
        # The error of a failed write() has no file name, and "no space left" is of little use without one.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = f"{tempfile.gettempdir()} (TMPDIR)"
        raise


@functools.lru_cache(maxsize=64)
def _connect(
    scheme: str, bucket: str, query: str, stall_seconds: float, writing: bool, process: int
) -> "fs.FileSystem":
    from pyarrow import fs

    options = dict(urllib.parse.parse_qsl(query))
    anonymous = options.get("anonymous", "").lower() in ("1", "true")
    transport = options.get("scheme", "").lower() or None
    if scheme == "gs":
        return fs.GcsFileSystem(
            anonymous=anonymous,
            endpoint_override=options.get("endpoint_override"),
            scheme=transport,
            retry_time_limit=timedelta(seconds=stall_seconds if writing else _CONNECT_SECONDS),
        )
    # AWS's tools read these two variables, pyarrow does not.
    endpoint = (
        options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    region = options.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = region or ("us-east-1" if endpoint else fs.resolve_s3_region(bucket))
    return fs.S3FileSystem(
        anonymous=anonymous,
        region=region,
        endpoint_override=endpoint,
        scheme=transport,
        proxy_options=_proxy(endpoint or "https://s3.amazonaws.com"),
        request_timeout=stall_seconds,
        connect_timeout=_CONNECT_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_PART_ATTEMPTS if writing else 1),
        # With other values, a failed part or first request of an upload leaves a truncated or empty object (pyarrow
        # 25).
        background_writes=True,
        allow_delayed_open=False,
    )


def _proxy(endpoint: str) -> str | None:
    """The proxy that the environment (https_proxy, no_proxy, ...) names for an endpoint."""
    import urllib.request  # Slow to import, with its HTTP client.

    url = urllib.parse.urlparse(endpoint if "://" in endpoint else f"https://{endpoint}")
    proxy = urllib.request.getproxies().get(url.scheme)
    if not proxy or urllib.request.proxy_bypass(url.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"  # As curl and AWS's tools take it; pyarrow refuses it.
