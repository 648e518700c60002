"""Figures of a study: score against data size or compute with the fitted laws, and the differences of an ablation."""

from collections.abc import Sequence
from itertools import cycle
from operator import attrgetter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from pipeline.base.page import COLOURS, add_legend, png, style_axes
from pipeline.base.words import shorten
from pipeline.experiment.law import Estimate
from pipeline.experiment.points import Line, Point, Tested
from pipeline.experiment.table import StudyResults

_MARKERS = "os^DvPX<>p"
_MAX_NAME = 34


def draw_scores(points: Sequence[Point], lines: Sequence[Line], results: StudyResults) -> bytes | None:
    """PNG of the score against data size or compute: means with 95 % intervals, as the paper's Figures 3 to 5.

    A law that says something is drawn with its band and the prediction for the next larger run, an open circle. None if
    nothing can be drawn on a logarithmic axis.
    """
    points = sorted((point for point in points if point.x > 0), key=lambda point: point.x)
    if not points:
        return None
    figure = Figure(figsize=(11, 5.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    laws = {line.name: line for line in lines if not line.law.why_not}
    colours = dict(zip([*results.models, *results.families], cycle(COLOURS), strict=False))
    for model, marker in zip(results.models, cycle(_MARKERS), strict=False):
        own = [point for point in points if point.model == model]
        means, ends = (np.array([get(p) for p in own]) for get in (attrgetter("mean"), attrgetter("ends")))
        bars = 100 * np.abs(ends.reshape(-1, 2).T - means)
        look: dict[str, Any] = {"color": colours[model], "marker": marker, "linestyle": "" if model in laws else ":"}
        axes.errorbar([p.x for p in own], 100 * means, bars, **look, capsize=3, label=shorten(model, _MAX_NAME))
    for name, line in laws.items():
        found, colour = line.prediction, colours[name]
        end = line.next_x if isinstance(found, Estimate) else line.points[-1].x
        x = np.geomspace(line.points[0].x, end, 200)
        law, high, low = (100 * (1 - error) for error in line.law.curve(x))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, law, color=colour, label=f"law of {shorten(name, _MAX_NAME)}, 95 % band")
        if isinstance(found, Estimate):
            bars = 100 * np.array([[found.high - found.value], [found.value - found.low]])
            look = {"color": colour, "marker": "o", "markerfacecolor": "white"}
            axes.errorbar([end], [100 * (1 - found.value)], bars, **look, capsize=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: results.number(x))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(results.unit[1] if results.counts_images else f"compute of pre-training, {results.unit[1]}")
    axes.set_ylabel(f"{results.score}, %", parse_math=False)
    style_axes(axes)
    add_legend(figure, loc="outside right upper", fontsize=8)
    return png(figure)


def draw_differences(found: Sequence[Tested], results: StudyResults) -> bytes:
    """PNG of an ablation: each model's difference to the first with its 95 % interval, the best at the top."""
    figure = Figure(figsize=(9, 1.5 + 0.42 * len(found)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="0.35", linewidth=1)
    values = np.array([one.first.mean - one.second.mean for one in found])
    ends = [
        (one.difference.low, one.difference.high) if one.difference else (v, v)
        for one, v in zip(found, values, strict=True)
    ]
    bars = 100 * np.abs(np.array(ends).T - values)
    axes.errorbar(100 * values, range(len(found)), xerr=bars, fmt="o", color=COLOURS[0], capsize=3)
    labels = [f"{shorten(one.first.model, _MAX_NAME)}: {one.first.text} %" for one in found]
    axes.set_yticks(range(len(found)), labels, parse_math=False)
    axes.invert_yaxis()
    base = f"{shorten(found[0].second.model, _MAX_NAME)}: {found[0].second.text} %"
    axes.set_xlabel(f"{results.score}: difference to {base}, points", parse_math=False)
    style_axes(axes, "x")
    return png(figure)
