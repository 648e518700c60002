"""Draws the statistics of a data set as one page of histograms."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, PercentFormatter

from data_tools.check.count import SplitCounts
from pipeline.base.page import png, style_axes
from pipeline.base.words import counted, of_classes, printable
from pipeline.data.dataset.manifest import Dataset

_BINS = 60
# Quantiles shown in each histogram, so that outliers do not compress the rest.
_SHOWN = (0.001, 0.999)
_COLOURS = ("#3b6ea5", "#d98032", "#4f9a62", "#8a63a8", "#7a7a7a")

Colours = dict[str, str]


def draw_histograms(dataset: Dataset, counts: dict[str, SplitCounts]) -> bytes:
    """A PNG of panels: classes, sides, aspect ratios, bytes; a colour for each split."""
    figure = Figure(figsize=(10, 8.6), dpi=100, layout="constrained")
    classes, *panels = figure.subplots(2, 2).ravel()
    colours = {split: _COLOURS[number % len(_COLOURS)] for number, split in enumerate(counts)}
    total = sum(len(of.size) for of in counts.values())
    title = f"{printable(dataset.path.name)}: {counted(total, 'image')} {of_classes(dataset.num_classes)}"
    figure.suptitle(title, fontsize=15, parse_math=False)
    _classes(classes, counts, colours)
    for axes, title, unit, values in zip(
        panels,
        ("Short side", "Aspect ratio", "Size of a file"),
        ("pixels", "width / height", "bytes"),
        zip(*((np.maximum(of.short, 1), of.aspect, np.maximum(of.size, 1)) for of in counts.values()), strict=True),
        strict=True,
    ):
        _histogram(axes, dict(zip(counts, values, strict=True)), colours)
        axes.set(title=title, xlabel=unit)
    handles = [classes.plot([], [], "s", color=colour, label=split)[0] for split, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return png(figure)


def _classes(axes: Axes, counts: dict[str, SplitCounts], colours: Colours) -> None:
    style_axes(axes, "y")
    for split, of in counts.items():
        ranked = np.sort(of.classes)[::-1]
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
