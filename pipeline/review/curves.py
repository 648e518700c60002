"""One figure of a run over its steps: losses, accuracy, learning rate, speed and where the time goes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.page import png
from pipeline.review.budgets import COLOURS, running_mean
from pipeline.review.record import RunRecord, Series

# A longer series is drawn as its running mean, with its points in the background.
_SMOOTH_FROM = 100
# Metric -> part of a step, in the order in which they follow each other.
_PARTS = {"data_wait": "data", **{f"time_{part}": part for part in ("forward", "backward", "optimizer", "checkpoint")}}
_PERCENTILES = (0.5, 99.5)


def draw_run(record: RunRecord, others: Sequence[RunRecord] = ()) -> bytes | None:
    """PNG of the curves of one run; None if it has none. others: runs whose loss and accuracy are drawn in grey."""
    losses = {"training": record.metrics.get("loss"), f"split {record.split}": record.held_out_loss}
    panels = [
        ("loss", _present(losses), 1.0, [other.metrics.get("loss") for other in others]),
        ("held-out accuracy, %", _accuracies(record), 100.0, [other.accuracy for other in others]),
        ("learning rate", _present({"": record.metrics.get("lr")}), 1.0, []),
        ("images/s", _present({"": record.metrics.get("images_per_second")}), 1.0, []),
    ]
    shares = _present({part: record.metrics.get(metric) for metric, part in _PARTS.items()})
    drawn = [panel for panel in panels if panel[1]]
    num_panels = len(drawn) + bool(shares)
    if not num_panels:
        return None
    rows = (num_panels + 1) // 2
    figure = Figure(figsize=(11, 3.3 * rows), dpi=110, layout="constrained")
    for number, (title, lines, scale, grey) in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, 2, number)
        _draw_others(axes, [series for series in grey if series is not None and len(series)], scale)
        _draw_lines(axes, lines, scale)
        _finish(axes, title, "step")
    if shares:
        axes = figure.add_subplot(rows, 2, num_panels)
        _draw_shares(axes, shares)
        _finish(axes, "where the time goes, % of training time", "step")
    return png(figure)


def _accuracies(record: RunRecord) -> dict[str, Series]:
    probes = {name: series for name, series in record.metrics.items() if name.endswith(("shot", "nn"))}
    return _present({f"split {record.split}": record.accuracy, **probes})


def _present(lines: dict[str, Series | None]) -> dict[str, Series]:
    return {name: series for name, series in lines.items() if series is not None and len(series)}


def _draw_others(axes: Axes, others: Sequence[Series], scale: float) -> None:
    for number, series in enumerate(others):
        values = _smooth(scale * _finite(series.values))
        axes.plot(
            series.steps, values, color="0.8", linewidth=1, label=None if number else f"other runs ({len(others)})"
        )


def _draw_lines(axes: Axes, lines: dict[str, Series], scale: float) -> None:
    for place, (label, series) in enumerate(lines.items()):
        values, colour = scale * _finite(series.values), COLOURS[place % len(COLOURS)]
        if len(series) >= _SMOOTH_FROM:
            axes.plot(series.steps, values, color=colour, alpha=0.25, linewidth=0.8)
        marker = "o" if len(series) <= 40 else None
        axes.plot(
            series.steps, _smooth(values), color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=label
        )
    # One spike of a loss would flatten the rest of the curve.
    points = np.concatenate([scale * series.values[np.isfinite(series.values)] for series in lines.values()])
    if len(points) >= _SMOOTH_FROM:
        low, high = np.percentile(points, _PERCENTILES)
        if high > low and points.max() > high + 2 * (high - low):
            axes.set_ylim(low - 0.05 * (high - low), high + 0.2 * (high - low))


def _draw_shares(axes: Axes, shares: dict[str, Series]) -> None:
    steps = next(iter(shares.values())).steps
    values = [100 * np.interp(steps, series.steps, _finite(series.values)) for series in shares.values()]
    axes.stackplot(steps, values, labels=list(shares), colors=COLOURS[: len(shares)], alpha=0.85)
    axes.set_ylim(0, 100)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False, fontsize=8)


def _finish(axes: Axes, title: str, x: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    if axes.get_legend() is None and len(axes.get_legend_handles_labels()[0]) > 1:
        for text in axes.legend(frameon=False, fontsize=8).get_texts():
            text.set_parse_math(False)


def _smooth(values: np.ndarray) -> np.ndarray:
    return running_mean(values) if len(values) >= _SMOOTH_FROM else values


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
