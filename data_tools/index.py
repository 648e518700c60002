"""A manifest for webdataset shards that are there already: every tar is read once, nothing is copied or changed.

The manifest is that of any data set, and names the tars where they lie. Each tar's rows are found by one Ray task and kept
as a part file, so a killed job goes on where it was.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools import cluster
from data_tools.progress import Progress, duration
from data_tools.shard import SKIPPED, resolve, write_table
from data_tools.sources.class_numbers import ClassNumbers
from data_tools.sources.split_files import split_files
from data_tools.sources.webdataset import known_class_names, whole_samples
from data_tools.write_shard import PARTS, Done
from pipeline.data.bucket import local_path
from pipeline.data.decode import inspect
from pipeline.data.manifest import (
    INFO,
    ROWS,
    SAMPLES_FILE,
    SHARDS_FILE,
    Dataset,
    Shard,
    open_dataset,
    replacing,
    write_dataset,
)
from pipeline.data_config import IndexConfig
from pipeline.errors import UserError

_READ_BYTES = 2**22


@dataclass(frozen=True)
class IndexJob:
    """A tar to be read. name: its path relative to the data set's folder. part: the file that keeps what was found.

    num_classes: labels must be below it; 0 is unknown.
    """

    path: str
    name: str
    split: str
    part: str
    whole: bool
    num_classes: int


def run(config: IndexConfig) -> Dataset:
    """Make, finish or verify the manifest of config.source's tars in config.out. Raises UserError."""
    started = time.monotonic()
    source = local_path(resolve("source", config.source), "launch/index.py")
    out = (
        local_path(resolve("out", config.out), "launch/index.py")
        if config.out
        else source
        if source.is_dir()
        else source.parent
    )
    files = split_files(source, config.splits, ".tar")
    finished = open_dataset(out) if (out / INFO).exists() else None
    names = known_class_names(out, config.label_names) if finished else known_class_names(source, config.label_names)
    is_new = not out.exists()
    parts = out / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    try:
        _sweep(out)
        if finished:
            # Whether the tars are still those of the manifest, only they themselves can tell.
            shutil.rmtree(parts)
            parts.mkdir()
        jobs = [
            IndexJob(
                path=str(path),
                name=os.path.relpath(str(path), out),
                split=split,
                part=str(parts / f"{number:06d}.parquet"),
                whole=config.inspect == "decode",
                num_classes=len(names),
            )
            for number, (split, _, path) in enumerate(files)
        ]
        results = _run_jobs(jobs, config)
        if finished:
            _refuse_others(finished, results)
            dataset = finished
        else:
            dataset = _finish(out, jobs, results, names, source)
        shutil.rmtree(parts)
    finally:
        with contextlib.suppress(OSError):
            parts.rmdir()
            if is_new:
                out.rmdir()
    _say_done(dataset, results, time.monotonic() - started, verified=finished is not None)
    return dataset


def index_tar(job: IndexJob) -> Done:
    """Read a tar and write its part file, unless that is there and of this very tar. Raises UserError for a damaged tar."""
    path, part = Path(job.path), Path(job.part)
    try:
        state = path.stat()
    except FileNotFoundError:
        raise UserError(f"A worker does not see {path}: the tars must be on storage that all nodes share.") from None
    seen = {"job": asdict(job), "bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
    if part.exists() and (found := _read_part(part, seen)):
        return found
    cv2.setNumThreads(1)
    columns, skipped = _scan(job, path)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    shard = Shard(job.name, job.split, len(columns["key"]), state.st_size, sha256)
    about = json.dumps({"seen": seen, "shard": asdict(shard), "skipped": skipped})
    with replacing(part) as file:
        table = pa.Table.from_pydict(columns, ROWS)
        pq.write_table(table.replace_schema_metadata({"part": about}), file)
    return Done(shard, skipped, made=True)


def _scan(job: IndexJob, path: Path) -> tuple[dict[str, list[Any]], list[tuple[str, str, str]]]:
    columns: dict[str, list[Any]] = {name: [] for name in ROWS.names}
    skipped = []
    numbers = ClassNumbers([str(number) for number in range(job.num_classes)])
    with open(path, "rb") as headers, open(path, "rb") as images:
        for sample in whole_samples(headers, path):
            images.seek(sample.offset)
            data = images.read(sample.size)
            try:
                if sample.fault:
                    raise ValueError(sample.fault)
                ext, width, height = inspect(data, job.whole)
            except ValueError as error:
                skipped.append((sample.key, f"{job.name}: {sample.name}", str(error)))
                continue
            for label in sample.labels:
                numbers.name(label, f"{path}: {sample.name}")
            row = {
                "key": sample.key,
                "offset": sample.offset,
                "size": sample.size,
                "ext": ext,
                "labels": sorted(set(sample.labels)),
                "width": width,
                "height": height,
                "sha256": hashlib.sha256(data).digest(),
            }
            for column, value in row.items():
                columns[column].append(value)
    return columns, skipped


def _run_jobs(jobs: list[IndexJob], config: IndexConfig) -> list[Done]:
    """Every tar's result, in order. Stops when too many samples are bad."""
    results: dict[int, Done] = {}
    num_bytes = [os.stat(job.path).st_size for job in jobs]
    num_cpus = cluster.connect(config.num_tasks)
    progress = Progress(None, done="indexed")
    tasks = cluster.run_tasks(index_tar, jobs, config.num_tasks or num_cpus, progress.retried)
    with progress, contextlib.closing(tasks):
        for number, done in tasks:
            results[number] = done
            progress.add(done.shard.samples, num_bytes[number])
    ordered = [results[number] for number in range(len(jobs))]
    skipped = [row for done in ordered for row in done.skipped]
    num_samples = sum(done.shard.samples for done in ordered) + len(skipped)
    if len(skipped) > max(1, config.max_bad_share * num_samples) * bool(config.max_bad_share):
        raise UserError(
            f"{len(skipped):,} of {num_samples:,} samples are bad, more than max_bad_share = {config.max_bad_share} "
            "allows: " + "; ".join(f"{where} ({reason})" for _, where, reason in skipped[:3])
        )
    return ordered


def _finish(out: Path, jobs: list[IndexJob], results: list[Done], names: list[str], source: Path) -> Dataset:
    kept = [(Path(job.part), done.shard) for job, done in zip(jobs, results, strict=True) if done.shard.samples]
    if not kept:
        raise UserError(f"{source}: no tar has an image with labels (<key>.jpg and <key>.cls or <key>.json).")
    highest = max(_highest_label(part) for part, _ in kept)
    classes = names or [str(number) for number in range(highest + 1)]
    write_table(out / SKIPPED, ("key", "where", "reason"), sorted(row for done in results for row in done.skipped))
    tables = (pq.read_table(part).replace_schema_metadata(None).cast(ROWS) for part, _ in kept)
    about = {"path": str(source), "indexed": True}
    return write_dataset(out, [shard for _, shard in kept], tables, classes, about, {})


def _highest_label(part: Path) -> int:
    labels = pc.list_flatten(pq.read_table(part, columns=["labels"])["labels"])
    return pc.max(labels).as_py() if len(labels) else -1


def _refuse_others(finished: Dataset, results: list[Done]) -> None:
    """A finished manifest is one of these very tars."""
    found = {done.shard.name: done.shard for done in results if done.shard.samples}
    known = {shard.name: shard for shard in finished.shards()}
    for name in sorted(found.keys() | known.keys()):
        if found.get(name) != known.get(name):
            what = "is new" if name not in known else "is gone" if name not in found else "has changed"
            raise UserError(
                f"{finished.path / name} {what} since {finished.path / INFO} was written. Put it back, or remove {INFO} and "
                "index again."
            )
    if not finished.is_whole():
        raise UserError(f"The manifest in {finished.path} is damaged. Remove {INFO}, and index again.")


def _read_part(path: Path, seen: dict[str, Any]) -> Done | None:
    """What a part file says, if it is whole and of the tar as it is now."""
    try:
        about = json.loads(pq.read_schema(path).metadata[b"part"])
    except (pa.ArrowInvalid, ValueError, KeyError, TypeError):
        return None
    if about["seen"] != seen:
        return None
    return Done(Shard(**about["shard"]), [tuple(row) for row in about["skipped"]], made=False)


def _sweep(out: Path) -> None:
    """Remove what a killed run left half-written; the folder may be the user's own, with files like these."""
    names = (INFO, SAMPLES_FILE, SHARDS_FILE, SKIPPED)
    for leftover in [path for name in names for path in out.glob(f".{name}.*.tmp")] + list(
        (out / PARTS).glob(".*.tmp")
    ):
        leftover.unlink(missing_ok=True)


def _say_done(dataset: Dataset, results: list[Done], seconds: float, verified: bool) -> None:
    if verified:
        print(f"checked {len(results)} tars: nothing to do")
    empty = sum(not done.shard.samples for done in results)
    if empty:
        print(f"left out {empty:,} tars without samples")
    samples = ", ".join(f"{split} {count:,}" for split, count in dataset.info["samples"].items())
    num_skipped = sum(len(done.skipped) for done in results)
    skipped = f"skipped {num_skipped:,} bad samples (see {SKIPPED})" if num_skipped else "skipped none"
    print(
        f"{dataset.path}: {samples} images of {dataset.num_classes:,} classes in {len(results) - empty:,} tars, {skipped}; "
        f"{duration(seconds)}; fingerprint {dataset.fingerprint}"
    )
