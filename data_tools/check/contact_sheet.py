"""A contact sheet: samples of a data set with their classes, decoded from the shards."""

import numpy as np
import pyarrow as pa

from data_tools.sources.reader import read_thumbnail
from pipeline.base import random_numbers
from pipeline.base.gallery import DPI, MAX_IMAGES, Tile, gallery, lines_of
from pipeline.base.page import png
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import printable
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset
from pipeline.data.storage.parquet import open_parquet

_SIDE = 180  # Side of a tile, in pixels.
_SEED = 0  # Every sheet of a data set shows the same samples.
_GREY = np.full((_SIDE, _SIDE, 3), 225, np.uint8)


def draw_sheet(dataset: Dataset, num_images: int, class_counts: np.ndarray) -> bytes:
    """A PNG of num_images samples, from the largest class to the smallest, with class names and sizes.

    class_counts: (K,) int64, images of each class; without any, the samples are chosen from all. An unreadable image is
    a grey tile with that word.
    """
    there = np.flatnonzero(class_counts)
    by_size = there[np.argsort(-class_counts[there], kind="stable")]
    num_classes = min(len(by_size), num_images)
    classes = by_size[np.linspace(0, len(by_size) - 1, num_classes).round().astype(int)]
    shards, tiles = dataset.shards(), []
    for sample in _choose(dataset, classes, num_images // max(num_classes, 1)):
        name, about = sample["key"], f"{sample['width']}×{sample['height']}"
        if len(classes):
            name = dataset.class_names[sample["class"]]
        tar = str(dataset.shard_path(shards[sample["shard"]].name))
        if (pixels := read_thumbnail(tar, sample["offset"], sample["size"], _SIDE, dataset.pixels)) is None:
            pixels, about = _GREY, "unreadable"
        tiles.append(Tile(pixels, [printable(name), about]))
    sheet = gallery(lines_of(tiles, MAX_IMAGES), printable(dataset.path.name))
    return png(sheet, DPI, dataset.pixels.describe_shown())


def _choose(dataset: Dataset, classes: np.ndarray, per_class: int) -> list[dict]:
    """Up to per_class rows of samples.parquet for each class, chosen by a hash of the row number; without classes, of
    all.
    """
    columns = ["offset", "size", "labels", "shard", "width", "height", "key"]
    table = open_parquet(dataset.path / SAMPLES_FILE).read(columns=columns)
    rows, first = np.arange(len(table)), np.zeros(len(table), np.int64)
    if len(classes):
        labels = table["labels"].combine_chunks()
        starts = labels.offsets.to_numpy()
        rows = np.flatnonzero(np.diff(starts))
        first = labels.values.to_numpy()[starts[rows]]  # For a sample with several labels, the first counts.
    order = np.argsort(random_numbers.bits(_SEED, Purpose.SHEET_SAMPLES, rows), kind="stable")
    of_classes = (np.flatnonzero(first[order] == number)[:per_class] for number in (classes if len(classes) else [0]))
    order = order[np.concatenate(list(of_classes))]
    return table.take(pa.array(rows[order])).append_column("class", pa.array(first[order])).to_pylist()
