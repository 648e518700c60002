"""Statistics of a data set from its manifest: counts, sizes, formats; optionally a contact sheet."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from data_tools.check.figures import IMAGES_OF_A_CLASS, draw_histograms, draw_sheet
from data_tools.sharding.copies import copy_notes, exact_copies
from data_tools.sharding.values import measure_values
from pipeline.base.errors import UserError
from pipeline.base.files import as_csv
from pipeline.base.words import counted, of_classes, si
from pipeline.cluster import ray_tasks
from pipeline.data.dataset.manifest import Dataset, open_dataset
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
    copies = exact_copies(dataset, "all")
    splits, values = {}, {}
    for split in dataset.splits:
        numbers, values[split] = _count(dataset, split)
        exact = {"exact_copies": asdict(copies[split]), "shards": dataset.info["shards"][split]}
        splits[split] = numbers | exact
    stats: dict[str, Any] = {
        "name": dataset.path.name,
        "data": str(dataset.path),
        "fingerprint": dataset.fingerprint,
        "num_classes": dataset.num_classes,
        "pixels": dataset.pixels.to_dict(),
        "left_out": dataset.left_out,
        "splits": splits,
    }
    class_counts = np.array([of[IMAGES_OF_A_CLASS] for of in values.values()])
    sheet = draw_sheet(dataset, config.sheet, class_counts.sum(0)) if config.sheet else None
    contents = {
        STATS: (json.dumps(stats, indent=1, ensure_ascii=False) + "\n").encode(),
        CLASSES: as_csv([("class", *values), *zip(dataset.classes, *class_counts.tolist(), strict=True)]),
        HISTOGRAMS: draw_histograms(dataset, values),
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


def _count(dataset: Dataset, split: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(the numbers of a split for stats.json, and those of its classes and images that are drawn, by their names
    there).
    """
    rows = dataset.table(split).read_all(["labels", "width", "height", "size", "ext"])
    width, height, size = (rows[name].to_numpy() for name in ("width", "height", "size"))
    num_labels = np.bincount(pc.list_value_length(rows["labels"]).to_numpy())
    class_counts = np.bincount(pc.list_flatten(rows["labels"]).to_numpy(), minlength=dataset.num_classes)
    of_images = {
        "short_side": np.minimum(width, height),
        "aspect_ratio": np.maximum(width, 1) / np.maximum(height, 1),
        "bytes_per_image": size,
    }
    formats = {pair["values"]: pair["counts"] for pair in rows["ext"].value_counts().to_pylist()}
    targets = zip(dataset.targets, dataset.index(split).targets[:].T, strict=True)
    numbers = {
        "samples": len(rows),
        "bytes": int(size.sum()),
        IMAGES_OF_A_CLASS: {"none": int((class_counts == 0).sum()), **_quantiles(class_counts)},
        "labels_per_sample": {str(n): int(c) for n, c in enumerate(num_labels) if c},
        **{name: _quantiles(of) for name, of in of_images.items()},
        "formats": dict(Counter(formats).most_common()),
        # NaN is a missing one.
        "targets": {
            name: {"missing": int(np.isnan(of).sum()), **_quantiles(of[np.isfinite(of)])} for name, of in targets
        },
    }
    return numbers, {IMAGES_OF_A_CLASS: class_counts, **of_images}


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
