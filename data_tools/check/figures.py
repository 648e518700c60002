"""Pictures of a data set: a page of histograms of its statistics, and a contact sheet, samples with their classes,
decoded from the shards.
"""

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter

from data_tools.sources.reader import read_thumbnail
from pipeline.base import random_numbers
from pipeline.base.gallery import DPI, MAX_IMAGES, Tile, gallery, lines_of
from pipeline.base.page import png, style_axes
from pipeline.base.random_numbers import Purpose
from pipeline.base.words import counted, of_classes, printable
from pipeline.data.dataset.manifest import SAMPLES_FILE, Dataset
from pipeline.data.storage.parquet import open_parquet

_BINS = 60
# Quantiles shown in each histogram, so that outliers do not compress the rest.
_SHOWN = (0.001, 0.999)
IMAGES_OF_A_CLASS = "images_of_a_class"
# Of each number of an image: title and unit of its histogram, and the least that is drawn, on a logarithmic axis.
_PANELS = {
    "short_side": ("Short side", "pixels", 1),
    "aspect_ratio": ("Aspect ratio", "width / height", 0),
    "bytes_per_image": ("Size of a file", "bytes", 1),
}
_COLOURS = ("#3b6ea5", "#d98032", "#4f9a62", "#8a63a8", "#7a7a7a")
_SIDE = 180  # Side of a tile, in pixels.
_SEED = 0  # Every sheet of a data set shows the same samples.
_GREY = np.full((_SIDE, _SIDE, 3), 225, np.uint8)

Colours = dict[str, str]


def draw_histograms(dataset: Dataset, values: dict[str, dict[str, np.ndarray]]) -> bytes:
    """A PNG of panels: classes, sides, aspect ratios, bytes; a colour for each split. values: split -> images of each
    class, (K,), and the numbers of each image, (samples,), by name.
    """
    figure = Figure(figsize=(10, 8.6), dpi=100, layout="constrained")
    classes, *panels = figure.subplots(2, 2).ravel()
    colours = {split: _COLOURS[number % len(_COLOURS)] for number, split in enumerate(values)}
    total = sum(dataset.info["samples"].values())
    title = f"{printable(dataset.path.name)}: {counted(total, 'image')} {of_classes(dataset.num_classes)}"
    figure.suptitle(title, fontsize=15, parse_math=False)
    _classes(classes, values, colours)
    for axes, (name, (title, unit, least)) in zip(panels, _PANELS.items(), strict=True):
        _histogram(axes, {split: np.maximum(of[name], least) for split, of in values.items()}, colours)
        axes.set(title=title, xlabel=unit)
    handles = [classes.plot([], [], "s", color=colour, label=split)[0] for split, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return png(figure)


def _classes(axes: Axes, values: dict[str, dict[str, np.ndarray]], colours: Colours) -> None:
    style_axes(axes, "y")
    for split, of in values.items():
        ranked = np.sort(of[IMAGES_OF_A_CLASS])[::-1]
        axes.stairs(ranked, np.arange(len(ranked) + 1), color=colours[split], linewidth=2)
    axes.set_yscale("symlog", linthresh=1)  # A class may have none.
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(title="Images of a class", xlabel="classes, the largest first")


def _histogram(axes: Axes, values: dict[str, np.ndarray], colours: Colours) -> None:
    """Share of each split's images by value, on a logarithmic axis."""
    style_axes(axes, "y")
    low, high = np.log2(np.quantile(np.concatenate(list(values.values())), _SHOWN, method="inverted_cdf"))
    margin = max(0.1, (high - low) / 20)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    edges = np.logspace(low - margin, high + margin, _BINS, base=2).tolist()
    for split, of in values.items():
        shares = np.full(len(of), 1 / max(len(of), 1))
        axes.hist(of, edges, weights=shares, histtype="stepfilled", color=colours[split], alpha=0.35)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylabel("share of the split's images")


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
