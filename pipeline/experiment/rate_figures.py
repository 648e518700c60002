"""Accuracy by learning rate, of a VTAB sweep's search and of a fine-tuning grid's trials."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, PngImage, png, style_axes
from pipeline.base.words import counted
from pipeline.experiment.table import Row
from pipeline.experiment.vtab_tasks import GROUPS, TASKS


def draw_rates_of_groups(searched: Sequence[Row]) -> PngImage:
    """Accuracy on val200 by learning rate: thin lines for tasks, a thick one for the mean of each group.

    searched: cells of the search that are done. A point is the best of the other settings; the mean is over the tasks
    that have every rate.
    """
    best: dict[str, dict[float, float]] = {}
    for row in searched:
        of_task, rate = best.setdefault(row.group, {}), row.settings["learning_rate"]
        of_task[rate] = max(of_task.get(rate, 0.0), 100 * row.scores["accuracy"])
    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    rates = sorted({rate for of_task in best.values() for rate in of_task})
    for axes, group, colour in zip(figure.subplots(1, len(GROUPS)), GROUPS, COLOURS, strict=False):
        members = [best[task.name] for task in TASKS if task.group == group and task.name in best]
        for of_task in members:
            axes.plot(*zip(*sorted(of_task.items()), strict=True), color=colour, alpha=0.35, marker=".")
        if complete := [of_task for of_task in members if len(of_task) == len(rates)]:
            means = [float(np.mean([of_task[rate] for of_task in complete])) for rate in rates]
            label = f"mean of {counted(len(complete), 'task')}"
            axes.plot(rates, means, color=colour, linewidth=2.6, marker="o", label=label)
        axes.set_ylim(0, 100)
        _finish(axes, rates, f"{group}: top-1 on val200, %")
    figure.suptitle("Accuracy by learning rate, the best of the other settings; a cell that diverged counts as 0")
    return _picture(figure)


def draw_rates_of_grid(tried: Sequence[dict[str, Any]], chosen: float | None) -> PngImage:
    """The trials' dev accuracy by learning rate; the chosen one and diverged ones are marked. tried: `trials` of
    `grid.run`.
    """
    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    scored = {trial["lr"]: 100 * trial["top1"] for trial in tried if "diverged" not in trial}
    rates = sorted(trial["lr"] for trial in tried)
    axes.plot(sorted(scored), [scored[lr] for lr in sorted(scored)], color=COLOURS[0], marker="o", label="trials")
    if chosen is not None:
        axes.axvline(chosen, color=COLOURS[1], linestyle=":", label=f"chosen: {chosen:g}")
    if lost := [lr for lr in rates if lr not in scored]:
        at = axes.get_xaxis_transform()
        axes.plot(lost, [0.02] * len(lost), "x", color="#CC3311", transform=at, label="diverged")
    _finish(axes, rates, "top-1 on dev, %")
    return _picture(figure)


def _finish(axes: Axes, rates: Sequence[float], label: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(label)
    style_axes(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _picture(figure: Figure) -> PngImage:
    return PngImage("accuracy_by_learning_rate.png", "Accuracy by learning rate", png(figure))
