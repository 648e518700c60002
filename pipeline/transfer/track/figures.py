"""Accuracy by learning rate, of a VTAB sweep's search and of a fine-tuning grid's trials; the final scores of a grid."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, png, style_axes
from pipeline.base.words import counted
from pipeline.evaluate.intervals import of_seeds
from pipeline.transfer.vtab_tasks import GROUPS, TASKS

_DIVERGED = "#CC3311"


def draw_rates_of_groups(tried: dict[str, dict[float, tuple[float, int, int]]]) -> bytes:
    """PNG of accuracy on val200 by learning rate: thin lines for tasks, a thick one for the mean of each group.

    tried: task -> learning rate -> (best accuracy over the other settings, cells that ended, of these diverged). The mean is
    over the tasks of the group that have every rate.
    """
    figure = Figure(figsize=(13, 4.6), dpi=110, layout="constrained")
    rates = sorted({rate for of_task in tried.values() for rate in of_task})
    for number, (group, colour) in enumerate(zip(GROUPS, COLOURS, strict=False)):
        axes = figure.add_subplot(1, 3, number + 1)
        members = [task for task in TASKS if task.group == group and tried.get(task.name)]
        for task in members:
            _draw_task(axes, tried[task.name], colour)
        complete = [tried[task.name] for task in members if set(tried[task.name]) == set(rates)]
        if complete:
            means = [100 * float(np.mean([of_task[rate][0] for of_task in complete])) for rate in rates]
            axes.plot(
                rates, means, color=colour, linewidth=2.6, marker="o", label=f"mean of {counted(len(complete), 'task')}"
            )
            axes.legend(frameon=False, loc="lower center")
        axes.set_title(f"{group} ({len(members)} of {counted(sum(task.group == group for task in TASKS), 'task')})")
        if not members:
            axes.text(0.5, 0.5, "no task tried yet", transform=axes.transAxes, ha="center", color="0.5")
        _style(axes, rates, "top-1 on val200, %" if number == 0 else "")
    num_diverged = sum(diverged for of_task in tried.values() for _, _, diverged in of_task.values())
    note = f"; × {counted(num_diverged, 'cell')} diverged, which count as 0" if num_diverged else ""
    figure.suptitle(f"Accuracy by learning rate, the best of the other settings{note}")
    return png(figure)


def _draw_task(axes: Axes, of_task: dict[float, tuple[float, int, int]], colour: str) -> None:
    rates = sorted(of_task)
    ended = [rate for rate in rates if of_task[rate][1] > of_task[rate][2]]
    axes.plot(ended, [100 * of_task[rate][0] for rate in ended], color=colour, alpha=0.35, linewidth=1, marker=".")
    lost = [rate for rate in rates if of_task[rate][2]]
    if lost:  # The layout fails on an empty line that is not clipped.
        axes.plot(lost, [0] * len(lost), linestyle="none", marker="x", color=_DIVERGED, clip_on=False)


def draw_rates_of_grid(tried: Sequence[dict[str, Any]], chosen: float | None) -> bytes:
    """PNG of the trials' dev accuracy by learning rate; the chosen one and diverged ones are marked.

    tried: as `trials` of `grid.run`.
    """
    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    scored = sorted((trial["lr"], 100 * trial["top1"]) for trial in tried if "diverged" not in trial)
    axes.plot([lr for lr, _ in scored], [top1 for _, top1 in scored], color=COLOURS[0], marker="o")
    for lr, top1 in scored:
        axes.annotate(f"{top1:.1f}", (lr, top1), textcoords="offset points", xytext=(0, 8), ha="center")
        if lr == chosen:
            axes.plot(
                [lr],
                [top1],
                marker="o",
                markersize=13,
                fillstyle="none",
                color=COLOURS[1],
                linestyle="none",
                label=f"chosen: {lr:g}",
            )
    low = min((top1 for _, top1 in scored), default=0.0)
    high = max((top1 for _, top1 in scored), default=100.0)
    room = max(1.0, 0.15 * (high - low))
    axes.set_ylim(max(0.0, low - room), min(104.0, high + 2 * room))
    lost = [trial["lr"] for trial in tried if "diverged" in trial]
    if lost:
        axes.plot(
            lost,
            [axes.get_ylim()[0]] * len(lost),
            linestyle="none",
            marker="x",
            markersize=9,
            color=_DIVERGED,
            clip_on=False,
            label="diverged",
        )
    _style(axes, sorted({*lost, *(lr for lr, _ in scored)}), "top-1 on dev, %", zoomed=True)
    if lost or chosen is not None:
        axes.legend(frameon=False, loc="best")
    axes.set_title("Choice of the learning rate")
    return png(figure)


def draw_finals(runs: Sequence[dict[str, Any]], split: str) -> bytes:
    """PNG of the final accuracy of each seed, their mean and its 95 % interval. runs: as in `grid.run`, at least one."""
    figure = Figure(figsize=(6, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    accuracies = [run["top1"] for run in runs]
    places = np.arange(len(runs))
    mean = float(np.mean(accuracies))
    if len(runs) > 1:
        interval = of_seeds(accuracies, runs[0].get("num_samples", 0))
        axes.axhspan(
            100 * interval.low, 100 * interval.high, color=COLOURS[0], alpha=0.15, label="95 % interval of the mean"
        )
        axes.axhline(100 * mean, color=COLOURS[0], label=f"mean {100 * mean:.2f}")
    axes.plot(places, [100 * accuracy for accuracy in accuracies], "o", color=COLOURS[1])
    for place, accuracy in zip(places, accuracies, strict=True):
        axes.annotate(
            f"{100 * accuracy:.2f}", (float(place), 100 * accuracy), textcoords="offset points", xytext=(9, -3)
        )
    axes.set_xticks(places, [str(run["seed"]) for run in runs])
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.margins(y=0.25)
    axes.set_xlabel("seed")
    axes.set_ylabel(f"top-1 on {split}, %")
    style_axes(axes)
    if len(runs) > 1:
        axes.legend(frameon=False)
    axes.set_title("Final runs")
    return png(figure)


def _style(axes: Axes, rates: Sequence[float], label: str, zoomed: bool = False) -> None:
    axes.set_xscale("log")
    if 0 < len(rates) <= 12:
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        axes.set_xticks([], minor=True)
        room = max(1.5, (rates[-1] / rates[0]) ** 0.06)
        axes.set_xlim(rates[0] / room, rates[-1] * room)
    if not zoomed:
        axes.set_ylim(0, 100)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(label)
    style_axes(axes)
