"""Bar charts of VTAB-1k scores."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, add_legend, png, style_axes
from pipeline.base.words import counted, shorten
from pipeline.transfer.score_table import MEMBERS, OVERALL, Column, TableScore, unpublished_warning
from pipeline.transfer.vtab_tasks import GROUPS, TASKS

# Greys for the paper's columns.
_PAPER = ("0.35", "0.55", "0.75")
_MAX_NAME = 40


def draw_tasks(table: Sequence[Column]) -> bytes:
    """PNG of a bar with its interval for each task and column; a task without a score has no bar."""
    figure = Figure(figsize=(15, 5.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, table, [task.title for task in TASKS], [[column.tasks.get(t.name) for t in TASKS] for column in table])
    ends = np.cumsum([sum(task.group == group for task in TASKS) for group in GROUPS])
    for end in ends[:-1]:
        axes.axvline(end - 0.5, color="0.6", linewidth=0.8)
    for first, end, group in zip([0, *ends[:-1]], ends, GROUPS, strict=True):
        axes.text((first + end - 1) / 2, 101, group, ha="center", va="bottom", color="0.35")
    for label in axes.get_xticklabels():
        label.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
    axes.set_title(f"VTAB-1k: top-1 accuracy on each test split{_caveat(table)}", pad=22)
    return png(figure)


def draw_means(table: Sequence[Column]) -> bytes:
    """PNG of the means of groups and of all tasks; an incomplete mean has no bar, but the number of its tasks."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    names = [*GROUPS, OVERALL]
    rows = [[column.means.get(name) for name in names] for column in table]
    _bars(axes, table, [f"{name} ({len(MEMBERS[name])})" for name in names[:-1]] + ["all 19 tasks"], rows)
    width = _width(len(table))
    for number, column in enumerate(table):
        for place, name in enumerate(names):
            if name not in column.means:
                num_scored = sum(task not in column.absent for task in MEMBERS[name])
                text = f"only {num_scored} of {counted(len(MEMBERS[name]), 'task')}"
                axes.text(
                    place + _shift(number, len(table)),
                    1,
                    text,
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=max(6, 40 * width),
                    color=_colours(table)[number],
                )
    axes.set_title(f"VTAB-1k: unweighted means over tasks{_caveat(table)}")
    return png(figure)


def _caveat(table: Sequence[Column]) -> str:
    tasks = dict.fromkeys(name for column in table for name in column.unpublished)
    return "".join(f"\n{line}" for line in unpublished_warning(list(tasks)))


def _bars(
    axes: Axes, table: Sequence[Column], titles: Sequence[str], rows: Sequence[Sequence[TableScore | None]]
) -> None:
    """rows: for each column of the table, the scores in the order of `titles`."""
    for number, (column, scores, colour) in enumerate(zip(table, rows, _colours(table), strict=True)):
        places = np.array([i for i, score in enumerate(scores) if score])
        scored = [score for score in scores if score]
        label = shorten(column.name, _MAX_NAME)
        if not scored:
            axes.bar([0], [0], color=colour, label=label)
            continue
        heights = np.array([score.accuracy for score in scored])
        low = np.array([score.interval.low if score.interval else score.accuracy for score in scored])
        high = np.array([score.interval.high if score.interval else score.accuracy for score in scored])
        lines = {"elinewidth": 1, "capsize": 2, "ecolor": "black"}
        errors = 100 * np.clip([heights - low, high - heights], 0, None) if (high > low).any() else None
        axes.bar(
            places + _shift(number, len(table)),
            100 * heights,
            _width(len(table)),
            color=colour,
            label=label,
            yerr=errors,
            error_kw=lines,
        )
    axes.set_xticks(range(len(titles)), titles, parse_math=False)
    axes.set_xlim(-0.6, len(titles) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("top-1 accuracy, %")
    style_axes(axes, "y")
    add_legend(axes.figure, loc="outside lower center", ncols=min(3, len(table)))


def _width(num_columns: int) -> float:
    return 0.84 / num_columns


def _shift(number: int, num_columns: int) -> float:
    return (number - (num_columns - 1) / 2) * _width(num_columns)


def _colours(table: Sequence[Column]) -> list[str]:
    ours = [column for column in table if column.facts]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(ours))]
    return colours + [_PAPER[i % len(_PAPER)] for i in range(len(table) - len(ours))]
