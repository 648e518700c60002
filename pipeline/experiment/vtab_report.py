"""The report of VTAB-1k sweeps beside the paper's scores: Markdown, HTML, CSV, and bar charts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline.base.files import table_csv
from pipeline.base.page import COLOURS, Paragraph, PngImage, Table, add_legend, markdown, png, render, style_axes
from pipeline.base.words import counted, shorten
from pipeline.data.storage.atomic import write_files
from pipeline.experiment.published import PAPER, PROTOCOL, RESNET, SOURCE
from pipeline.experiment.score_table import (
    MEMBERS,
    OVERALL,
    TITLES,
    UNPUBLISHED_TAG,
    Column,
    columns,
    unpublished_warning,
)
from pipeline.experiment.table import TEMPLATES
from pipeline.experiment.vtab_tasks import GROUPS, TASKS
from pipeline.process.outputs import hold, try_output
from pipeline.settings.commands.reports import VtabReportConfig


def run(config: VtabReportConfig) -> list[Column]:
    """Write the report of `config.sweeps`; returns the columns of its table, ours first.

    Raises UserError for a sweep that cannot be read, before anything is written.
    """
    sweeps = [Path(sweep) for sweep in config.sweeps]
    table = columns(sweeps, config.names)
    first = sweeps[0] if sweeps[0].suffix != ".json" else sweeps[0].parent
    folder = Path(config.out) if config.out else first / "report"
    try_output("out", folder, holds="report of sweeps")
    hold(folder)
    # scores.csv first: with report.html alone, the folder would be one of launch/report.py.
    files = {"scores.csv": table_csv(list(_scores(table))), **page(table)}
    write_files(folder, files, mark="report.html")
    print(f"{summary(table[0])}\nreport: {folder / 'report.md'}")
    return table


def summary(column: Column) -> str:
    """The scores of a sweep, with its caveats, as Markdown."""
    return markdown(column.name, [*map(Paragraph, column.caveats()), score_table([column])])


def page(table: Sequence[Column], pictures: Sequence[PngImage] = ()) -> dict[str, bytes | str | None]:
    """The files of the report. pictures: below the charts."""
    means = {name: f"{name} ({len(members)})" for name, members in MEMBERS.items()}
    tasks = {task.name: f"{task.title} ({task.group[:2]}.)" for task in TASKS}
    charts = [
        PngImage("means.png", "Means of tasks", _draw(table, means, (9, 5), "unweighted means over tasks")),
        PngImage("tasks.png", "Accuracy on each task", _draw(table, tasks, (15, 5.5), "top-1 on each test split")),
    ]
    ours = [column for column in table if column.facts]
    values: dict[str, Any] = {"table": score_table(table), "differing": _of_other_data(ours), "paper": PAPER}
    source = (SOURCE, RESNET, PROTOCOL)
    return render(
        TEMPLATES / "vtab.j2", f"VTAB-1k: {table[0].name}", [*charts, *pictures], columns=ours, source=source, **values
    )


def score_table(table: Sequence[Column]) -> Table:
    """Tasks by group, each with its mean; the overall mean; the mean of the tasks that all columns have."""
    rows: list[list[str]] = []
    bold = set()
    for mean, members in MEMBERS.items():
        if mean in GROUPS:
            rows += [[TITLES[name], *(_text(column, name) for column in table)] for name in members]
        bold.add(len(rows))
        title = f"{mean} (mean of {len(members)})" if mean in GROUPS else mean
        rows.append([title, *(_text(column, mean) for column in table)])
    common = [name for name in TITLES if all(name in column.tasks for column in table)]
    if 0 < len(common) < len(TASKS):
        bold.add(len(rows))
        means = (100 * float(np.mean([column.tasks[name].accuracy for name in common])) for column in table)
        texts = (f"{mean:.2f}{column.mark(*common)}" for mean, column in zip(means, table, strict=True))
        rows.append([f"mean of the {counted(len(common), 'task')} that all have", *texts])
    return Table(["task", *(column.name for column in table)], rows, frozenset(bold))


def _text(column: Column, name: str) -> str:
    """A score of a task, or a mean, with its interval. Scores of other files than the published ones are marked."""
    members = MEMBERS.get(name)
    digits = 2 if members else 1
    if score := (column.tasks | column.means).get(name):
        found = score.interval
        spread = f" [{100 * found.low:.{digits}f}, {100 * found.high:.{digits}f}]" if found else ""
        return f"{100 * score.accuracy:.{digits}f}{column.mark(name)}{spread}"
    return f"– ({sum(task in column.tasks for task in members)} of {len(members)})" if members else "–"


def _of_other_data(ours: Sequence[Column]) -> list[str]:
    """Titles of the tasks that two sweeps scored on different data sets."""
    data = {name: {column.facts["data"].get(name) for column in ours if name in column.tasks} for name in TITLES}
    return [TITLES[name] for name, fingerprints in data.items() if len(fingerprints - {None}) > 1]


def _scores(table: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """Rows of scores.csv, with a row for each task and mean of each column, in per cent; unknown values are empty."""
    groups = {task.name: task.group for task in TASKS}
    for column in table:
        for name, score in (column.tasks | column.means).items():
            interval = score.interval
            yield {
                "model": column.name,
                "kind": "task" if name in groups else "mean",
                "name": "all" if name == OVERALL else name,
                "group": groups.get(name, ""),
                "accuracy": f"{100 * score.accuracy:.4f}",
                "low": f"{100 * interval.low:.4f}" if interval else "",
                "high": f"{100 * interval.high:.4f}" if interval else "",
                "interval": interval.over if interval else "",
                "seeds": score.num_seeds or "",
                "test_images": score.num_test or "",
                "published_files": int(not column.mark(name)),
            }


def metrics_of(column: Column) -> dict[str, float]:
    """Accuracies of tasks and means, for a tracker."""
    metrics = {f"task_{name}": score.accuracy for name, score in column.tasks.items()}
    means = {("mean" if name == OVERALL else name): score for name, score in column.means.items()}
    metrics |= {f"vtab_{name}": score.accuracy for name, score in means.items()}
    return metrics | {"tasks_scored": len(column.tasks)}


def tags_of(facts: dict[str, Any]) -> dict[str, str]:
    """Tags that say what a sweep was made of. facts: content of its results.json."""
    copies = [count for count in facts["contamination"].values() if count is not None]
    return {
        "protocol": facts["protocol"]["name"],
        "protocol_sha256": facts["protocol"]["sha256"],
        "method": facts["method"],
        "checkpoint": str(facts["checkpoint"]["path"]),
        "checkpoint_sha256": str(facts["checkpoint"]["sha256"]),
        "contamination": str(sum(copies)) if copies else "not searched",
        **({UNPUBLISHED_TAG: ",".join(facts["unpublished"])} if facts.get("unpublished") else {}),
        **{f"data.{task}": str(fingerprint) for task, fingerprint in facts["data"].items()},
    }


# -------------------------------------------------------------------- charts
# Greys for the paper's columns.
_PAPER = ("0.35", "0.55", "0.75")


def _draw(table: Sequence[Column], titles: Mapping[str, str], size: tuple[float, float], shown: str) -> bytes:
    """PNG of a bar with its interval for each column and each of the tasks or means that it has. titles: of these."""
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.add_subplot()
    width, colours = 0.84 / len(table), {True: cycle(COLOURS), False: cycle(_PAPER)}
    for number, column in enumerate(table):
        scores = {name: score for name, score in (column.tasks | column.means).items() if name in titles}
        heights = 100 * np.array([score.accuracy for score in scores.values()])
        ends = [(s.interval.low, s.interval.high) if s.interval else (s.accuracy,) * 2 for s in scores.values()]
        errors = np.abs(100 * np.array(ends).reshape(-1, 2).T - heights)
        places = np.array([list(titles).index(name) for name in scores]) + (number - (len(table) - 1) / 2) * width
        look: dict[str, Any] = {"color": next(colours[bool(column.facts)]), "label": shorten(column.name, 40)}
        axes.bar(places, heights, width, yerr=errors if errors.any() else None, capsize=2, **look)
    axes.set_xticks(range(len(titles)), list(titles.values()), parse_math=False, rotation=45, ha="right")
    axes.set_xlim(-0.6, len(titles) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("top-1 accuracy, %")
    unpublished = dict.fromkeys(name for column in table for name in column.unpublished)
    axes.set_title("\n".join([f"VTAB-1k: {shown}", *unpublished_warning(list(unpublished))]))
    style_axes(axes, "y")
    add_legend(figure, loc="outside lower center", ncols=min(3, len(table)))
    return png(figure)
