"""Scores on VTAB-1k as bar charts."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.evaluate.render import png, shorten
from pipeline.transfer.score_table import OVERALL, Cell, Column, members
from pipeline.transfer.vtab_tasks import GROUPS, TASKS

# Okabe and Ito's colours, which are told apart by all: ours are the strong ones, the paper's are greys.
_OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PAPER = ("0.35", "0.55", "0.75")
_NAME = 40


def draw_tasks(table: Sequence[Column]) -> bytes:
    """A PNG: a bar for each task and column, with its interval; a task without a score has none."""
    figure = Figure(figsize=(15, 5.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, table, [task.title for task in TASKS], [[column.tasks.get(t.name) for t in TASKS] for column in table])
    ends = np.cumsum([sum(task.group == group for task in TASKS) for group in GROUPS])
    for end in ends[:-1]:
        axes.axvline(end - 0.5, color="0.6", linewidth=0.8)
    for first, end, group in zip([0, *ends[:-1]], ends, GROUPS, strict=True):
        axes.text((first + end - 1) / 2, 101, group, ha="center", va="bottom", color="0.35")
    axes.tick_params(axis="x", rotation=45)
    for label in axes.get_xticklabels():
        label.set_horizontalalignment("right")
        label.set_rotation_mode("anchor")
    axes.set_title("VTAB-1k: top-1 accuracy on each test split", pad=22)
    return png(figure)


def draw_means(table: Sequence[Column]) -> bytes:
    """A PNG: the means of groups and of all tasks; a mean that is not whole has no bar, and says of how many it would be."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    names = [*GROUPS, OVERALL]
    rows = [[column.means.get(name) for name in names] for column in table]
    _bars(axes, table, [f"{name} ({len(members()[name])})" for name in names[:-1]] + ["all 19 tasks"], rows)
    width = _width(len(table))
    for number, column in enumerate(table):
        for place, name in enumerate(names):
            if name not in column.means:
                left = sum(task not in column.absent for task in members()[name])
                text = f"only {left} of {len(members()[name])} tasks"
                axes.text(place + _shift(number, len(table)), 1, text, rotation=90, ha="center", va="bottom",
                          fontsize=max(6, 40 * width), color=_colours(table)[number])  # fmt: skip
    axes.set_title("VTAB-1k: unweighted means over tasks")
    return png(figure)


def _bars(axes: Axes, table: Sequence[Column], titles: Sequence[str], rows: Sequence[Sequence[Cell | None]]) -> None:
    """rows: for each column of the table, the cell of each title."""
    for number, (column, cells, colour) in enumerate(zip(table, rows, _colours(table), strict=True)):
        places = np.array([i for i, cell in enumerate(cells) if cell])
        there = [cell for cell in cells if cell]
        label = shorten(column.name, _NAME)
        if not there:
            axes.bar([0], [0], color=colour, label=label)
            continue
        heights = np.array([cell.accuracy for cell in there])
        low = np.array([cell.interval.low if cell.interval else cell.accuracy for cell in there])
        high = np.array([cell.interval.high if cell.interval else cell.accuracy for cell in there])
        lines = {"elinewidth": 1, "capsize": 2, "ecolor": "black"}
        errors = 100 * np.clip([heights - low, high - heights], 0, None) if (high > low).any() else None
        axes.bar(places + _shift(number, len(table)), 100 * heights, _width(len(table)), color=colour, label=label,
                 yerr=errors, error_kw=lines)  # fmt: skip
    axes.set_xticks(range(len(titles)), titles, parse_math=False)
    axes.set_xlim(-0.6, len(titles) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("top-1 accuracy, %")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.figure.legend(loc="outside lower center", ncols=min(3, len(table)), frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _width(num_columns: int) -> float:
    return 0.84 / num_columns


def _shift(number: int, num_columns: int) -> float:
    return (number - (num_columns - 1) / 2) * _width(num_columns)


def _colours(table: Sequence[Column]) -> list[str]:
    ours = [column for column in table if column.facts]
    colours = [_OURS[i % len(_OURS)] for i in range(len(ours))]
    return colours + [_PAPER[i % len(_PAPER)] for i in range(len(table) - len(ours))]
