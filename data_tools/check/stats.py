"""Statistics of a data set from its manifest: counts, sizes, formats; optionally a contact sheet."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.check.contact_sheet import draw_sheet
from data_tools.check.count import SplitCounts, count
from data_tools.check.histograms import draw_histograms
from data_tools.sharding.copies import copy_notes, exact_copies
from data_tools.sharding.values import measure_values
from pipeline.base.errors import UserError
from pipeline.base.files import as_csv
from pipeline.base.words import counted, of_classes, si
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.images.stored import describe_left_out
from pipeline.data.storage.atomic import write_files
from pipeline.data.storage.bucket import AnyPath, BucketPath
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.tracking import send_report
from pipeline.process.outputs import hold, try_output
from pipeline.settings.commands.data import StatsConfig
from pipeline.settings.schema import flatten

STATS, CLASSES = "stats.json", "classes.csv"
HISTOGRAMS, SHEET = "histograms.png", "contact_sheet.png"
_QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


def run(config: StatsConfig) -> dict[str, Any]:
    """Write the report and figures into the folder, print a table, and send both to MLflow if it is set. Returns the
    content of stats.json.
    """
    dataset = open_dataset(ray_tasks.shared_path("data", config.data))
    out = ray_tasks.shared_path("out", config.out) if config.out else dataset.path / "stats"
    if config.mlflow and isinstance(out, BucketPath):
        raise UserError(
            f"mlflow=... keeps its record beside the report, but that is in a bucket ({out}). Add out=FOLDER."
        )
    if config.values:
        dataset = measure_values(dataset, config)
    if isinstance(out, Path):
        try_output("out", out)
        hold(out)
    counts = count(dataset)
    copies = exact_copies(dataset, "all")
    splits = {
        split: {
            **_summary(of_split),
            "exact_copies": asdict(copies[split]),
            "shards": dataset.info["shards"][split],
        }
        for split, of_split in counts.items()
    }
    stats: dict[str, Any] = {
        "name": dataset.path.name,
        "data": str(dataset.path),
        "fingerprint": dataset.fingerprint,
        "num_classes": dataset.num_classes,
        "pixels": dataset.pixels.to_dict(),
        "left_out": dataset.left_out,
        "splits": splits,
    }
    class_counts = np.sum([of_split.classes for of_split in counts.values()], axis=0)
    sheet = draw_sheet(dataset, config.sheet, class_counts) if config.sheet else None
    of_splits = [of_split.classes.tolist() for of_split in counts.values()]
    contents = {
        STATS: (json.dumps(stats, indent=1, ensure_ascii=False) + "\n").encode(),
        CLASSES: as_csv([("class", *counts), *zip(dataset.classes, *of_splits, strict=True)]),
        HISTOGRAMS: draw_histograms(dataset, counts),
        SHEET: sheet,
    }
    write_files(out, contents, mark=STATS)
    _print_report(stats, out)
    for note in (*describe_left_out(dataset.left_out), *copy_notes(dataset, copies)):
        print(note)
    if config.mlflow:
        assert isinstance(out, Path), "refused above"
        _send(config, stats, out, [name for name, content in contents.items() if content is not None])
    return stats


def _send(config: StatsConfig, stats: dict[str, Any], out: Path, names: Sequence[str]) -> None:
    """Send the numbers and these files of the report to MLflow."""
    name, digest = stats["name"], stats["fingerprint"]
    tags = {"data": digest, "data_fingerprint": digest, "dataset": name}
    datasets = tuple(
        DatasetFacts(name, stats["data"], digest, split, of["samples"], stats["num_classes"], "statistics")
        for split, of in stats["splits"].items()
    )
    facts = RunFacts(f"stats {name}", "data", tags=tags, datasets=datasets)
    send_report(config.mlflow, out, facts, metrics(stats), [out / name for name in names], config.experiment)


def _summary(counts: SplitCounts) -> dict[str, Any]:
    return {
        "samples": len(counts.size),
        "bytes": int(counts.size.sum()),
        "images_of_a_class": {"none": int((counts.classes == 0).sum()), **_quantiles(counts.classes)},
        "labels_per_sample": {str(n): int(c) for n, c in enumerate(counts.labels) if c},
        "short_side": _quantiles(counts.short),
        "aspect_ratio": _quantiles(counts.aspect),
        "bytes_per_image": _quantiles(counts.size),
        "formats": dict(counts.formats.most_common()),
        "targets": {
            name: {"missing": int(np.isnan(of).sum()), **_quantiles(of[np.isfinite(of)])}
            for name, of in counts.targets.items()
        },
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    """Minimum, 5 %, median, 95 % and maximum; nothing of no values."""
    if not len(values):
        return {}
    found = np.quantile(values, list(_QUANTILES.values()), method="inverted_cdf")
    return {name: float(f"{value:.6g}") for name, value in zip(_QUANTILES, found, strict=True)}


def metrics(stats: dict[str, Any]) -> dict[str, float]:
    """Every number of stats.json under a dotted name for experiment trackers, such as 'train.short_side.median'."""
    numbers = {"num_classes": stats["num_classes"], **flatten(stats["splits"])}
    return {re.sub(r"[^\w.-]", "_", name): of for name, of in numbers.items() if isinstance(of, (int, float))}


def _print_report(stats: dict[str, Any], out: AnyPath) -> None:
    print(f"{stats['data']}: {of_classes(stats['num_classes'])}, fingerprint {stats['fingerprint']}")
    pixels = stats["pixels"]
    ranges = zip(pixels["channels"], pixels["low"], pixels["high"], strict=False)
    print(f"  values of {pixels['type']}: " + ", ".join(f"{name} {low:g} to {high:g}" for name, low, high in ranges))
    for name, of in stats["splits"].items():
        images, shards = counted(of["samples"], "image"), counted(of["shards"], "shard")
        print(f"  {name}: {images} in {shards}, {si(of['bytes'], 'B')}")
        for part, facts in (*of.items(), *of["targets"].items()):
            if isinstance(facts, dict) and part not in ("targets", "exact_copies"):
                shown = ", ".join(f"{fact} {value:,.6g}" for fact, value in facts.items())
                print(f"    {part.replace('_', ' ')}: {shown}")
    print(f"{out / STATS}, and tables and pictures beside it")
