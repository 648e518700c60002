"""Draws the statistics of a data set as one page of histograms."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from data_tools.check.count import SplitCounts
from pipeline.base.page import png, style_axes
from pipeline.base.words import counted, of_classes, printable, si
from pipeline.data.dataset.manifest import Dataset

_MOST_TARGETS = 4
_BINS = 60
# Quantiles shown in each histogram, so that outliers do not compress the rest.
_SHOWN = (0.001, 0.999)
_COLOURS = ("#3b6ea5", "#d98032", "#4f9a62", "#8a63a8", "#7a7a7a")

Colours = dict[str, str]


def draw_histograms(dataset: Dataset, counts: dict[str, SplitCounts]) -> bytes:
    """A PNG of panels: classes, sides, aspect ratios, bytes, the first numbers to predict; a colour for each split."""
    targets = dataset.targets[:_MOST_TARGETS]
    num_panels = bool(dataset.classes) + 3 + len(targets)
    rows = -(-num_panels // 2)
    figure = Figure(figsize=(10, 4.3 * rows), dpi=100, layout="constrained")
    panels = list(figure.subplots(rows, 2).ravel())
    for axes in panels[num_panels:]:
        axes.set_visible(False)
    for axes in panels:
        style_axes(axes, "y")
    colours = {split: _COLOURS[number % len(_COLOURS)] for number, split in enumerate(counts)}
    total = sum(len(of.size) for of in counts.values())
    title = f"{printable(dataset.path.name)}: {counted(total, 'image')} {of_classes(dataset.num_classes)}"
    figure.suptitle(title, fontsize=15, parse_math=False)
    if dataset.classes:
        _classes(panels.pop(0), counts, colours)
    sides, aspects, sizes, *of_targets = panels
    _histogram(sides, {split: np.maximum(of.short, 1) for split, of in counts.items()}, colours)
    sides.set(title="Short side", xlabel="pixels")
    _histogram(aspects, {split: of.aspect for split, of in counts.items()}, colours)
    aspects.set(title="Aspect ratio", xlabel="width / height")
    _histogram(sizes, {split: np.maximum(of.size, 1) for split, of in counts.items()}, colours)
    sizes.set(title="Size of a file", xlabel="bytes")
    for axes, target in zip(of_targets, targets, strict=False):
        _target(axes, {split: of.targets[target] for split, of in counts.items()}, colours)
        axes.set(title=printable(target), xlabel="value")
    handles = [sides.plot([], [], "s", color=colour, label=split)[0] for split, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return png(figure)


def _classes(axes: Axes, counts: dict[str, SplitCounts], colours: Colours) -> None:
    for split, of in counts.items():
        ranked = np.sort(of.classes)[::-1]
        axes.stairs(ranked, np.arange(len(ranked) + 1), color=colours[split], linewidth=2)
    axes.set_yscale("symlog", linthresh=1)  # A class may have none.
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.set(title="Images of a class", xlabel="classes, the largest first")


def _histogram(axes: Axes, values: dict[str, np.ndarray], colours: Colours) -> None:
    """Share of each split's images by value, on a logarithmic axis."""
    low, high = np.log2(np.quantile(np.concatenate(list(values.values())), _SHOWN, method="inverted_cdf"))
    margin = max(0.1, (high - low) / 20)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    _draw(axes, values, np.logspace(low - margin, high + margin, _BINS, base=2).tolist(), colours)


def _target(axes: Axes, values: dict[str, np.ndarray], colours: Colours) -> None:
    """Share of each split's values, of those that are there."""
    there = {split: of[np.isfinite(of)] for split, of in values.items()}
    _draw(axes, there, np.histogram_bin_edges(np.concatenate(list(there.values())), 40).tolist(), colours)


def _draw(axes: Axes, values: dict[str, np.ndarray], edges: list[float], colours: Colours) -> None:
    for split, of in values.items():
        shares = np.full(len(of), 1 / max(len(of), 1))
        axes.hist(of, edges, weights=shares, histtype="stepfilled", color=colours[split], alpha=0.35)
        axes.hist(of, edges, weights=shares, histtype="step", color=colours[split], linewidth=1.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set_ylabel("share of the split's images")


def _number(value: float, _: object) -> str:
    """1,500 as 1.5k; no exponents."""
    return si(value, "").replace(" ", "")
