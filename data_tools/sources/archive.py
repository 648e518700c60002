"""A .tar, .tar.gz, .tgz or .zip of a folder of class folders.

Plain tars and zips are read where they are, by offset. A compressed tar has no offsets: it is unpacked once, to one
plain tar.
"""

import bz2
import contextlib
import gzip
import hashlib
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from data_tools.progress import Reading
from data_tools.sources.listing import Collector
from pipeline.data.bucket import AnyPath, version
from pipeline.data.manifest import replacing
from pipeline.errors import UserError

COMPRESSED: dict[str, Callable] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"PK\x05\x06": "zip"}
# Ending of lists of a tar's members that are kept (imagenet21k.py).
LIST = ".members"
_BLOCK = 512
_END = bytes(_BLOCK)


def kind(source: AnyPath) -> str:
    """What a file is, by its first bytes: tar, zip, gzip, bzip2 or xz. Raises UserError for anything else."""
    with source.open("rb") as file:
        start = file.read(_BLOCK)
    for magic, name in _MAGIC.items():
        if start.startswith(magic):
            return name
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        raise UserError(
            f"source = {source} is no .tar, .tar.gz, .tgz or .zip (it begins with {start[:12]!r}). Is it whole?"
        ) from None
    return "tar"


def unpack(source: AnyPath, kind: str, staging: AnyPath) -> AnyPath:
    """A compressed tar as a plain one in `staging`; whole or not there, and made once."""
    plain = staged_path(source, staging, ".tar")
    if plain.exists():
        return plain
    try:
        with Reading(source, "unpacked") as raw, COMPRESSED[kind](raw, "rb") as packed, replacing(plain) as file:
            shutil.copyfileobj(packed, file, 2**20)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # The disk's; what gzip and bz2 raise for bad data has no number.
        raise UserError(f"{source} is damaged ({error}). Fetch it again.") from None
    return plain


def staged_path(source: AnyPath, staging: AnyPath, suffix: str) -> AnyPath:
    """Where what is unpacked of a file belongs: another place when the file changes."""
    staging.mkdir(parents=True, exist_ok=True)
    place = source.resolve() if isinstance(source, Path) else source
    identity = f"{place}\n{source.stat().st_size}\n{version(source)}"
    return staging / (hashlib.sha256(identity.encode()).hexdigest()[:16] + suffix)


def remove_unpacked(staging: AnyPath) -> None:
    """Remove what was unpacked. Lists of members stay: they are small, and cost a request for each MiB of their tars."""
    for path in staging.glob("*"):
        if path.suffix != LIST:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        staging.rmdir()


def walk_tar(source: AnyPath, collector: Collector) -> None:
    """Tell the collector every folder and file of a plain tar. Raises tarfile.TarError for a damaged one."""
    container = collector.add_container(source)
    with source.open("rb") as file:
        for name, is_folder, offset, size in tar_members(file, 0, source.stat().st_size):
            if is_folder:
                collector.folder(name)
            else:
                collector.file(name, container, offset, size)


def walk_zip(source: AnyPath, collector: Collector) -> None:
    """Tell the collector every folder and file of a zip."""
    try:
        members = zipfile.ZipFile(source.open("rb")).infolist()
    except zipfile.BadZipFile as error:
        raise UserError(f"{source} is damaged ({error}). Fetch it again.") from None
    container = collector.add_container(source)
    for member in members:
        if member.is_dir():
            collector.folder(member.filename)
            continue
        if member.flag_bits & 1:
            raise UserError(f"{source}: {member.filename} is encrypted. Unpack it, and shard the folder.")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{source}: {member.filename} is packed by a rare method. Unpack it, and shard the folder.")
        # 0 means "not packed" in the table; an empty file is none the wiser for a read of one byte.
        collector.file(member.filename, container, member.header_offset, member.file_size, max(member.compress_size, 1))


def tar_members(file: BinaryIO, start: int, end: int) -> Iterator[tuple[str, bool, int, int]]:
    """(name, is a folder, offset of its bytes, size) of each member of the plain tar at file[start:end].

    tarfile.TarFile takes a damaged header for the end and keeps every member in memory; hence this loop around its
    header parser. Links and devices are told as files called .link, which are no images. Raises tarfile.TarError for a
    damaged tar.
    """
    position, long_name = start, ""
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
        size = int(pax.get("size", header.size))
        position = offset + -(-size // _BLOCK) * _BLOCK
        if size < 0 or offset + size > end:
            raise tarfile.ReadError(f"cut off at byte {end} within {header.name}")
        if header.type == tarfile.GNUTYPE_LONGNAME:
            long_name = file.read(size).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif header.type == tarfile.XHDTYPE:
            pax = _pax_records(file.read(size))
        elif header.type not in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            name = pax.get("path") or long_name or header.name
            is_link = not (header.isdir() or header.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE))
            yield (f"{name}.link" if is_link else name), header.isdir(), offset, size
            long_name, pax = "", {}
    raise tarfile.ReadError(f"cut off at byte {end}: it has no end mark")


def _pax_records(data: bytes) -> dict[str, str]:
    """Records are `<length> <name>=<value>\\n`, length counting itself."""
    records, position = {}, 0
    while position < len(data) and data[position : position + 1].isdigit():
        length = int(data[position : data.index(b" ", position)])
        name, _, value = data[position : position + length - 1].partition(b" ")[2].partition(b"=")
        records[name.decode()] = value.decode("utf-8", "surrogateescape")
        position += length
    return records
