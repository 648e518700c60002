"""Addresses of files: local paths, and URLs of objects and folders in a bucket (`s3://bucket/prefix`,
`gs://bucket/prefix`).

`to_path` turns a local path into a `Path` and a URL into a `BucketPath` (`object_store.py`); the functions below are
for both. A URL may end in options,
`s3://bucket/prefix?region=eu-west-1&endpoint_override=http://10.0.0.5:9000`; other settings come from the environment
(AWS_ENDPOINT_URL, AWS_REGION, AWS_PROFILE, ...), as with the vendor's own tools.
"""

import contextlib
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.base.errors import UserError
from pipeline.data.storage.object_store import BucketPath, temporary_file
from pipeline.data.storage.retry import Retry

AnyPath = Path | BucketPath

# Query parameters of a URL.
_OPTIONS = ("region", "endpoint_override", "scheme", "anonymous")


def to_path(location: str | Path | BucketPath, retry: Retry | None = None) -> AnyPath:
    """A local path or a URL as a path. Raises UserError for a URL of another kind."""
    if not isinstance(location, str):
        return location
    scheme, is_url, rest = location.partition("://")
    if not is_url:
        return Path(location)
    if scheme not in ("s3", "gs"):
        raise UserError(f"{location}: {scheme}:// is not supported. Use a local folder, s3://... or gs://...")
    key, _, query = rest.partition("?")
    key = "/".join(part for part in key.split("/") if part)
    if not key or not set(_OPTIONS).issuperset(urllib.parse.parse_qs(query, keep_blank_values=True)):
        raise UserError(
            f"{location}: write {scheme}://bucket/folder, and options as ?region=...&scheme=http (known:"
            f" {', '.join(_OPTIONS)})."
        )
    return BucketPath(scheme, key, query, retry or Retry())


def locate(folder: AnyPath, name: str) -> AnyPath:
    """The path of a name that a file in `folder` holds: below the folder, unless the name is a URL or an absolute
    path.
    """
    if "://" in name or name.startswith("/"):
        return to_path(name, folder.retry if isinstance(folder, BucketPath) else None)
    return folder / name


def file_size(path: AnyPath) -> int:
    """Bytes of a file. Raises FileNotFoundError."""
    return path.stat().st_size


def version(path: AnyPath) -> str:
    """Changes when the file does: time of its last change in ns, or the store's own version. Raises
    FileNotFoundError.
    """
    return path.version() if isinstance(path, BucketPath) else str(path.stat().st_mtime_ns)


def state_of(path: AnyPath) -> str:
    """As `version`; of a local file also its size, its inode and when that changed, which no writing leaves alone."""
    if isinstance(path, BucketPath):
        return path.version()
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


@contextlib.contextmanager
def fetched(path: AnyPath) -> Iterator[BinaryIO]:
    """The file on a local disk, for random access: an object is downloaded to a temporary file. Raises
    FileNotFoundError.
    """
    if isinstance(path, Path):
        with open(path, "rb") as file:
            yield file
        return
    with temporary_file("download-") as copy:
        path.reader().copy_to(copy.fileno())
        yield copy


def walk_files(folder: AnyPath) -> Iterator[tuple[AnyPath, int, int]]:
    """(path, bytes, time of the last change in ns) of every file below a folder, also in linked folders.

    Raises OSError for a folder that cannot be read.
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
                status = path.stat()
                yield path, status.st_size, status.st_mtime_ns


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
            folder.request(lambda: folder.connection().delete_dir(folder.key))
