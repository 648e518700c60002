"""Figures of one run: its curves, and from its last evaluation a sheet of predictions."""

from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.base.gallery import DPI
from pipeline.base.page import COLOURS, png
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.values import to_rgb
from pipeline.data.loading.views import eval_view
from pipeline.evaluate.classify import read_pixels
from pipeline.explain import galleries
from pipeline.review.curves import SMOOTH_FROM, draw_line, finish, finite, lines_of
from pipeline.review.record import LastPredictions, RunRecord, Series
from pipeline.settings.run import RunConfig

# Metric -> part of a step, in the order in which they follow each other.
_PARTS = {"data_wait": "data", **{f"time_{part}": part for part in ("forward", "backward", "optimizer", "checkpoint")}}
_PERCENTILES = (0.5, 99.5)
_NUM_IMAGES = 32
_THREADS = 1


# ---------------------------------------------------------------------- curves
def draw_run(record: RunRecord) -> bytes | None:
    """PNG of the curves of one run; None if it has none."""
    panels = [(title, series) for _, title, series in lines_of(record)]
    for name, title in (("lr", "learning rate"), ("images_per_second", "images/s")):
        if series := record.series.get(name):
            panels.append((title, series))
    shares = {part: record.series[metric] for metric, part in _PARTS.items() if metric in record.series}
    num_panels = len(panels) + bool(shares)
    if not num_panels:
        return None
    rows = (num_panels + 1) // 2
    figure = Figure(figsize=(11, 3.3 * rows), dpi=110, layout="constrained")
    for number, (title, series) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, 2, number)
        draw_line(axes, series.steps, series.values, {"color": COLOURS[0]})
        _leave_out_spikes(axes, series.values)
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
        if points.max() > high + 2 * (high - low) > high:
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


# ---------------------------------------------------------------------- the last evaluation
def read_shown(split: Split, config: RunConfig, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the rows that can be read, the crops that the model sees, uint8 (n, H, W, 3))."""
    view = eval_view(config.augment, config.model.image_size, split.pixels)
    with Loader(split, view, _THREADS, prefetch=2, max_bad_share=1.0) as loader:
        rows, pixels = read_pixels(loader, rows, 16)
    return rows, to_rgb(pixels.numpy(), split.pixels)


def draw_sheet(found: LastPredictions, names: list[str], split: Split, config: RunConfig) -> bytes | None:
    """PNG of images, in the crops that the model sees, with true and predicted class: confident mistakes first, then
    right ones.

    None if no image has both.
    """
    if not ((found.true >= 0) & (found.predicted >= 0)).any():
        return None
    read = partial(read_shown, split, config)
    figure = galleries.draw_predictions(found.true, found.predicted, found.probability, names, _NUM_IMAGES, read)
    return png(figure, DPI, split.pixels.describe_shown())
