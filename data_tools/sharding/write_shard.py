"""The Ray task that writes one shard. Its output depends on the job alone, so it can be retried on any node."""

import hashlib
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO, TypeVar

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_tools.sharding.kinds import ShardImage, encoded, joined
from data_tools.sharding.plan import read_images
from data_tools.sharding.source_table import COMPARE
from data_tools.sources import Reader
from data_tools.sources.images import shrink
from data_tools.sources.layouts.webdataset import complete_samples
from data_tools.sources.listing import SourceImage
from data_tools.sources.split_files import PARTS
from data_tools.tasks import refuse_unseen
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import ROWS, Shard, targets_field
from pipeline.data.loading.decode import DecodeError, check_end, decode, inspect, left_out
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, file_size, state_of, to_path
from pipeline.data.storage.checksums import digest_of
from pipeline.data.storage.content import HASH_BYTES, content_hash
from pipeline.settings.commands.data import ShardConfig

# Bytes between starts of writing to disk.
_WRITEBACK = 2**23


T = TypeVar("T")


@dataclass(frozen=True)
class ShardingJob:
    """One shard to write. images: in tar order. config: how images are stored and checked. convert:
    see `Listing`.
    pixels: what images must be.

    known: the shard's row in the manifest of a finished data set, if there is one. has_labels: whether each image is
    followed by its labels. targets: names of the numbers to predict.
    """

    source: str
    out: str
    name: str
    split: str
    images: list[SourceImage]
    config: ShardConfig
    known: Shard | None
    convert: Callable[[bytes], bytes] | None = None
    has_labels: bool = True
    pixels: Pixels = RGB8
    targets: Sequence[str] = ()


@dataclass(frozen=True)
class Done:
    """The result of a task that writes or indexes a shard. skipped: (key, where, reason) of each bad image. made: False
    for an existing shard.

    state: of the tar when it was written, see `state_of`. read: digest of what the job has read. filled: (key, where)
    of each image that a conversion could not read completely. changed: keys of images that an existing shard has
    otherwise than the source. num_classes: of an indexed tar, 1 + its largest label. All but
    `made` and `changed` is the metadata of its part file.
    """

    shard: Shard
    skipped: list[tuple[str, str, str]]
    made: bool = False
    state: str = ""
    read: str = ""
    filled: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    num_classes: int = 0


def write_planned(planned: tuple[ShardingJob, int, AnyPath]) -> Done:
    """Ray task: `write_shard` of (a job, the number of its shard in the plan, which has its images, and the root, see
    `Listing`).
    """
    job, number, root = planned
    return write_shard(replace(job, images=read_images(to_path(job.out), number, root)))


def write_shard(job: ShardingJob) -> Done:
    """Write a shard and its part file (its rows of the manifest), unless both exist and are complete.

    A shard of an unfinished data set is rewritten if one of its skipped images can be read now, or if one whose mtime
    is COMPARE has other bytes than in the shard. Raises UserError when this node cannot access the folders, LostError
    when reading fails because of the node or its storage, OSError when it cannot write.
    """
    out, source = to_path(job.out), to_path(job.source)
    refuse_unseen(out)
    refuse_unseen(source)
    part = part_path(out, job.name)
    cv2.setNumThreads(1)
    to_compare = {image.key for image in job.images if image.mtime == COMPARE}
    if job.known and _is_complete(out, job.known):
        return Done(job.known, [], changed=_changed(job, to_compare))
    changed: list[str] = []
    known = [(image.key, image.labels, image.targets, image.group) for image in job.images]
    read = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    if (
        (found := load_part(part, Done))
        and found.read == read
        and (found.shard.name, found.shard.split) == (job.name, job.split)
        and _is_complete(out, found.shard, found.state)
    ):
        changed = _changed(job, to_compare)
        if not changed and not _changed(job, {key for key, *_ in found.skipped}):
            return found

    with replacing(out / job.name) as file:
        table, done = _write_samples(_Tar(file), job)
    done = replace(done, state=state_of(out / job.name), read=read)
    write_part(part, table, done)
    return replace(done, made=True, changed=changed)


def part_path(out: AnyPath, shard_name: str) -> AnyPath:
    """Path of a shard's part file: its rows (schema ROWS), with its Shard and skipped images in the metadata."""
    return out / PARTS / shard_name.replace(".tar", ".part")


def write_part(path: AnyPath, table: pa.Table, about: Any) -> None:
    """Write a part file: a checksum, and Parquet of rows with a dataclass as metadata. A restarted job reads it."""
    content = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({b"part": json.dumps(asdict(about)).encode()}), content)
    with replacing(path) as file:
        file.write(content_hash(content.getvalue()) + content.getvalue())


def load_part(path: AnyPath, kind: type[T]) -> T | None:
    """The metadata of a part file as `kind`; None if the file is missing or damaged."""
    data = path.read_bytes() if path.exists() else b""
    if content_hash(data[HASH_BYTES:]) != data[:HASH_BYTES]:
        return None
    return json_record.parse(_rows(data).schema.metadata[b"part"], kind, str(path))


def read_rows(path: AnyPath) -> pa.Table:
    """The rows of a part file."""
    return _rows(path.read_bytes()).replace_schema_metadata(None)


def _rows(part: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(part[HASH_BYTES:]))


class _Tar:
    """Writes a tar as `tarfile` does, without times and users, and computes its sha256. size: bytes so far."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()
        self._started = 0

    def add(self, name: str, data: bytes) -> int:
        """Append a file. Returns the offset of its bytes."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644
        self._write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        begin = self.size
        self._write(data)
        self._write(bytes(-len(data) % tarfile.BLOCKSIZE))
        if self.size - self._started >= _WRITEBACK:
            # Start writing to disk, or the final fsync waits for the whole shard.
            self.file.flush()
            os.posix_fadvise(self.file.fileno(), self._started, self.size - self._started, os.POSIX_FADV_DONTNEED)
            self._started = self.size
        return begin

    def finish(self) -> None:
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._write(bytes(-self.size % tarfile.RECORDSIZE))

    def _write(self, part: bytes) -> None:
        self.file.write(part)
        self.sha256.update(part)
        self.size += len(part)


def _write_samples(tar: _Tar, job: ShardingJob) -> tuple[pa.Table, Done]:
    rows: list[tuple[Any, ...]] = []
    kept: list[SourceImage] = []
    skipped, filled, unread = [], [], Counter[str]()
    with Reader() as reader:
        for source in job.images:
            key, labels, name, *_ = source
            image = _read_image(reader, source, job)
            if isinstance(image, str):
                skipped.append((key, name, image))
                continue
            if image.is_filled:
                filled.append((key, name))
            unread.update(image.left_out)
            begin = tar.add(f"{key}.{image.ext}", image.data)
            about: dict[str, Any] = {}
            if job.has_labels and len(labels) == 1:
                tar.add(f"{key}.cls", str(labels[0]).encode())
            elif job.has_labels:
                about["labels"] = labels
            if job.targets:
                # The shortest text of each float32.
                numbers = [None if value is None else float(str(np.float32(value))) for value in source.targets]
                about["targets"] = dict(zip(job.targets, numbers, strict=True))
            if about:
                tar.add(f"{key}.json", json.dumps(about).encode())
            place = (key, begin, len(image.data), image.ext, labels)
            rows.append((*place, image.width, image.height, content_hash(image.data)))
            kept.append(source)
    tar.finish()
    shard = Shard(job.name, job.split, len(rows), tar.size, tar.sha256.hexdigest())
    table = as_rows(rows)
    if kept and kept[0].group:
        table = table.append_column("group", pa.array([image.group for image in kept], pa.string()))
    if job.targets:
        values = np.array([image.targets for image in kept], np.float32)  # None is NaN, which becomes null.
        flat = pa.array(values.ravel(), pa.float32(), from_pandas=True)
        targets = pa.FixedSizeListArray.from_arrays(flat, len(job.targets))
        table = table.append_column(targets_field(len(job.targets)), targets)
    return table, Done(shard, skipped, filled=filled, left_out=dict(unread))


def as_rows(rows: list[tuple[Any, ...]]) -> pa.Table:
    """A table (schema ROWS) of tuples in its column order."""
    return pa.Table.from_pylist([dict(zip(ROWS.names, row, strict=True)) for row in rows], ROWS)


def _changed(job: ShardingJob, keys: set[str]) -> list[str]:
    """Those of the keys whose image the existing shard has otherwise than the source: with other bytes, or only one of
    them has it.
    """
    if not keys:
        return []
    path = to_path(job.out) / job.name
    with path.open("rb") as file:
        stored = {
            sample.key: (sample.offset, sample.size) for sample in complete_samples(file, path) if sample.key in keys
        }
    # What is in the shard has been decoded before.
    header = replace(job, config=replace(job.config, inspect="header"))
    found = []
    with Reader() as reader, Reader() as of_shard:
        for source in job.images:
            if (key := source.key) in keys:
                image = _read_image(reader, source, header if key in stored else job)
                before = of_shard.read(str(path), *stored[key], packed=0) if key in stored else None
                if before != (None if isinstance(image, str) else image.data):
                    found.append(key)
    return found


def _read_image(reader: Reader, source: SourceImage, job: ShardingJob) -> ShardImage | str:
    """Returns an image for the shard, or what is wrong with it. Raises LostError."""
    config, is_filled = job.config, False
    try:
        files = [None if file is None else reader.read(*file) for file in source.files]
        if config.channel_pattern:
            image: ShardImage | None = joined(files, job.pixels, config)
        else:
            original = files[0]
            assert original is not None
            data = job.convert(original) if job.convert else original
            is_filled = data is not original and _is_spoilt_jpeg(original)
            image = encoded(data, source.page, job.pixels, config)
        if image is None:
            image = _checked(data, job)
        elif config.inspect == "decode":
            decode(image.data, pixels=job.pixels)
        return image._replace(is_filled=is_filled)
    except UserError:  # For example, the object store cannot be reached.
        raise
    except (OSError, ValueError) as error:
        return str(error)


def _checked(data: bytes, job: ShardingJob) -> ShardImage:
    """An image that is stored as it is, or as a smaller JPEG. Raises ValueError for a bad image."""
    config, header = job.config, inspect(data)
    unread = left_out(header, job.pixels)
    if 0 < config.resize_short < min(header.width, header.height):
        small, width, height = shrink(data, config.resize_short, config.jpeg_quality)
        return ShardImage(small, "jpg", width, height, unread)
    if config.inspect == "decode":
        decode(data, pixels=job.pixels)
    else:
        check_end(data, header.ext)
    return ShardImage(data, header.ext, header.width, header.height, unread)


def _is_spoilt_jpeg(data: bytes) -> bool:
    """Whether pixels of a JPEG are missing. OpenCV, which converts some, only prints a warning and leaves grey
    there.
    """
    try:
        if data.startswith(b"\xff\xd8"):
            decode(data)
    except DecodeError:
        return True
    return False


def _is_complete(out: AnyPath, shard: Shard, state: str = "") -> bool:
    path = out / shard.name
    if not path.is_file() or file_size(path) != shard.bytes:
        return False
    # A tar that was not written since is not read again: its sha256 was computed when it was written. A store may give
    # its objects no version.
    return (state != "" and state_of(path) == state) or digest_of(path) == shard.sha256
