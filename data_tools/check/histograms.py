"""Draws the statistics of a data set as one page of histograms."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from data_tools.check.count import SplitCounts
from pipeline.base.page import png, style_axes
from pipeline.base.words import counted, of_classes, printable, shorten, si
from pipeline.data.dataset.manifest import Dataset

_MAX_NAMED = 20
_MOST_TARGETS = 4
_MAX_NAME = 18
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
        _classes(panels.pop(0), counts, dataset.class_names, colours)
    sides, aspects, sizes, *of_targets = panels
    _histogram(sides, {split: of.short for split, of in counts.items()}, colours)
    sides.set(title="Short side", xlabel="pixels")
    _histogram(aspects, {split: of.aspect for split, of in counts.items()}, colours, is_log=True)
    aspects.set(title="Aspect ratio", xlabel="width / height")
    _histogram(sizes, {split: np.maximum(of.size, 1) for split, of in counts.items()}, colours, is_log=True)
    sizes.set(title="Size of a file", xlabel="bytes")
    for axes, target in zip(of_targets, targets, strict=False):
        _target(axes, {split: of.targets[target] for split, of in counts.items()}, colours)
        axes.set(title=shorten(printable(target), 3 * _MAX_NAME), xlabel="value")
    handles = [sides.plot([], [], "s", color=colour, label=split)[0] for split, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return png(figure)


def _classes(axes: Axes, counts: dict[str, SplitCounts], names: Sequence[str], colours: Colours) -> None:
    if len(names) <= _MAX_NAMED:
        short = [shorten(printable(name), _MAX_NAME) for name in names]
        _bars(axes, {split: of.classes.tolist() for split, of in counts.items()}, short, colours)
        axes.set(title="Images of a class")
        return
    for split, of in counts.items():
        ranked = np.sort(of.classes)[::-1]
        axes.plot(np.arange(1, len(ranked) + 1), ranked, color=colours[split], linewidth=2)
    axes.set_yscale("symlog", linthresh=1)  # A class may have none.
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))
    axes.set(title="Images of a class", xlabel="classes, the largest first")


def _histogram(axes: Axes, values: dict[str, np.ndarray], colours: Colours, is_log: bool = False) -> None:
    """Share of each split's images by value, on a logarithmic axis if is_log."""
    first, last = np.quantile(np.concatenate(list(values.values())), _SHOWN, method="inverted_cdf")
    if is_log:
        low, high = np.log2(first), np.log2(last)
        margin = max(0.1, (high - low) / 20)
        edges = np.logspace(low - margin, high + margin, _BINS, base=2).tolist()
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
    else:
        # Equal numbers of values in each bin; other edges would give a comb pattern.
        step = -(-(last - first + 1) // _BINS)
        edges = (np.arange(first - 3 * step, last + 4 * step, step) - 0.5).tolist()
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    _draw(axes, values, edges, colours)


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


def _bars(axes: Axes, heights: dict[str, list[int]], names: Sequence, colours: Colours) -> None:
    width = 0.8 / max(len(heights), 1)
    for number, (split, of_split) in enumerate(heights.items()):
        places = np.arange(len(names)) - 0.4 + (number + 0.5) * width
        axes.bar(places, of_split, width, color=colours[split])
    turn = 40 if len(names) > 5 else 0
    axes.set_xticks(range(len(names)), names, rotation=turn, ha="right" if turn else "center", parse_math=False)
    if len(names) < 4:
        axes.set_xlim(-1.5, len(names) + 0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(_number))


def _number(value: float, _: object) -> str:
    """1,500 as 1.5k; no exponents."""
    return si(value, "").replace(" ", "")
