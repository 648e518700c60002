"""Verifies a data set: writes a report, a table of findings, and the list of samples to exclude from training.

Reads the tables of the manifest directly, because `Dataset.split` raises for the damage that is to be reported.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_tools.check.verify_shard import SAMPLE_KINDS, TAR_KINDS, VerifyJob, check_shard, findings_table
from data_tools.tasks import tasks_on_cluster
from pipeline.base.files import as_csv
from pipeline.base.locks import only_writer
from pipeline.base.words import counted, si
from pipeline.cluster import ray_tasks
from pipeline.data.dataset import exclusion, manifest, mapped_index
from pipeline.data.dataset.manifest import CHUNKS_FILE, INFO, ROWS, SAMPLES_FILE, Dataset, Shard, open_dataset
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet
from pipeline.process.outputs import try_output
from pipeline.settings.commands.data import VerifyConfig

LIST = "damaged"
REPORT, DETAILS = "report.json", "damage.csv"
_BATCH = 2**16


def run(config: VerifyConfig) -> dict[str, Any]:
    """Check the data set config.data. Returns the content of report.json; "is_whole" is the overall result.

    Raises UserError when there is no list of shards to check.
    """
    dataset = open_dataset(ray_tasks.shared_path("data", config.data))
    out = ray_tasks.shared_path("out", config.out) if config.out else dataset.path / "verify"
    if isinstance(out, Path):
        try_output("out", out)  # The data set may be read-only.
    with only_writer(out), ExitStack() as stack:
        # Checks with other folders write the same list.
        with suppress(OSError):  # The list of a read-only data set is not written.
            stack.enter_context(only_writer(dataset.path / exclusion.FOLDER))
        shards = dataset.shards(verify=False)
        details, samples, damaged_indexes = _check_manifest(dataset, shards)
        findings = [findings_table([("manifest", "", "", -1, "", detail, False) for detail in details])]
        num_bytes = 0
        jobs = _jobs(dataset, shards, samples)
        shown = sum(shard.samples for shard in shards), len(shards), out, "verified"
        with tasks_on_cluster(check_shard, jobs, config.num_tasks, *shown) as (tasks, progress):
            for number, checked in tasks:
                findings.append(findings_table(checked.findings))
                num_bytes += checked.bytes
                progress.add(shards[number].samples, checked.bytes)
        found = pa.concat_tables(findings).sort_by([("shard", "ascending"), ("row", "ascending")])

        report = {
            "data": str(dataset.path),
            "fingerprint": dataset.fingerprint,
            "is_whole": not len(found),
            "shards": len(shards),
            "samples": shown[0],
            "bytes": num_bytes,
            **_summary(found),
        }
        # The report comes last: with it, damage.csv and the list are of the same check.
        (out / REPORT).unlink(missing_ok=True)
        # Without rows the unfit samples are unknown: an older list is kept.
        listed = _write_list(dataset, found) if samples else None
        lines = [as_csv(zip(*batch.to_pydict().values(), strict=True)) for batch in found.to_batches(_BATCH)]
        details_csv = b"".join([as_csv([found.column_names]), *lines]) if len(found) else None
        content = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        write_files(out, {DETAILS: details_csv, REPORT: content}, mark=REPORT)
        for folder in damaged_indexes:  # After a kill before this, the next check finds them again.
            shutil.rmtree(folder, ignore_errors=True)
        _print_report(dataset, report, out, listed)
        return report


def _check_manifest(dataset: Dataset, shards: list[Shard]) -> tuple[list[str], pq.ParquetFile | None, list[Path]]:
    """Returns what is wrong with the manifest, its samples (None if they are not the file that was written), and the
    folders of damaged memory-mapped indexes, which training makes again when they are removed.
    """
    wrong_tables = dataset.damaged_tables()
    details = [f"{name} is missing, or not the file that {INFO} was written with" for name in wrong_tables]
    is_whole = not {SAMPLES_FILE, CHUNKS_FILE}.intersection(wrong_tables)
    found = manifest.fingerprint(shards, dataset.classes, dataset.pixels)
    if found != dataset.fingerprint:
        details.append(f"shards and classes have fingerprint {found}, not that of {INFO}")
    damaged = []
    for split in dataset.splits if is_whole else ():
        for index in dataset.index_folders(split):
            try:
                is_damaged = index.exists() and not mapped_index.is_intact(index)
            except OSError:
                is_damaged = True
            if is_damaged:
                details.append(f"{index} is damaged; it was removed, and is made again when it is needed")
                damaged.append(index)
    return details, open_parquet(dataset.path / SAMPLES_FILE) if is_whole else None, damaged


def _jobs(dataset: Dataset, shards: list[Shard], samples: pq.ParquetFile | None) -> Iterator[VerifyJob]:
    batches = samples.iter_batches(_BATCH, columns=ROWS.names) if samples else iter(())
    waiting = ROWS.empty_table()
    first_row, split, rows = 0, None, None
    for shard in shards:
        first_row, split = (first_row if shard.split == split else 0), shard.split
        if samples:
            while len(waiting) < shard.samples:
                batch = pa.Table.from_batches([next(batches)])
                waiting = pa.concat_tables([waiting, batch.select(ROWS.names).cast(ROWS)])
            rows, waiting = waiting.slice(0, shard.samples).to_pydict(), waiting.slice(shard.samples)
        yield VerifyJob(str(dataset.path), shard, rows, first_row, dataset.num_classes)
        first_row += shard.samples


def _summary(found: pa.Table) -> dict[str, Any]:
    """Counts of findings, with the first of each kind."""
    unfit = found.filter(found["is_unfit"])
    kinds = {}
    for kind in [*TAR_KINDS, *SAMPLE_KINDS]:
        of_kind = found.filter(pc.equal(found["kind"], kind))
        if len(of_kind):
            first = " ".join(of_kind[name][0].as_py() for name in ("shard", "key", "detail")).strip()
            kinds[kind] = {"count": len(of_kind), "shards": _num_shards(of_kind), "first": first}
    return {
        "damaged_shards": _num_shards(found),
        "unfit_samples": len(unfit.group_by(["split", "row"]).aggregate([])),
        "kinds": kinds,
    }


def _num_shards(found: pa.Table) -> int:
    return len({*found["shard"].unique().to_pylist()} - {""})  # "" is the manifest.


def _write_list(dataset: Dataset, found: pa.Table) -> AnyPath | None:
    """Write the list of unfit samples. Returns None if there are none and no older list to replace, and if it cannot be
    written.
    """
    unfit = found.filter(found["is_unfit"])
    path = dataset.path / exclusion.FOLDER / f"{LIST}.parquet"
    if not len(unfit) and not path.exists():
        return None
    reasons = pc.binary_join_element_wise(unfit["kind"], unfit["detail"], ": ")
    try:
        exclusion.write_list(dataset, LIST, unfit.append_column("reason", reasons))
    except OSError as error:  # The data set may be read-only; the report has its own folder.
        print(
            f"note: {path} cannot be written ({error.strerror or error}): training excludes what it did before",
            file=sys.stderr,
        )
        return None
    return path


def _print_report(dataset: Dataset, report: dict[str, Any], out: AnyPath, listed: AnyPath | None) -> None:
    read = (
        f"read {counted(report['shards'], 'shard')}, {counted(report['samples'], 'image')}, {si(report['bytes'], 'B')}"
    )
    if report["is_whole"]:
        print(f"{dataset.path}: intact. {read}; fingerprint {dataset.fingerprint}")
        return
    print(f"{dataset.path}: DAMAGED. {read}.")
    for kind, of_kind in report["kinds"].items():
        print(f"  {kind}, {of_kind['count']:,}: {(SAMPLE_KINDS | TAR_KINDS)[kind]}, such as {of_kind['first']}")
    print(f"All of them: {out / DETAILS}")
    if listed:
        print(
            f"{report['unfit_samples']:,} of {counted(report['samples'], 'image')} are unfit, and listed in {listed}."
        )
    remedy = (
        "Copy it again, or run the same launch/shard.py again: it makes damaged shards again, and leaves intact ones as"
        " they are. Then verify once more."
    )
    if dataset.info["source"].get("indexed"):
        remedy = "Copy the tars again from where they came, and verify once more."
    print(remedy + " Or train without the listed images." * bool(listed and report["unfit_samples"]))
