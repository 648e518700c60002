"""Index existing WebDataset tars in place: nothing is copied or changed.

The manifest refers to the tars at their present location. One Ray task reads each tar and writes its rows to a part
file, so a killed job can be resumed.
"""

import contextlib
import hashlib
import os
import posixpath
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import pyarrow as pa

from data_tools.sharding.kinds import pixels_of
from data_tools.sharding.selection import describe_groups
from data_tools.sharding.shard import SKIPPED, print_summary, resolve, write_manifest
from data_tools.sharding.values import check_range, measure_values
from data_tools.sharding.write_shard import Done, as_rows, load_part, write_part
from data_tools.sources.labels import ClassNumbers
from data_tools.sources.layouts.webdataset import complete_samples, first_samples, known_class_names
from data_tools.sources.listing import reasons
from data_tools.sources.reader import lost_if_unreadable, read_at, refuse_large
from data_tools.sources.split_files import PARTS, PLAN, split_files
from data_tools.tasks import refuse_unseen, remove_leftovers, tasks_on_cluster
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.locks import only_writer
from pipeline.base.progress import duration
from pipeline.base.words import command_line, counted, printable
from pipeline.data.dataset.manifest import (
    CHUNKS_FILE,
    INFO,
    SAMPLES_FILE,
    SHARDS_FILE,
    Dataset,
    Shard,
    open_dataset,
)
from pipeline.data.dataset.split import BadBudget, group_finder
from pipeline.data.images.stored import StoredImage
from pipeline.data.loading.decode import check_end, decode, inspect, left_out, stored_image
from pipeline.data.storage.bucket import (
    AnyPath,
    BucketPath,
    fetched,
    file_size,
    make_folder,
    remove_if_empty,
    remove_tree,
    to_path,
    version,
)
from pipeline.data.storage.content import content_hash
from pipeline.process.outputs import try_output
from pipeline.settings.commands.data import IndexConfig


@dataclass(frozen=True)
class IndexJob:
    """A tar to read. name: in the manifest. part: path of its part file. whole: decode every image.

    num_classes: exclusive limit of labels; 0 is unknown. pixels: what images must be. is_labelled: whether samples need
    labels. group_pattern: of the groups, empty for none.
    """

    path: str
    name: str
    split: str
    part: str
    whole: bool
    num_classes: int
    pixels: Pixels = RGB8
    is_labelled: bool = True
    group_pattern: str = ""


def run(config: IndexConfig) -> Dataset:
    """Make the manifest of config.source's tars in config.out. Raises UserError."""
    source = resolve("source", config.source)
    out = resolve("out", config.out) if config.out else source if source.is_dir() else source.parent
    if isinstance(out, Path):
        try_output("out", out)  # The tars may be on a read-only disk.
    with only_writer(out):
        return _run(source, out, config)


def _run(source: AnyPath, out: AnyPath, config: IndexConfig) -> Dataset:
    started = time.monotonic()
    files = split_files(source, config.splits, ".tar")
    if (out / PARTS / PLAN).exists():
        raise UserError(f"{out} is a data set that launch/shard.py has not finished. Run its command again first.")
    if (out / INFO).exists() and open_dataset(out).pixels.is_measured:
        raise UserError(
            f"{out} has a manifest. To compare its tars with it: {command_line('verify', f'data={out}')} . To index"
            f" again, remove {INFO}."
        )
    names = known_class_names(source, files, config.label_names)
    is_labelled, headers = bool(names), list[tuple[str, StoredImage]]()
    for file, path, sample in first_samples([path for *_, path in files]):
        is_labelled |= sample.has_label_file
        with contextlib.suppress(ValueError):
            headers.append((f"{path.name}: {sample.name}", stored_image(read_at(file, sample.offset, sample.size))))
    pixels = pixels_of(headers, config)
    check_range(pixels, config.values)
    jobs = [
        IndexJob(
            path=str(path),
            name=_name_in_manifest(path, out),
            split=split,
            part=str(out / PARTS / f"{number:06d}.part"),
            whole=config.inspect == "decode",
            num_classes=len(names),
            pixels=pixels,
            is_labelled=is_labelled,
            group_pattern=config.group_pattern,
        )
        for number, (split, _, path) in enumerate(files)
    ]
    remove_leftovers(out / PARTS)
    # Exactly these: the folder may have other files.
    for name in (INFO, SAMPLES_FILE, CHUNKS_FILE, SHARDS_FILE, SKIPPED):
        remove_leftovers(out, pattern=f".{name}.*.tmp")
    make_folder(out / PARTS)
    try:
        results = _run_jobs(jobs, out, config)
        dataset = write_manifest(
            out,
            {to_path(job.part): done for job, done in zip(jobs, results, strict=True)},
            [],
            classes=names or [str(number) for number in range(max(done.num_classes for done in results))],
            source={"path": str(source), "indexed": True},
            settings={"group_pattern": config.group_pattern} if config.group_pattern else {},
            pixels=pixels,
        )
        of_splits = {split: dataset.table(split).groups() for split in dataset.splits if config.group_pattern}
        for line in describe_groups(of_splits):
            print(line)
        if not dataset.pixels.is_measured or config.values:
            dataset = measure_values(dataset, config, config.max_bad_share)
        remove_tree(out / PARTS)
    finally:
        remove_if_empty(out / PARTS)  # Only if no tar was finished.
    if empty := sum(not done.shard.samples for done in results):
        print(f"left out {counted(empty, 'tar')} without samples")
    print_summary(dataset, results, duration(time.monotonic() - started), [])
    return dataset


def _name_in_manifest(tar: AnyPath, out: AnyPath) -> str:
    """The path relative to the data set's folder, so that both can be moved together; a URL for a tar in another
    bucket.
    """
    if isinstance(tar, Path) and isinstance(out, Path):
        return os.path.relpath(tar, out)
    if isinstance(tar, Path):
        raise UserError(
            f"out = {out} is in an object store, but {tar} is not: readers of the manifest there could not find it."
        )
    if isinstance(out, BucketPath) and replace(tar, key=tar.bucket) == replace(out, key=out.bucket):
        return posixpath.relpath(tar.key, out.key)
    return str(tar)


def index_tar(job: IndexJob) -> Done:
    """Ray task: read a tar and write its part file, unless that exists and is up to date.

    Raises UserError for a damaged tar, LostError when reading fails because of the node or its storage.
    """
    path, part = to_path(job.path), to_path(job.part)
    refuse_unseen(path)
    num_bytes = file_size(path)
    read = hashlib.sha256(f"{job} {num_bytes} {version(path)}".encode()).hexdigest()
    if (found := load_part(part, Done)) and found.read == read:
        return found
    cv2.setNumThreads(1)
    rows, skipped, unread = [], [], Counter[str]()
    numbers = ClassNumbers([str(number) for number in range(job.num_classes)])
    with lost_if_unreadable(job.path), fetched(path) as file:
        for sample in complete_samples(file, path):
            try:
                if fault := sample.fault_of(job.is_labelled):
                    raise ValueError(fault)
                refuse_large(sample.size)
                data = read_at(file, sample.offset, sample.size)
                header = inspect(data)
                if job.whole:
                    decode(data, pixels=job.pixels)
                else:
                    check_end(data, header.ext)
                unread.update(left_out(header, job.pixels))
            except ValueError as error:
                skipped.append((printable(sample.key), printable(f"{job.name}: {sample.name}"), str(error)))
                continue
            for label in sample.labels:
                numbers.name(label, f"{path}: {sample.name}")
            place = (sample.key, sample.offset, sample.size, header.ext, sample.labels)
            rows.append((*place, header.width, header.height, content_hash(data)))
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    shard = Shard(job.name, job.split, len(rows), num_bytes, sha256)
    done = Done(shard, skipped, read=read, left_out=dict(unread), num_classes=numbers.highest + 1)
    table = as_rows(rows)
    if job.group_pattern:
        groups = group_finder(job.group_pattern)(table["key"].to_pylist())
        table = table.append_column("group", pa.array(groups, pa.string()))
    write_part(part, table, done)
    return done


def _run_jobs(jobs: list[IndexJob], out: AnyPath, config: IndexConfig) -> list[Done]:
    """Returns every tar's result, in order. Raises UserError when too many samples are bad."""
    results: dict[int, Done] = {}
    with tasks_on_cluster(index_tar, jobs, config.num_tasks, None, len(jobs), out, "indexed") as (tasks, progress):
        for number, done in tasks:
            results[number] = done
            progress.add(done.shard.samples, done.shard.bytes)
    ordered = [results[number] for number in range(len(jobs))]
    skipped = [row for done in ordered for row in done.skipped]
    num_samples = sum(done.shard.samples for done in ordered) + len(skipped)
    if len(skipped) > (budget := BadBudget(config.max_bad_share).allowed(num_samples)):
        raise UserError(
            f"{len(skipped):,} of {counted(num_samples, 'sample')} are bad, more than {budget:,} (max_bad_share):"
            f" {reasons(skipped)}"
        )
    return ordered
