"""The Ray task that checks one shard against its rows of the manifest: the tar, every header, every image.

Findings about a sample (SAMPLE_KINDS: its bytes or its label cannot be trusted) exclude it from training. Findings
about the tar (TAR_KINDS) do not: its samples may be intact.
"""

import hashlib
import os
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from data_tools.sources.layouts.archive import Member, tar_members
from data_tools.sources.layouts.webdataset import NO_LABEL, TarSample, samples_of, split_name
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.dataset.manifest import Shard
from pipeline.data.loading.decode import DecodeError, inspect, left_out
from pipeline.data.storage.bucket import fetched, locate, to_path
from pipeline.data.storage.content import content_hash

# Kinds of findings and their meaning, as printed.
SAMPLE_KINDS = {
    "lost": "the image's bytes cannot be read",
    "content": "the image's bytes are not those of the manifest",
    "undecodable": "the image cannot be decoded to its last row",
    "label": "the tar's label is not the manifest's",
    "label range": "a label is not a valid class number",
}
TAR_KINDS = {
    "missing": "the tar is not there",
    "size": "the tar has another size than in the manifest",
    "checksum": "the tar has other bytes than in the manifest",
    "unreadable": "reading the tar fails",
    "structure": "a header in the tar is damaged",
    "member": "the tar has no such member where the manifest says; the image's bytes are intact",
    "duplicate": "a name occurs twice",
    "properties": "width, height or format are not the manifest's",
    "manifest": "the manifest's files do not fit together",
}
_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 2**20

# shard: name of the tar, "" for a finding about the manifest. row: in its split, -1 for a finding about the whole tar.
# is_unfit: whether to exclude the sample from training.
FINDINGS = pa.schema(
    [
        ("kind", pa.string()),
        ("split", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int64()),
        ("key", pa.string()),
        ("detail", pa.string()),
        ("is_unfit", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class VerifyJob:
    """One shard to check. rows: its columns of samples.parquet, None if that table cannot be read.

    first_row: of the shard in its split. decode: keys of the images to decode; None is all. pixels: what images must
    be.
    """

    folder: str
    shard: Shard
    rows: dict[str, list[Any]] | None
    first_row: int
    num_classes: int
    decode: frozenset[str] | None
    pixels: Pixels = RGB8


@dataclass
class Checked:
    """The result of a job, filled while the shard is read. decoded: number of decoded images. left_out: of these, by
    `decode.left_out`. findings: rows of a table with schema FINDINGS.
    """

    shard: Shard
    bytes: int = 0
    decoded: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    findings: list[tuple] = field(default_factory=list)

    def add(self, kind: str, detail: str, row: int = -1, key: str = "", is_unfit: bool | None = None) -> None:
        unfit = kind in SAMPLE_KINDS if is_unfit is None else is_unfit
        # Details may quote arbitrary names from the tar.
        self.findings.append((kind, self.shard.split, self.shard.name, row, key, printable(detail), unfit))


def findings_table(rows: list[tuple]) -> pa.Table:
    """A table with schema FINDINGS from tuples in its column order."""
    return pa.Table.from_pylist([dict(zip(FINDINGS.names, row, strict=True)) for row in rows], FINDINGS)


def check_shard(job: VerifyJob) -> Checked:
    """Ray task: check all bytes of a shard. Damage is returned as findings, not raised.

    Raises UserError when this node cannot access the folder, StorageError when the object store cannot be reached.
    """
    folder = to_path(job.folder)
    if isinstance(folder, Path) and not folder.exists():
        raise UserError(f"A worker cannot access {folder}: it must be on storage shared by all nodes.")
    found = Checked(job.shard)
    try:
        with fetched(locate(folder, job.shard.name)) as file:
            found.bytes = os.fstat(file.fileno()).st_size
            is_intact = _check_bytes(file, found)
            _check_rows(file, job, _check_structure(file, is_intact, found), is_intact, found)
    except FileNotFoundError:
        found.add("missing", "no such file")
        for number, key in enumerate(job.rows["key"] if job.rows else ()):
            found.add("lost", "the tar is not there", job.first_row + number, key)
    return found


def _check_bytes(file: BinaryIO, found: Checked) -> bool:
    """Whether size and sha256 of the tar are those of the manifest."""
    shard = found.shard
    if found.bytes != shard.bytes:
        found.add("size", f"{counted(found.bytes, 'byte')}, not {shard.bytes:,}")
        return False
    try:
        is_same = hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256  # type: ignore[arg-type]
    except OSError as error:
        found.add("unreadable", str(error))
        return False
    if not is_same:
        found.add("checksum", f"its sha256 is not {shard.sha256[:16]}...")
    return is_same


def _check_structure(file: BinaryIO, is_intact: bool, found: Checked) -> dict[int, Member]:
    """Returns all members by data offset. After a damaged header, continues at the next valid one."""
    members: dict[int, Member] = {}
    names, position, size = set(), 0, found.bytes
    while position < size or not size:
        try:
            for member in tar_members(file, position, size):
                position = member.offset + -(-member.size // _BLOCK) * _BLOCK
                if member.is_folder:
                    continue
                # An unchanged tar was indexed with these names: it is not damaged.
                if member.name in names and not is_intact:
                    found.add("duplicate", f"{member.name} is in the tar twice")
                if member.fault and member.is_file and not is_intact:
                    found.add("structure", f"{member.name}: {member.fault}")
                names.add(member.name)
                members[member.offset] = member
            # A header overwritten with zeros looks like the end mark.
            follows = _next_header(file, position, size)
            if follows < size:
                found.add("structure", f"an end mark at byte {position:,}, but a member at byte {follows:,}")
            position = follows
        except (tarfile.TarError, ValueError) as error:
            found.add("structure", str(error))
            position = _next_header(file, position + _BLOCK, size)
        except OSError as error:
            found.add("unreadable", str(error))
            break
        if not size:
            break
    return members


def _next_header(file: BinaryIO, position: int, end: int) -> int:
    """Offset of the next header with a valid checksum; `end` if there is none."""
    while position < end:
        file.seek(position)
        chunk = file.read(_CHUNK)
        for start in range(0, len(chunk), _BLOCK):
            if chunk[start + 257 : start + 262] == b"ustar":
                try:
                    tarfile.TarInfo.frombuf(chunk[start : start + _BLOCK], "utf-8", "surrogateescape")
                except tarfile.HeaderError:
                    continue
                return position + start
        position += _CHUNK
    return end


def _check_rows(file: BinaryIO, job: VerifyJob, members: dict[int, Member], is_intact: bool, found: Checked) -> None:
    """Check every row against the tar."""
    if job.rows is None:
        return
    in_tar = _samples(file, members, found)
    # A label that cannot be read does not exclude its image.
    is_intact = is_intact and all(kind != "unreadable" for kind, *_ in found.findings)
    names = ("key", "offset", "size", "labels", "ext", "width", "height", "xxh128")
    columns = [job.rows[name] for name in names]
    for number, (key, offset, length, of_row, *properties, digest) in enumerate(zip(*columns, strict=True)):
        row = job.first_row + number
        if wrong := [label for label in of_row if not 0 <= label < job.num_classes]:
            found.add("label range", f"label {wrong[0]} of {counted(job.num_classes, 'class')}", row, key)
        sample = in_tar.get(offset) if job.num_classes else None
        if sample and ((sample.fault and not sample.is_unlabelled) or sample.labels != sorted(of_row)):
            # In a damaged tar, the tar's label is wrong; training uses the manifest's.
            there = sample.fault or sample.labels
            found.add("label", f"{there} in the tar, {of_row} in the manifest", row, key, is_unfit=is_intact)
        if not 0 <= offset <= offset + length <= found.bytes:
            found.add("lost", f"bytes {offset:,} to {offset + length:,} of a tar of {found.bytes:,}", row, key)
            continue
        try:
            data = os.pread(file.fileno(), length, offset)
        except OSError as error:
            found.add("lost", str(error), row, key)
            continue
        if content_hash(data) != digest:
            found.add("content", "its xxh128 is not the manifest's", row, key)
            continue
        name, _, _, num_bytes, *_ = members.get(offset, Member("", False, offset, -1))
        if split_name(name)[0] != key or num_bytes != length:
            there = f"{name} of {counted(num_bytes, 'byte')}" if name else "no member"
            found.add("member", f"{there} at byte {offset:,}, where {counted(length, 'byte')} should be", row, key)
        if job.decode is None or key in job.decode:
            found.decoded += 1
            try:
                header = inspect(data, decode_all=True, pixels=job.pixels)
                found.left_out.update(left_out(header, job.pixels))
            except DecodeError as error:
                found.add("undecodable", str(error), row, key)
                continue
            shown = header.ext, header.width, header.height
            if shown != tuple(properties):
                said = "{} {} x {}"
                found.add("properties", f"{said.format(*shown)}, not {said.format(*properties)}", row, key)


def _samples(file: BinaryIO, members: dict[int, Member], found: Checked) -> dict[int, TarSample]:
    """The samples with a label in the tar, by image offset."""

    def read(offset: int, length: int) -> bytes:
        try:
            return os.pread(file.fileno(), length, offset)
        except OSError as error:
            found.add("unreadable", str(error))
            return b""

    samples = samples_of(members.values(), read)
    return {sample.offset: sample for sample in samples if sample.fault != NO_LABEL}
