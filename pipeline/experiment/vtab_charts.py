"""Bar charts of VTAB-1k scores."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, add_legend, png, style_axes
from pipeline.base.words import shorten
from pipeline.experiment.score_table import MEMBERS, OVERALL, Column, unpublished_warning
from pipeline.experiment.vtab_tasks import GROUPS, TASKS

# Greys for the paper's columns.
_PAPER = ("0.35", "0.55", "0.75")


def draw_tasks(table: Sequence[Column]) -> bytes:
    """PNG of a bar with its interval for each task and column; a task without a score has no bar."""
    titles = {task.name: f"{task.title} ({task.group[:2]}.)" for task in TASKS}
    return _draw(table, titles, (15, 5.5), "top-1 accuracy on each test split")


def draw_means(table: Sequence[Column]) -> bytes:
    """PNG of the means of groups and of all tasks; an incomplete mean has no bar."""
    titles = {name: f"{name} ({len(MEMBERS[name])})" for name in GROUPS} | {OVERALL: "all 19 tasks"}
    return _draw(table, titles, (9, 5), "unweighted means over tasks")


def _draw(table: Sequence[Column], titles: Mapping[str, str], size: tuple[float, float], shown: str) -> bytes:
    """titles: of tasks or means, in the order of the bars."""
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.add_subplot()
    width, num_ours = 0.84 / len(table), sum(bool(column.facts) for column in table)
    for number, column in enumerate(table):
        known = {**column.tasks, **column.means}
        scores = {place: known[name] for place, name in enumerate(titles) if name in known}
        heights = np.array([score.accuracy for score in scores.values()])
        ends = [(s.interval.low, s.interval.high) if s.interval else (s.accuracy,) * 2 for s in scores.values()]
        errors = np.abs(np.array(ends).reshape(-1, 2).T - heights)
        colour = COLOURS[number % len(COLOURS)] if column.facts else _PAPER[(number - num_ours) % len(_PAPER)]
        places = np.array(list(scores)) + (number - (len(table) - 1) / 2) * width
        label = shorten(column.name, 40)
        look = {"elinewidth": 1, "capsize": 2, "ecolor": "black"}
        bars = 100 * errors if errors.any() else None
        axes.bar(places, 100 * heights, width, color=colour, label=label, yerr=bars, error_kw=look)
    axes.set_xticks(range(len(titles)), list(titles.values()), parse_math=False, rotation=45, ha="right")
    axes.set_xlim(-0.6, len(titles) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("top-1 accuracy, %")
    unpublished = dict.fromkeys(name for column in table for name in column.unpublished)
    axes.set_title("\n".join([f"VTAB-1k: {shown}", *unpublished_warning(list(unpublished))]))
    style_axes(axes, "y")
    add_legend(figure, loc="outside lower center", ncols=min(3, len(table)))
    return png(figure)
