"""The Ray task that checks one shard against its rows of the manifest: the size and checksum of the tar, and every
image's checksum.

Findings about a sample (SAMPLE_KINDS: its bytes or its label cannot be trusted) exclude it from training. Findings
about the tar (TAR_KINDS) do not: its samples may be intact.
"""

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa

from data_tools.tasks import refuse_unseen
from pipeline.base.words import counted, printable
from pipeline.data.dataset.manifest import Shard
from pipeline.data.storage.bucket import fetched, locate, to_path
from pipeline.data.storage.content import content_hash

# Kinds of findings and their meaning, as printed.
SAMPLE_KINDS = {
    "lost": "the image's bytes cannot be read",
    "content": "the image's bytes are not those of the manifest",
    "label range": "a label is not a valid class number",
}
TAR_KINDS = {
    "missing": "the tar is not there",
    "size": "the tar has another size than in the manifest",
    "checksum": "the tar has other bytes than in the manifest",
    "unreadable": "reading the tar fails",
    "manifest": "the manifest's files do not fit together",
}

# shard: name of the tar, "" for a finding about the manifest. row: in its split, -1 for a finding about the whole tar.
# is_unfit: whether to exclude the sample from training.
FINDINGS = pa.schema(
    [
        ("kind", "string"),
        ("split", "string"),
        ("shard", "string"),
        ("row", "int64"),
        ("key", "string"),
        ("detail", "string"),
        ("is_unfit", "bool"),
    ]
)


@dataclass(frozen=True)
class VerifyJob:
    """One shard to check. rows: its columns of samples.parquet, None if that table cannot be read.

    first_row: of the shard in its split.
    """

    folder: str
    shard: Shard
    rows: dict[str, list[Any]] | None
    first_row: int
    num_classes: int


@dataclass
class Checked:
    """The result of a job, filled while the shard is read. findings: rows of a table with schema FINDINGS."""

    shard: Shard
    bytes: int = 0
    findings: list[tuple] = field(default_factory=list)

    def add(self, kind: str, detail: str, row: int = -1, key: str = "") -> None:
        unfit = kind in SAMPLE_KINDS
        self.findings.append((kind, self.shard.split, self.shard.name, row, key, printable(detail), unfit))


def findings_table(rows: list[tuple]) -> pa.Table:
    """A table with schema FINDINGS from tuples in its column order."""
    return pa.Table.from_pylist([dict(zip(FINDINGS.names, row, strict=True)) for row in rows], FINDINGS)


def check_shard(job: VerifyJob) -> Checked:
    """Ray task: check all bytes of a shard. Damage is returned as findings, not raised.

    Raises UserError when this node cannot access the folder, StorageError when the object store cannot be reached.
    """
    folder = to_path(job.folder)
    refuse_unseen(folder)
    found = Checked(job.shard)
    try:
        with fetched(locate(folder, job.shard.name)) as file:
            found.bytes = os.fstat(file.fileno()).st_size
            _check_bytes(file, found)
            _check_rows(file, job, found)
    except FileNotFoundError:
        found.add("missing", "no such file")
        for number, key in enumerate(job.rows["key"] if job.rows else ()):
            found.add("lost", "the tar is not there", job.first_row + number, key)
    return found


def _check_bytes(file: BinaryIO, found: Checked) -> None:
    """Compare size and sha256 of the tar with those of the manifest."""
    shard = found.shard
    if found.bytes != shard.bytes:
        found.add("size", f"{counted(found.bytes, 'byte')}, not {shard.bytes:,}")
        return
    try:
        if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:  # type: ignore[arg-type]
            found.add("checksum", f"its sha256 is not {shard.sha256[:16]}...")
    except OSError as error:
        found.add("unreadable", str(error))


def _check_rows(file: BinaryIO, job: VerifyJob, found: Checked) -> None:
    """Check the labels of every row, and the bytes of its image."""
    if job.rows is None:
        return
    columns = [job.rows[name] for name in ("key", "offset", "size", "labels", "xxh128")]
    for row, (key, offset, length, labels, digest) in enumerate(zip(*columns, strict=True), job.first_row):
        if wrong := [label for label in labels if not 0 <= label < job.num_classes]:
            found.add("label range", f"label {wrong[0]} of {counted(job.num_classes, 'class')}", row, key)
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
