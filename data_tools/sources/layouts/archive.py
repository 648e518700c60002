"""Members of tars and zips, read in place by offset. Compressed tars are unpacked once, to a plain tar."""

import bz2
import contextlib
import errno
import gzip
import hashlib
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_tools.progress import reading
from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.words import on_one_line
from pipeline.data.images.formats import LFS_POINTER, LFS_REASON
from pipeline.data.loading.decode import is_image
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, file_size, make_folder, remove_if_empty, version

_COMPRESSED: dict[str, Callable] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"PK\x05\x06": "zip"}
# The flag of a member whose name is in UTF-8; what its name is in without it.
_UNICODE_NAME, _CODE_PAGE = 0x800, "cp437"
# Suffix of cached lists of a tar's members (imagenet.py).
LIST = ".members"
_BLOCK = 512
# Of an archive, to tell its layout.
MEMBERS_TO_LOOK_AT = 16


class Member(NamedTuple):
    """A member of a plain tar or a zip. offset, size, packed: as in `listing.TABLE`. fault: why it cannot be used, else
    "". is_file: False for folders, links and devices.
    """

    name: str
    is_folder: bool
    offset: int
    size: int
    fault: str = ""
    packed: int = 0
    is_file: bool = True


def kind(source: AnyPath) -> str:
    """The type of a file by its first bytes: tar, zip, gzip, bzip2 or xz. Raises UserError for any other."""
    with source.open("rb") as file:
        start = file.read(_BLOCK)
    for magic, name in _MAGIC.items():
        if start.startswith(magic):
            return name
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        if start.startswith(LFS_POINTER):
            raise UserError(f"{source} is {LFS_REASON}.") from None
        if is_image(source.name):
            raise UserError(f"{source} is a single image. Name the folder that it is in.") from None
        raise UserError(
            f"{source} is not a .tar, .tar.gz, .tgz or .zip (begins with {start[:12]!r}), nor a list of images (.csv,"
            " .tsv, .parquet). Is it whole? Unpack archives of other kinds (zstd, 7z, rar)."
        ) from None
    return "tar"


def plain_path(source: AnyPath, staging: AnyPath) -> AnyPath:
    """The path of a tar or zip, of an unpacked copy in `staging` for a compressed file, which is unpacked once. Raises
    UserError for any other file.
    """
    if (found := kind(source)) not in _COMPRESSED:
        return source
    plain = staged_path(source, staging, ".tar")
    if plain.exists():
        return plain
    with (
        damage_named(source, EOFError, OSError, zlib.error, lzma.LZMAError),
        reading(source, "unpacked") as raw,
        _COMPRESSED[found](raw, "rb") as packed,
        replacing(plain) as file,
    ):
        shutil.copyfileobj(packed, file, 2**20)
    return plain


@contextlib.contextmanager
def damage_named(source: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn the errors that readers of a damaged file raise into a UserError; those of a disk or a store are raised
    unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        # Storage errors have an errno; EINVAL results from a damaged offset.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise UserError(
            f"{source} is damaged ({on_one_line(error)[:200]}). Fetch it again; a table of your own has to be"
            " correct, and in UTF-8."
        ) from None


def staged_path(source: AnyPath, staging: AnyPath, suffix: str) -> AnyPath:
    """The path in `staging` for data unpacked from a file; it changes when the file changes."""
    make_folder(staging)
    place = source.resolve() if isinstance(source, Path) else source
    identity = f"{place}\n{file_size(source)}\n{version(source)}"
    return staging / (hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:16] + suffix)


def remove_unpacked(staging: AnyPath) -> None:
    """Remove unpacked data. Cached member lists stay: they are small, and cost a request for each MiB of their tars."""
    for path in staging.glob("*"):
        if path.suffix != LIST:
            path.unlink(missing_ok=True)
    remove_if_empty(staging)


def walk(source: AnyPath, collector: Collector, inside: str = "") -> None:
    """Report every folder and file of a plain tar or a zip to the collector, as if in the folder `inside`. Raises
    tarfile.TarError, or UserError, for a damaged one.
    """
    container = collector.add_container(source)
    for name, is_folder, offset, size, fault, packed, _ in members(source):
        if is_folder:
            collector.folder(inside + name)
        else:
            collector.file(inside + name, container, offset, size, packed, fault)


def members(source: AnyPath) -> Iterator[Member]:
    """Yields the members of a plain tar, as `tar_members` does, or of a zip. Raises UserError for a damaged zip."""
    if kind(source) != "zip":
        with source.open("rb") as file:
            yield from tar_members(file, 0, file_size(source))
        return
    num_bytes = file_size(source)
    with damage_named(source, Exception), source.open("rb") as file, zipfile.ZipFile(file) as opened:
        infos = opened.infolist()
    for member in infos:
        if not member.flag_bits & _UNICODE_NAME:
            # macOS packs names in UTF-8 and does not say so; zipfile then reads them as the format's first code page.
            with contextlib.suppress(UnicodeError):
                member.filename = member.filename.encode(_CODE_PAGE).decode()
        # The packed size is at least 1, because 0 means "not packed" in the table.
        offset, size, packed = member.header_offset, member.file_size, max(member.compress_size, 1)
        fault = ""
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            fault = "it is encrypted, or packed by a rare method; unpack the zip, and shard the folder"
        elif not (0 <= offset <= offset + packed <= num_bytes and size < 2**63):
            fault = "damaged zip member (it lies outside the zip)"
        yield Member(member.filename, member.is_dir(), offset, size, fault, packed, not member.is_dir())


def tar_members(file: BinaryIO, start: int, end: int) -> Iterator[Member]:
    """Yields the members of the plain tar at file[start:end]. Links and devices have a fault. Raises tarfile.TarError
    for a damaged tar.
    """
    file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            while found := tar.next():
                tar.members = []  # type: ignore[attr-defined]  # A tar may have more members than fit into memory.
                if not 0 <= found.size <= end - found.offset_data:
                    raise tarfile.ReadError(f"cut off at byte {end} within {found.name}")
                is_file = found.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE) and not found.issparse()
                fault = "" if is_file or found.isdir() else f"not a regular file, but of tar's type {found.type!a}"
                if found.islnk() or found.issym():
                    fault = (
                        f"a link to {quoted(found.linkname)}; make the tar again with tar --dereference"
                        " --hard-dereference"
                    )
                yield Member(found.name, found.isdir(), found.offset_data, found.size, fault, is_file=is_file)
            # tarfile takes a damaged header for the end.
            file.seek(tar.offset)
            if tar.offset + _BLOCK > end or any(file.read(_BLOCK)):
                raise tarfile.ReadError(f"neither a header nor the end mark at byte {tar.offset}")
    except (ValueError, OverflowError) as error:  # A damaged number.
        raise tarfile.ReadError(str(error)) from None
