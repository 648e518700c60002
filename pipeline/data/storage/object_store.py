"""Requests to an object store: S3 and what speaks its protocol, and Google Cloud Storage, both through pyarrow.

A request that fails for a passing reason (connection reset, timeout, status 503) is retried and counted (`retry.py`). Other
failures raise StorageError at once.
"""

import errno
import functools
import math
import os
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import pyarrow as pa
from pyarrow import fs

from pipeline.base.words import counted
from pipeline.data.storage.retry import Retry, StorageError

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
# Of each part of an upload, by the client library, before the whole upload is retried: a shard of 1 GiB has 100 parts.
_PART_ATTEMPTS = 5
# A whole object is downloaded in pieces, because one connection carries only some 50-100 MB/s.
_PIECE, _CONNECTIONS = 8 * 2**20, 4
_NO_MACHINE = "AWS_EC2_METADATA_DISABLED"
_connecting = threading.Lock()
# How a URL holds a question mark of a key, and with further 25s what looks like one: see `key_in_url`.
_ESCAPED = re.compile("%((?:25)*)3F")


@dataclass(frozen=True)
class Store:
    """One bucket. Keys begin with the bucket's name, as in pyarrow. query: the options of its URL (`bucket.py`).

    Every request raises StorageError when the store cannot be used, and FileNotFoundError for an object that is missing.
    """

    scheme: str
    bucket: str
    query: str
    retry: Retry = field(compare=False)

    def url(self, key: str) -> str:
        return f"{self.scheme}://{key_in_url(key)}" + (f"?{self.query}" if self.query else "")

    def info(self, key: str) -> fs.FileInfo:
        """What is stored under a key; its type says whether that is an object, a folder or nothing."""
        info = self.request(key, lambda: self._connection().get_file_info(key))
        if info.type == fs.FileType.NotFound:
            bucket = self.request(key, lambda: self._connection().get_file_info(self.bucket))
            if bucket.type == fs.FileType.NotFound:
                raise StorageError(f"{self.url(key)}: no such bucket. Check its name (and the endpoint).")
        return info

    def size(self, key: str) -> int:
        """Bytes of an object."""
        info = self.info(key)
        if info.type != fs.FileType.File:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url(key))
        return info.size

    def version(self, key: str) -> str:
        """The store's identifier of this version of the object: S3's ETag, GCS's generation."""
        with self.request(key, lambda: self._connection().open_input_file(key)) as file:
            metadata = file.metadata()
        return (metadata.get("ETag") or metadata.get("generation", b"")).decode()

    def list_folder(self, key: str, recursive: bool = False) -> list[fs.FileInfo]:
        """The content of a folder, from one listing; empty for a missing folder."""
        selector = fs.FileSelector(key, recursive=recursive, allow_not_found=True)
        return self.request(key, lambda: self._connection().get_file_info(selector))

    def upload(self, local: str, key: str) -> None:
        """Store a local file as an object, which appears once all of it has arrived.

        pyarrow cannot abort an upload: when a stream is closed or dropped after an error in our code, the parts sent so
        far become the object. So the file is written by one call, the options of `_connect` make a failed part fail the
        close, and the size is compared at the end. Parts of a failed upload remain in the bucket, invisible, until its
        rule for incomplete uploads removes them.
        """
        size = os.path.getsize(local)

        def attempt() -> None:
            # Without compression=None, pyarrow would compress an object named x.gz once more.
            stream = self._connection(writing=True).open_output_stream(key, compression=None)
            stream.write(content)
            stream.close()
            arrived = self._connection().get_file_info(key).size
            if arrived != size:
                raise OSError(f"{counted(arrived, 'byte')} arrived of {size:,}")

        # Outside of the attempt: retrying does not help when this machine runs out of memory.
        with pa.memory_map(local) if size else pa.BufferReader(b"") as source:
            content = source.read_buffer()
            self.request(key, attempt, is_transfer=True)

    def delete(self, key: str) -> None:
        self.request(key, lambda: self._connection().delete_file(key))

    def delete_folder(self, key: str) -> None:
        """Delete every object below a folder, which must exist."""
        self.request(key, lambda: self._connection().delete_dir(key))

    def request(self, key: str, action: Callable[[], T], is_transfer: bool = False) -> T:
        """Call `action`, with retries; see `Retry.call`."""
        try:
            return self.retry.call(self.url(key), action, is_transfer)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url(key)) from None
        except pa.ArrowInvalid as error:  # An impossible setting, or a key with an empty part (a//b).
            raise StorageError(f"{self.url(key)} cannot be used: {error}.") from None

    def _connection(self, writing: bool = False) -> fs.FileSystem:
        # One for each process: a forked process must not use the locks and sockets of its parent.
        return _connect(self.scheme, self.bucket, self.query, self.retry.stall_seconds, writing, os.getpid())


def key_in_url(key: str) -> str:
    """A key as in a URL, where a question mark begins the options: names that came from the web have some."""
    return _ESCAPED.sub(r"%25\g<1>3F", key).replace("?", "%3F")


def key_of_url(text: str) -> str:
    """The inverse of `key_in_url`."""
    return _ESCAPED.sub(lambda found: f"%{found[1][2:]}3F" if found[1] else "?", text)


class ObjectReader:
    """Reads byte ranges of one object; safe to call from many threads."""

    def __init__(self, store: Store, key: str) -> None:
        self.store, self.key = store, key
        self._file: pa.NativeFile | None = None

    def size(self) -> int:
        """Bytes of the object, as of the first call. Raises FileNotFoundError."""
        return self.store.request(self.key, lambda: self._open().size())

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

        found = self.store.request(self.key, attempt)
        if found is None:
            raise OSError(f"{self.store.url(self.key)} ends before byte {offset + size}")
        return found

    def copy_to(self, file: int) -> None:
        """Write the whole object to a file descriptor, over several connections. Raises OSError."""
        size = self.size()

        def copy_piece(start: int) -> None:
            left = memoryview(self.read_at(start, min(_PIECE, size - start)))
            while left:  # A disk that fills up takes a part of the data first, and raises at the next call.
                written = os.pwrite(file, left, start)
                left, start = left[written:], start + written

        starts, errors = iter(range(0, size, _PIECE)), list[BaseException]()

        def copy_pieces() -> None:
            try:
                while not errors and (start := next(starts, None)) is not None:
                    copy_piece(start)
            except BaseException as error:
                errors.append(error)

        # Not an executor, all of whose work the interpreter waits for when it exits. Arrow waits for requests under way.
        threads = [
            threading.Thread(target=copy_pieces, name="download", daemon=True)
            for _ in range(min(_CONNECTIONS, math.ceil(size / _PIECE)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C.
            errors.append(error)
            for thread in threads:  # The file's number may soon be another one's.
                thread.join()
            raise
        if errors:
            raise errors[0]

    def _open(self) -> pa.NativeFile:
        file = self._file
        if file is None:
            file = self._file = self.store._connection().open_input_file(self.key)
        return file


@functools.lru_cache(maxsize=64)
def _connect(scheme: str, bucket: str, query: str, stall_seconds: float, writing: bool, process: int) -> fs.FileSystem:
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
    with _credentials_of_the_machine(not endpoint or "amazonaws.com" in endpoint):
        return fs.S3FileSystem(
            anonymous=anonymous,
            region=region,
            endpoint_override=endpoint,
            scheme=transport,
            proxy_options=_proxy(endpoint or "https://s3.amazonaws.com"),
            request_timeout=stall_seconds,
            connect_timeout=_CONNECT_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_PART_ATTEMPTS if writing else 1),
            # With other values, a failed part or first request of an upload leaves a truncated or empty object (pyarrow 25).
            background_writes=True,
            allow_delayed_open=False,
        )


@contextmanager
def _credentials_of_the_machine(wanted: bool) -> Iterator[None]:
    """What is connected within looks for the credentials of the machine's cloud, or does not.

    Without others, AWS's library asks the metadata service of the cloud, at another endpoint as well, where its credentials do not
    fit: where no service answers, that takes 14 s at the start and 2 s for each request.
    """
    with _connecting:  # One at a time, because the library takes this from the environment of the process.
        if wanted or _NO_MACHINE in os.environ:
            yield
            return
        os.environ[_NO_MACHINE] = "true"
        try:
            yield
        finally:
            del os.environ[_NO_MACHINE]


def _proxy(endpoint: str) -> str | None:
    """The proxy that the environment (https_proxy, no_proxy, ...) names for an endpoint."""
    url = urllib.parse.urlparse(endpoint if "://" in endpoint else f"https://{endpoint}")
    proxy = urllib.request.getproxies().get(url.scheme)
    if not proxy or urllib.request.proxy_bypass(url.hostname or ""):
        return None
    kind, mark, _ = proxy.partition("://")
    if not mark:
        return f"http://{proxy}"  # As curl and AWS's tools take it; pyarrow refuses it.
    if kind not in ("http", "https"):
        raise StorageError(
            f"{url.scheme}_proxy is a {kind}:// proxy, and S3 is reached through http:// and https:// ones only. Set one of these, or "
            f"no_proxy={url.hostname}."
        )
    return proxy
