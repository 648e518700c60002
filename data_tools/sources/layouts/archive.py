"""Members of tars and zips, read in place by offset. Compressed tars are unpacked once, to a plain tar."""

import bz2
import contextlib
import errno
import gzip
import hashlib
import lzma
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_tools.progress import Reading
from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.words import counted, on_one_line, printable
from pipeline.data.loading.decode import LFS_POINTER, LFS_REASON
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, file_size, make_folder, remove_if_empty, version

COMPRESSED: dict[str, Callable] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"PK\x05\x06": "zip"}
# Files that are not read -> what they are, and what to do.
_NOT_READ = {
    b"\x28\xb5\x2f\xfd": "packed by zstd, which is not read: unpack it (zstd -d)",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive, which is not read: unpack it, and give the folder",
    b"Rar!": "a RAR archive, which is not read: unpack it, and give the folder",
    LFS_POINTER: LFS_REASON,
}
_UNICODE_NAME, _CODE_PAGE = (
    0x800,
    "cp437",
)  # The flag of a member whose name is in UTF-8; what its name is in without it.
# Errors that zipfile raises for a damaged zip.
ZIP_ERRORS = (
    zipfile.BadZipFile,
    ValueError,
    KeyError,
    OverflowError,
    NotImplementedError,
    EOFError,
    OSError,
    struct.error,
    zlib.error,
)
# Suffix of cached lists of a tar's members (imagenet21k.py).
LIST = ".members"
_BLOCK = 512
_END = bytes(_BLOCK)
# Limit of long names and pax headers, so that a damaged size cannot fill the memory.
_MAX_HEADER_BYTES = 2**20


class Member(NamedTuple):
    """A member of a plain tar or a zip. offset, size, packed: as in `listing.TABLE`. fault: why it cannot be used, else "".

    is_file: False for folders, links and devices. hard_link: name of the member that a hard link stands for, else "".
    """

    name: str
    is_folder: bool
    offset: int
    size: int
    fault: str = ""
    is_file: bool = True
    hard_link: str = ""
    packed: int = 0


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
        if why := next((why for magic, why in _NOT_READ.items() if start.startswith(magic)), ""):
            raise UserError(f"{source} is {why}.") from None
        raise UserError(
            f"{source} is no .tar, .tar.gz, .tgz or .zip (it begins with {start[:12]!r}), nor a list of images (.csv, .tsv, "
            ".parquet). Is it whole?"
        ) from None
    return "tar"


def plain_path(source: AnyPath, staging: AnyPath) -> AnyPath:
    """The path of a tar or zip, of an unpacked copy in `staging` for a compressed tar. Raises UserError for any other file."""
    found = kind(source)
    return unpack(source, found, staging) if found in COMPRESSED else source


def unpack(source: AnyPath, kind: str, staging: AnyPath) -> AnyPath:
    """Decompress a tar into `staging`, unless that was done before. Returns the path of the plain tar."""
    plain = staged_path(source, staging, ".tar")
    if plain.exists():
        return plain
    with (
        damage_named(source, EOFError, OSError, zlib.error, lzma.LZMAError),
        Reading(source, "unpacked") as raw,
        COMPRESSED[kind](raw, "rb") as packed,
        replacing(plain) as file,
    ):
        shutil.copyfileobj(packed, file, 2**20)
    return plain


@contextlib.contextmanager
def damage_named(source: AnyPath, *kinds: type[Exception]) -> Iterator[None]:
    """Turn the errors that readers of a damaged file raise into a UserError; those of a disk or a store are raised unchanged."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        # Storage errors have an errno; EINVAL results from a damaged offset.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        start = b""
        with contextlib.suppress(OSError), source.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise UserError(f"{source} is {LFS_REASON}.") from None
        raise UserError(f"{source} is damaged ({on_one_line(error)[:200]}). Fetch it again.") from None


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


def walk(source: AnyPath, collector: Collector) -> None:
    """Report every folder and file of a plain tar or a zip to the collector. Raises tarfile.TarError, or UserError, for a damaged one."""
    container = collector.add_container(source)
    for member in members(source, collector.notes):
        if member.is_folder:
            collector.folder(member.name)
        else:
            collector.file(member.name, container, member.offset, member.size, member.packed, member.fault)


def members(source: AnyPath, notes: list[str] | None = None) -> Iterator[Member]:
    """Yields the members of a plain tar, as `resolved_members` does, or of a zip. notes: what is said of the names is appended."""
    if kind(source) != "zip":
        with source.open("rb") as file:
            yield from resolved_members(file, 0, file_size(source))
        return
    found, num_bytes = zip_members(source), file_size(source)
    odd = [member.filename for member in found if not _is_named_by_unicode(member)]
    if odd and notes is not None:
        notes.append(
            f"{counted(len(odd), 'name')} in {source} in an encoding that the zip does not tell, read as code page 437, such as "
            f"{printable(odd[0])}. If that is wrong, unpack it (unzip -O ENCODING, or unar), and shard the folder"
        )
    for member in found:
        # The packed size is at least 1, because 0 means "not packed" in the table.
        offset, size, packed = member.header_offset, member.file_size, max(member.compress_size, 1)
        fault = ""
        if member.flag_bits & 1:
            fault = "it is encrypted; unpack the zip, and shard the folder"
        elif member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            fault = "it is packed by a rare method; unpack the zip, and shard the folder"
        elif not (0 <= offset <= offset + packed <= num_bytes and size < 2**63):
            fault = "damaged zip member (it lies outside the zip)"
        yield Member(member.filename, member.is_dir(), offset, size, fault, not member.is_dir(), packed=packed)


def zip_members(source: AnyPath) -> list[zipfile.ZipInfo]:
    """The members of a zip. Raises UserError for a damaged one."""
    with damage_named(source, *ZIP_ERRORS), source.open("rb") as file, zipfile.ZipFile(file) as opened:
        members = opened.infolist()
    for member in members:
        if not _is_named_by_unicode(member):
            # macOS packs names in UTF-8 and does not say so; zipfile then reads them as the format's first code page.
            with contextlib.suppress(UnicodeError):
                member.filename = member.filename.encode(_CODE_PAGE).decode()
                member.flag_bits |= _UNICODE_NAME
    return members


def _is_named_by_unicode(member: zipfile.ZipInfo) -> bool:
    return bool(member.flag_bits & _UNICODE_NAME) or member.filename.isascii()


def tar_members(file: BinaryIO, start: int, end: int) -> Iterator[Member]:
    """Yields the members of the plain tar at file[start:end].

    Not tarfile.TarFile, which stops silently at a damaged header and keeps every member in memory. Links and devices have
    a fault. Raises tarfile.TarError for a damaged tar.
    """
    position, long_name, long_link, fault = start, "", "", ""
    pax: dict[str, str] = {}
    while position + _BLOCK <= end:
        file.seek(position)
        block = file.read(_BLOCK)
        if block == _END:
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {position}") from None
        offset = position + _BLOCK
        size = header.size
        if "size" in pax:
            if pax["size"].isascii() and pax["size"].isdigit() and len(pax["size"]) < 20:
                size = int(pax["size"])
            else:
                fault = f"its pax header says size = {pax['size'][:40]!a}, which is no number"
        position = offset + -(-size // _BLOCK) * _BLOCK
        if size < 0 or offset + size > end:
            raise tarfile.ReadError(f"cut off at byte {end} within {header.name}")
        is_long = header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if (is_long or header.type == tarfile.XHDTYPE) and size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a name or pax header of {counted(size, 'byte')} at byte {offset - _BLOCK}")
        if is_long:
            text = file.read(size).rstrip(b"\0").decode("utf-8", "surrogateescape")
            long_name, long_link = (text, long_link) if header.type == tarfile.GNUTYPE_LONGNAME else (long_name, text)
        elif header.type == tarfile.XHDTYPE:
            try:
                pax = _pax_records(file.read(size))
            except ValueError as error:
                pax, fault = {}, f"its pax header is damaged ({error})"
        elif header.type != tarfile.XGLTYPE:
            name = pax.get("path") or long_name or header.name
            target = pax.get("linkpath") or long_link or header.linkname
            hard_link = target if header.islnk() and not fault else ""
            is_file = header.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
            if header.islnk() or header.issym():
                kind, option = ("hard", "hard-dereference") if header.islnk() else ("symbolic", "dereference")
                fault = fault or f"a {kind} link to {quoted(target)}; make the tar again with tar --{option}"
            elif not (is_file or header.isdir()):
                fault = fault or f"not a regular file, but of tar's type {header.type!a}"
            yield Member(name, header.isdir(), offset, size, fault, is_file, hard_link)
            long_name, long_link, pax, fault = "", "", {}, ""
    raise tarfile.ReadError(f"cut off at byte {end}: it has no end mark")


def resolved_members(file: BinaryIO, start: int, end: int) -> Iterator[Member]:
    """Same as `tar_members`, but a hard link to an earlier file of the tar has the place of that file's bytes."""
    files: dict[str, Member] | None = None
    for member in tar_members(file, start, end):
        if member.hard_link:
            if files is None:
                # Read again, because a tar may have more names than fit into memory, and nearly none has links.
                wanted = {other.hard_link for other in tar_members(file, start, end)}
                files = {
                    other.name: other
                    for other in tar_members(file, start, end)
                    if other.is_file and other.name in wanted
                }
            found = files.get(member.hard_link)
            if found is not None and found.offset < member.offset:
                member = found._replace(name=member.name)
        yield member


def _pax_records(data: bytes) -> dict[str, str]:
    """Parses records `<length> <name>=<value>\\n` (the length includes itself). Raises ValueError for any other data."""
    records, position = {}, 0
    while position < len(data) and data[position]:  # Zeros may follow the last record.
        digits, _, rest = data[position : position + 20].partition(b" ")
        if not digits.isdigit() or not rest:
            raise ValueError(f"a record begins with {digits!r}, which is no length")
        length = int(digits)
        record = data[position : position + length]
        name, is_record, value = record[len(digits) + 1 : -1].partition(b"=")
        if len(record) != length or not is_record or record[-1:] != b"\n":
            raise ValueError(f"a record of {counted(length, 'byte')} does not end where it should")
        # Other encodings are kept by `surrogateescape`; callers check for UTF-8.
        records[name.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        position += length
    return records
