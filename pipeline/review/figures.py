"""Figures of one run: its curves, and from its last evaluation the confusion matrix, the worst classes and a sheet of
predictions.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.base.gallery import DPI
from pipeline.base.page import COLOURS, add_legend, png, style_axes
from pipeline.base.words import counted, shorten
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.values import to_rgb
from pipeline.data.loading.views import shown_view
from pipeline.evaluate.classify import per_class
from pipeline.evaluate.probes.features import read_pixels
from pipeline.explain import galleries
from pipeline.review.budgets import SMOOTH_FROM, draw_line, finish, finite, lines_of, running_mean
from pipeline.review.record import LastPredictions, RunRecord, Series
from pipeline.settings.run import RunConfig

# Metric -> part of a step, in the order in which they follow each other.
_PARTS = {"data_wait": "data", **{f"time_{part}": part for part in ("forward", "backward", "optimizer", "checkpoint")}}
_PERCENTILES = (0.5, 99.5)
_NUM_WORST = 25
_NUM_IMAGES = 32
_THREADS = 1


# ---------------------------------------------------------------------- curves
def draw_run(record: RunRecord, others: Sequence[RunRecord] = ()) -> bytes | None:
    """PNG of the curves of one run; None if it has none. others: runs that are drawn in grey, where they compare.

    Accuracies compare with all of them, losses and what objectives log only with those of the same `train.loss`, RankMe
    also only at the same width.
    """
    loss, width = (record.settings.get(name) for name in ("train.loss", "model.width"))
    alike = [other for other in others if other.settings.get("train.loss") == loss]
    as_wide = [other for other in alike if other.settings.get("model.width") == width]
    panels: list[tuple[str, Series, bool, list[Series]]] = []
    for file, title, series, percent in lines_of(record):
        beside = others if file == "accuracy" else as_wide if file == "metric_rankme" else alike
        grey = [of_other for other in beside for name, _, of_other, _ in lines_of(other) if name == file]
        panels.append((f"{title}, %" if percent else title, series, percent, grey))
    for name, title in (("lr", "learning rate"), ("images_per_second", "images/s")):
        if name in record.series:
            panels.append((title, record.series[name], False, []))
    shares = {part: record.series[metric] for metric, part in _PARTS.items() if metric in record.series}
    num_panels = len(panels) + bool(shares)
    if not num_panels:
        return None
    rows = (num_panels + 1) // 2
    figure = Figure(figsize=(11, 3.3 * rows), dpi=110, layout="constrained")
    for number, (title, series, percent, greys) in enumerate(panels, 1):
        axes, scale = figure.add_subplot(rows, 2, number), 100.0 if percent else 1.0
        for place, grey in enumerate(greys):
            label = None if place else f"other runs ({len(greys)})"
            axes.plot(grey.steps, scale * running_mean(grey.values), color="0.8", linewidth=1, label=label)
        values = scale * series.values
        draw_line(axes, series.steps, values, {"color": COLOURS[0]}, "this run" if greys else None)
        _leave_out_spikes(axes, values)
        _finish(axes, title)
    if shares:
        axes = figure.add_subplot(rows, 2, num_panels)
        _draw_shares(axes, shares)
        _finish(axes, "where the time goes, % of training time")
    return png(figure)


def _leave_out_spikes(axes: Axes, values: np.ndarray) -> None:
    """One spike of a loss would flatten the rest of the curve."""
    points = values[np.isfinite(values)]
    if len(points) >= SMOOTH_FROM:
        low, high = np.percentile(points, _PERCENTILES)
        if high > low and points.max() > high + 2 * (high - low):
            axes.set_ylim(low - 0.05 * (high - low), high + 0.2 * (high - low))


def _draw_shares(axes: Axes, shares: dict[str, Series]) -> None:
    steps = next(iter(shares.values())).steps
    values = [100 * np.interp(steps, series.steps, finite(series.values)) for series in shares.values()]
    axes.stackplot(steps, values, labels=list(shares), colors=COLOURS[: len(shares)], alpha=0.85)
    axes.set_ylim(0, 100)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False, fontsize=8)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    finish(axes, "step")
    axes.set_xlim(left=0)
    if axes.get_legend() is None and len(axes.get_legend_handles_labels()[0]) > 1:
        add_legend(axes, fontsize=8)


# ---------------------------------------------------------------------- the last evaluation
def draw_worst(found: LastPredictions, names: list[str]) -> bytes | None:
    """PNG of the classes with the lowest recall; None if no class has an image."""
    of_class = per_class(found.true, found.predicted, len(names))
    tested = np.flatnonzero(of_class.support)
    if not len(tested):
        return None
    worst = tested[np.argsort(of_class.recall[tested], kind="stable")[:_NUM_WORST]]
    figure = Figure(figsize=(9, 1.2 + 0.27 * len(worst)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(worst))
    axes.barh(places, 100 * of_class.recall[worst], color=COLOURS[0], height=0.7)
    labels = [f"{shorten(names[c], 40)} ({of_class.support[c]:,})" for c in worst.tolist()]
    axes.set_yticks(places, labels, fontsize=8, parse_math=False)
    for place, c in zip(places, worst.tolist(), strict=True):
        axes.text(
            100 * of_class.recall[c] + 1, float(place), f"{100 * of_class.recall[c]:.0f} %", va="center", fontsize=8
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 108)
    axes.set_xlabel("recall, %")
    which = (
        "All classes"
        if len(worst) == len(tested)
        else f"The {counted(len(worst), 'class')} of {len(tested):,} with the lowest recall"
    )
    axes.set_title(f"{which} (number of images)", fontsize=10)
    style_axes(axes, "x")
    return png(figure)


def draw_sheet(found: LastPredictions, names: list[str], split: Split, config: RunConfig) -> bytes | None:
    """PNG of images, in the crops that the model sees, with true and predicted class: confident mistakes first, then
    right ones.

    None if no image has both.
    """
    known = np.flatnonzero((found.true >= 0) & (found.predicted >= 0))
    if not len(known):
        return None
    right = found.true[known] == found.predicted[known]
    chosen = known[galleries.order_by_mistake(right, found.probability[known], _NUM_IMAGES)]
    view = shown_view(config.augment, config.model.image_size, split.pixels)
    with Loader(split, view, _THREADS, prefetch=2, max_bad_share=1.0) as loader:
        rows, pixels = read_pixels(loader, found.rows[chosen], 16)
    if not len(rows):
        return None
    chosen = chosen[np.isin(found.rows[chosen], rows)]
    figure = galleries.draw_predictions(
        to_rgb(pixels.numpy(), split.pixels),
        found.true[chosen],
        found.predicted[chosen],
        names,
        found.probability[chosen],
        galleries.note_on_mistakes(right),
        config.model.image_size,
    )
    return png(figure, DPI, split.pixels.describe_shown())
