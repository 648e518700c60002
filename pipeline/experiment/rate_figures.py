"""Accuracy by learning rate, of a VTAB sweep's search and of a fine-tuning grid's trials."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, PngImage, png, style_axes
from pipeline.experiment.table import Row
from pipeline.experiment.vtab_tasks import GROUPS, TASKS


def rates_of_groups(searched: Sequence[Row]) -> dict[str, list[dict[float, float]]]:
    """The panels of a sweep, one for each group, of the cells of the search that are done: the best of the other
    settings.
    """
    best: dict[str, dict[float, float]] = {task.name: {} for task in TASKS}
    for row in searched:
        of_task, rate = best[row.group], row.settings["learning_rate"]
        of_task[rate] = max(of_task.get(rate, 0.0), row.scores["accuracy"])
    return {f"{group}, val200": [best[task.name] for task in TASKS if task.group == group] for group in GROUPS}


def draw_rates(
    panels: Mapping[str, Sequence[Mapping[float, float]]], about: str, chosen: float | None = None
) -> PngImage:
    """Accuracy by learning rate, a panel for each title: a line for each task, and a thick one for the mean of those
    that have every rate.
    """
    figure = Figure(figsize=(4.4 * len(panels) + 2, 4.6), dpi=110, layout="constrained")
    rates = sorted({rate for lines in panels.values() for line in lines for rate in line})
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines), colour in zip(grid, panels.items(), COLOURS, strict=False):
        for line in lines:
            axes.plot(sorted(line), [100 * line[rate] for rate in sorted(line)], color=colour, alpha=0.35, marker=".")
        if complete := [[100 * line[rate] for rate in rates] for line in lines if len(line) == len(rates)]:
            axes.plot(rates, np.mean(complete, axis=0), color=colour, linewidth=2.6, label=f"mean of {len(complete)}")
            axes.legend(frameon=False)
        if chosen is not None:
            axes.axvline(chosen, color="0.35", linestyle=":")
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("learning rate")
        axes.set_ylabel(f"{title}: top-1, %")
        style_axes(axes)
    figure.suptitle(f"Accuracy by learning rate; {about}")
    return PngImage("accuracy_by_learning_rate.png", "Accuracy by learning rate", png(figure))
