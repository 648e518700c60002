"""Curves: of one run, and of runs side by side against steps, images seen and FLOPs."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from pipeline.base.metric import SPREAD, title_of
from pipeline.base.page import COLOURS, PngImage, add_legend, png, style_axes
from pipeline.base.words import first_of, shorten
from pipeline.review.record import RunRecord, Series
from pipeline.review.statistics import Records, in_seeds, loss_of, seed_groups

# More runs than colours differ by the style of their lines.
_STYLES = ("-", "--", ":", "-.")
_MAX_NAME = 36
# Window of the running mean of a series, as a share of the run; shorter series are drawn as they are.
_SMOOTH, _SMOOTH_FROM = 0.02, 100

_Line = tuple[np.ndarray, np.ndarray, dict[str, Any]]  # Amounts, values and the look of a curve.
# What runs are compared against -> its amount in one step of a run, 0 if unknown.
_AXES: dict[str, Callable[[RunRecord], float]] = {
    "step": lambda record: 1.0,
    "images seen": lambda record: float(record.images_per_step),
    "training FLOPs": lambda record: record.images_per_step * record.flops_per_image,
}


def curves(records: Records) -> list[PngImage]:
    """The figures of accuracy and loss on the evaluated images, of training loss, and of what objectives measure or log
    beside.

    A metric has a figure for each thing that it measures: for each loss, and for images that are trained on.
    """
    losses, seeds = {run: loss_of(record) for run, record in records.items()}, seed_groups(records)
    differ = len({*losses.values()} - {""}) > 1
    found: dict[tuple[str, str], dict[str, Series]] = {}
    for run, record in records.items():
        for file, title, series in lines_of(record, f" ({losses[run]})" if differ and losses[run] else ""):
            found.setdefault((file, title), {})[run] = series
    pictures, used = [], Counter[str]()
    for (file, title), lines in found.items():
        if content := draw_curves({run: records[run] for run in lines}, title, lines, seeds):
            used[file] += 1
            name = f"{file}_{used[file]}.png" if used[file] > 1 else f"{file}.png"
            about = f"{title} of {first_of(list(lines), 12)} against steps, images seen and training FLOPs"
            pictures.append(PngImage(name, about, content))
    return pictures


def lines_of(record: RunRecord, loss: str = "") -> Iterator[tuple[str, str, Series]]:
    """(file, title, values, shares in per cent) of each metric of a run that figures show: accuracy, losses, what else
    was measured on the held-out split, by the objective and by probes. loss: added to the title of one.
    """
    train, split = record.dataset("training"), f"{record.split}_"
    trained = train.split if train else str(record.settings.get("data.train_split", "train"))
    on = f"on {'training' if record.split == trained else 'held-out'} images"
    shown = {
        f"{split}top1": ("accuracy", f"Top-1 accuracy {on}"),
        f"{split}loss": ("held_out_loss", f"Loss {on}{loss}"),
        "loss": ("training_loss", f"Training loss{loss}"),
    }
    logged = [name for name, metric in record.metrics.items() if metric.group == "train" or name in SPREAD]
    for name in (*record.held_out, *record.probes, *logged):
        own = name.removeprefix(split) if name in record.held_out else name
        title = title_of(own) if own == name else f"{title_of(own)} {on}"
        # A probe's name contains that of a data folder.
        shown.setdefault(name, ("metric_" + re.sub(r"[^\w.-]", "_", own), title))
    shown.pop(f"{split}top5", None)
    for name, (file, title) in shown.items():
        if series := record.series.get(name):
            if record.metric(name).is_share:
                title, series = f"{title}, %", replace(series, values=100 * series.values)
            yield file, title, series


def draw_curves(
    records: Records,
    title: str,
    chosen: Mapping[str, Series],
    seeds: Sequence[Sequence[str]],
) -> bytes | None:
    """PNG of one metric of all runs against steps, images and FLOPs, side by side; None if there is no value after step
    0.

    chosen: the metric of each run. seeds: groups of runs that differ in their seed only, which share a colour and a
    line of the legend.
    """
    if not any(series.steps[-1] > 0 for series in chosen.values()):  # Weights evaluated by themselves have no steps.
        return None
    groups = [group for of in seeds if (group := [name for name in of if name in chosen])]
    panels = []
    for x, amount in _AXES.items():
        lines = list[_Line]()
        for place, group in enumerate(groups):
            style = _STYLES[place // len(COLOURS) % len(_STYLES)]
            look = {"color": COLOURS[place % len(COLOURS)], "linestyle": style}
            for name in group:
                if per_step := amount(records[name]):
                    label = shorten(in_seeds(group), _MAX_NAME) if name == group[0] and len(groups) > 1 else ""
                    lines.append((chosen[name].steps * per_step, chosen[name].values, {**look, "label": label}))
        if lines:
            panels.append(("", x, lines))
    return _draw(panels, title)


def draw_run(record: RunRecord) -> bytes | None:
    """PNG of the curves of one run; None if it has none."""
    found = [(title, series) for _, title, series in lines_of(record)]
    for name, title in (("lr", "learning rate"), ("images_per_second", "images/s")):
        if series := record.series.get(name):
            found.append((title, series))
    look = {"color": COLOURS[0]}
    return _draw([(title, "step", [(one.steps, one.values, look)]) for title, one in found], "") if found else None


def _draw(panels: Sequence[tuple[str, str, Sequence[_Line]]], title: str) -> bytes:
    """PNG of panels, three in a row. panels: (title, what curves are drawn against, curves)."""
    columns = min(3, len(panels))
    figure = Figure(figsize=(5.0 * columns, 4.2 * -(-len(panels) // columns)), dpi=110, layout="constrained")
    for number, (heading, x, lines) in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, number)
        for line in lines:
            _draw_line(axes, *line)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel(x)
        style_axes(axes)
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter())
    figure.suptitle(title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        add_legend(figure, handles, labels, loc="outside lower center", ncols=min(4, len(handles)), fontsize=9)
    return png(figure)


def _draw_line(axes: Axes, amounts: np.ndarray, values: np.ndarray, look: dict[str, Any]) -> None:
    """Draw values, non-finite ones as gaps; of a long series the running mean, and the values faintly."""
    values = np.where(np.isfinite(values), values, np.nan)
    if len(values) >= _SMOOTH_FROM:
        axes.plot(amounts, values, color=look["color"], alpha=0.25, linewidth=0.8)
        values = running_mean(values)
    marker = "o" if len(values) <= 40 else None
    axes.plot(amounts, values, marker=marker, markersize=3.5, linewidth=1.4, **look)


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred running mean; the window is cut at the ends, and non-finite values are ignored. NaN where it has no
    other.
    """
    window = max(1, round(_SMOOTH * len(values))) | 1
    ones, there = np.ones(window), np.isfinite(values)
    sums = np.convolve(np.where(there, values, 0), ones, "same")
    counts = np.convolve(there, ones, "same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
