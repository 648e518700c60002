"""Accuracy by learning rate, of a VTAB sweep's search and of a fine-tuning grid's trials; the final scores of a
grid.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, png, style_axes
from pipeline.base.words import counted
from pipeline.evaluate.intervals import of_seeds
from pipeline.experiment.table import Row
from pipeline.experiment.vtab_tasks import GROUPS, TASKS


def draw_rates_of_groups(searched: Sequence[Row]) -> bytes:
    """PNG of accuracy on val200 by learning rate: thin lines for tasks, a thick one for the mean of each group.

    searched: cells of the search that are done. A point is the best of the other settings; the mean is over the tasks
    that have every rate.
    """
    best: dict[str, dict[float, float]] = {}
    for row in searched:
        of_task, rate = best.setdefault(row.group, {}), row.settings["learning_rate"]
        of_task[rate] = max(of_task.get(rate, 0.0), 100 * row.scores["accuracy"])
    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    rates = sorted({rate for of_task in best.values() for rate in of_task})
    for number, (group, colour) in enumerate(zip(GROUPS, COLOURS, strict=False)):
        axes = figure.add_subplot(1, 3, number + 1)
        members = [best[task.name] for task in TASKS if task.group == group and task.name in best]
        for of_task in members:
            axes.plot(*zip(*sorted(of_task.items()), strict=True), color=colour, alpha=0.35, marker=".")
        if complete := [of_task for of_task in members if len(of_task) == len(rates)]:
            means = [float(np.mean([of_task[rate] for of_task in complete])) for rate in rates]
            label = f"mean of {counted(len(complete), 'task')}"
            axes.plot(rates, means, color=colour, linewidth=2.6, marker="o", label=label)
            axes.legend(frameon=False, loc="lower center")
        axes.set_title(group)
        axes.set_ylim(0, 100)
        _style(axes, rates, "top-1 on val200, %" if number == 0 else "")
    figure.suptitle("Accuracy by learning rate, the best of the other settings; a cell that diverged counts as 0")
    return png(figure)


def draw_rates_of_grid(tried: Sequence[dict[str, Any]], chosen: float | None) -> bytes:
    """PNG of the trials' dev accuracy by learning rate; the chosen one and diverged ones are marked. tried: `trials` of
    `grid.run`.
    """
    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    scored = sorted((trial["lr"], 100 * trial["top1"]) for trial in tried if "diverged" not in trial)
    axes.plot([lr for lr, _ in scored], [top1 for _, top1 in scored], color=COLOURS[0], marker="o", label="trials")
    if chosen is not None:
        axes.axvline(chosen, color=COLOURS[1], linestyle=":", label=f"chosen: {chosen:g}")
    if lost := [trial["lr"] for trial in tried if "diverged" in trial]:
        at = axes.get_xaxis_transform()
        axes.plot(lost, [0.02] * len(lost), "x", color="#CC3311", transform=at, label="diverged")
    _style(axes, sorted({*lost, *(lr for lr, _ in scored)}), "top-1 on dev, %")
    axes.legend(frameon=False)
    return png(figure)


def draw_finals(runs: Sequence[dict[str, Any]], split: str) -> bytes:
    """PNG of the final accuracy of each seed, their mean and its 95 % interval. runs: as in `grid.run`, at least
    one.
    """
    figure = Figure(figsize=(6, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    accuracies = [run["top1"] for run in runs]
    if len(runs) > 1:
        interval, mean = of_seeds(accuracies, runs[0]["num_samples"]), 100 * float(np.mean(accuracies))
        axes.axhspan(100 * interval.low, 100 * interval.high, color=COLOURS[0], alpha=0.15, label="95 % interval")
        axes.axhline(mean, color=COLOURS[0], label=f"mean {mean:.2f}")
        axes.legend(frameon=False)
    axes.plot([str(run["seed"]) for run in runs], [100 * accuracy for accuracy in accuracies], "o", color=COLOURS[1])
    axes.margins(y=0.25)
    axes.set_xlabel("seed")
    axes.set_ylabel(f"top-1 on {split}, %")
    style_axes(axes)
    return png(figure)


def _style(axes: Axes, rates: Sequence[float], label: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(label)
    style_axes(axes)
