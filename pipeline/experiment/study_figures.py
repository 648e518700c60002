"""Figures of a study: score against data size or compute with the fitted laws, and the differences of an ablation."""

from collections.abc import Sequence
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
    laws = {line.name: line for line in lines if line.law and not line.law.why_not}
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate([*results.models, *results.families])}
    for number, model in enumerate(results.models):
        own = [point for point in points if point.model == model]
        look: dict[str, Any] = {"color": colours[model], "marker": _MARKERS[number % len(_MARKERS)]}
        means, ends = np.array([point.mean for point in own]), np.array([point.ends for point in own]).reshape(-1, 2)
        bars = 100 * np.abs(ends.T - means)
        style = "" if model in laws else ":"
        label = shorten(model, _MAX_NAME)
        axes.errorbar([p.x for p in own], 100 * means, bars, **look, linestyle=style, capsize=3, label=label)
    for name, line in laws.items():
        assert line.law
        end = line.next_x if isinstance(line.prediction, Estimate) else line.points[-1].x
        x = np.geomspace(line.points[0].x, end, 200)
        law, lower, upper = line.law.curve(x)
        axes.fill_between(x, 100 * (1 - upper), 100 * (1 - lower), color=colours[name], alpha=0.15, linewidth=0)
        axes.plot(x, 100 * (1 - law), color=colours[name], label=f"law of {shorten(name, _MAX_NAME)}, 95 % band")
        if isinstance(found := line.prediction, Estimate):
            bars = 100 * np.array([[found.high - found.value], [found.value - found.low]])
            look = {"color": colours[name], "marker": "o", "markerfacecolor": "white"}
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
    for place, one in enumerate(found):
        value = one.first.mean - one.second.mean
        low, high = (one.difference.low, one.difference.high) if one.difference else (value, value)
        bars = 100 * np.abs([[value - low], [high - value]])
        axes.errorbar([100 * value], [place], xerr=bars, fmt="o", color=COLOURS[0], capsize=3)
    labels = [f"{shorten(one.first.model, _MAX_NAME)}: {one.first.text} %" for one in found]
    axes.set_yticks(range(len(found)), labels, parse_math=False)
    axes.invert_yaxis()
    base = f"{shorten(found[0].second.model, _MAX_NAME)}: {found[0].second.text} %"
    axes.set_xlabel(f"{results.score}: difference to {base}, points", parse_math=False)
    style_axes(axes, "x")
    return png(figure)
