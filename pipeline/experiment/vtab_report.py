"""The report of VTAB-1k sweeps beside the paper's scores: Markdown, HTML, CSV, bar charts, and an MLflow run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline.base.files import as_csv
from pipeline.base.page import (
    COLOURS,
    Block,
    Heading,
    Paragraph,
    PngImage,
    Table,
    add_legend,
    markdown,
    png,
    report,
    style_axes,
)
from pipeline.base.words import counted, shorten
from pipeline.data.storage.atomic import write_files
from pipeline.evaluate.intervals import OVER_SAMPLES, OVER_SEEDS
from pipeline.experiment.published import PAPER, PROTOCOL, RESNET, SOURCE
from pipeline.experiment.score_table import (
    MEMBERS,
    OVERALL,
    UNPUBLISHED_TAG,
    Column,
    TableScore,
    columns,
    unpublished_warning,
)
from pipeline.experiment.vtab_tasks import GROUPS, TASKS
from pipeline.monitor.mlflow.state import sent_to
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import send_report
from pipeline.process.outputs import hold, try_output
from pipeline.settings import schema
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
    title, blocks = titled(table)
    # scores.csv first: with report.html alone, the folder would be one of launch/report.py.
    files: dict[str, bytes | str | None] = {"scores.csv": as_csv(_scores(table)), **report(title, blocks)}
    write_files(folder, files, mark="report.html")
    print(f"{summary(table[0])}\nreport: {folder / 'report.md'}")
    if config.mlflow:
        metrics, tags = for_mlflow(table[0])
        paths = [folder / name for name in files]
        if parent := sent_to(first, config.mlflow).run_id:  # Shown below the run of the sweep.
            tags["mlflow.parentRunId"] = parent
        facts = RunFacts(title, "vtab", tags=tags, score="vtab_mean", scored_on="VTAB-1k")
        send_report(config.mlflow, folder, facts, metrics, paths, "vtab")
    return table


def summary(column: Column) -> str:
    """The scores of a sweep, with its caveats, as Markdown."""
    return markdown(column.name, [*map(Paragraph, caveats(column)), score_table([column])])


def titled(table: Sequence[Column]) -> tuple[str, list[Block]]:
    """Returns (title, blocks) of the report."""
    return f"VTAB-1k: {table[0].name}", list(_page(table))


def _page(table: Sequence[Column]) -> Iterator[Block]:
    ours = [column for column in table if column.facts]
    for column in ours:
        for line in caveats(column):
            yield Paragraph(line)
    protocols = {(column.facts["protocol"]["sha256"], column.facts["method"]) for column in ours}
    if len(protocols) > 1:
        yield Paragraph("These sweeps were made by different protocols: their numbers are not of one kind.")
    if differing := _of_other_data(ours):
        yield Paragraph(
            "The data of the sweeps differ (their fingerprints are below), so these scores cannot be compared:"
            f" {', '.join(differing)}."
        )
    yield score_table(table)
    yield Paragraph(
        "Top-1 accuracy in per cent, on all images of each test split; means are unweighted over tasks."
        f" {about_intervals(ours)}"
    )
    runs = "; ".join(f"{column.name} {column.mean_of_runs:.2f} ± {column.deviation:.2f}" for column in PAPER)
    yield Paragraph(
        f"The paper's columns: {SOURCE} (mean of 19: {runs}; {RESNET}), by its own protocol: {PROTOCOL}. Their group"
        " means are computed from its tasks."
    )
    yield PngImage("means.png", "Means of the three groups of tasks, and of all", _draw_means(table))
    yield PngImage("tasks.png", "Accuracy on each of the 19 tasks", _draw_tasks(table))
    for column in ours:
        yield from origin(column)


def score_table(table: Sequence[Column]) -> Table:
    """Tasks by group, each with its mean; the overall mean; the mean of the tasks that all columns have."""
    rows: list[list[str]] = []
    bold = set()
    for group in GROUPS:
        for task in TASKS:
            if task.group == group:
                rows.append([task.title, *(_score_text(column, task.name) for column in table)])
        bold.add(len(rows))
        rows.append([f"{group} (mean of {len(MEMBERS[group])})", *(_mean(column, group) for column in table)])
    bold.add(len(rows))
    rows.append([OVERALL, *(_mean(column, OVERALL) for column in table)])
    common = [task.name for task in TASKS if all(task.name in column.tasks for column in table)]
    if 0 < len(common) < len(TASKS):
        bold.add(len(rows))
        means = (
            f"{100 * float(np.mean([column.tasks[name].accuracy for name in common])):.2f}{column.mark(*common)}"
            for column in table
        )
        rows.append([f"mean of the {counted(len(common), 'task')} that all have", *means])
    return Table(["task", *(column.name for column in table)], rows, frozenset(bold))


def _of_other_data(ours: Sequence[Column]) -> list[str]:
    """Titles of the tasks that two sweeps scored on different data sets."""
    data = {
        task: {column.facts["data"].get(task.name) for column in ours if task.name in column.tasks} for task in TASKS
    }
    return [task.title for task, fingerprints in data.items() if len(fingerprints - {None}) > 1]


def caveats(column: Column) -> Iterator[str]:
    """Lines that say which scores are not VTAB's, and which tasks have none and why."""
    for line in unpublished_warning(column.unpublished):
        yield f"{column.name}: {line}"
    if not column.absent:
        return
    reasons = dict.fromkeys(column.facts["missing"], "not prepared")
    reasons |= {cell["task"]: "failed" for cell in column.facts["failed"]}
    listed = ", ".join(
        f"{task.title} ({reasons.get(task.name, 'not run')})" for task in TASKS if task.name in column.absent
    )
    yield f"{column.name} is not complete, and a mean over an incomplete group is not shown. Without a score: {listed}."


def origin(column: Column) -> Iterator[Block]:
    """The origin of a column: protocol, checkpoint, data, copies of test images."""
    facts = column.facts
    protocol, checkpoint = facts["protocol"], facts["checkpoint"]
    yield Heading(f"What {column.name} was made of")
    settings = [(k, str(value)) for k, value in schema.flatten(protocol).items() if k not in ("name", "sha256")]
    yield Table(
        ["", "value"],
        [
            ("method", facts["method"]),
            ("protocol", protocol["name"]),
            ("protocol's sha256", protocol["sha256"]),
            *((name, str(facts.get(name, "not known"))) for name in ("precision", "micro_batch")),
            ("checkpoint", checkpoint["path"]),
            ("checkpoint's sha256", checkpoint["sha256"]),
            ("pre-training run", checkpoint.get("run_id") or "not known"),
            *settings,
        ],
    )
    if facts["failed"]:
        reasons = (f"{cell['task']}, seed {cell['seed']}: {cell.get('reason', 'unknown')}" for cell in facts["failed"])
        yield Paragraph(f"Runs that failed, which count nowhere: {'; '.join(reasons)}.")
    rows = []
    for task in TASKS:
        if (score := column.tasks.get(task.name)) is None:
            continue
        copies = (facts["contamination"] or {}).get(task.name)
        rows.append(
            (
                task.title,
                facts["details"].get(task.name, ""),
                f"{score.num_seeds}",
                f"{score.num_test:,}",
                "not searched" if copies is None else f"{copies:,}",
                facts["data"].get(task.name, "")[:16],
            )
        )
    header = ("task", "chosen", "seeds", "test images", "copies of these in pre-training data", "data fingerprint")
    yield Table(header, rows)


def _scores(table: Sequence[Column]) -> Iterator[tuple[Any, ...]]:
    """Rows of scores.csv, with a row for each task and mean of each column, in per cent; unknown values are empty."""
    header = ("model", "kind", "name", "group", "accuracy", "low", "high", "interval", "seeds", "test_images")
    yield (*header, "published_files")
    for column in table:
        for task in TASKS:
            if score := column.tasks.get(task.name):
                values = (*_csv_values(score), int(not column.mark(task.name)))
                yield (column.name, "task", task.name, task.group, *values)
        for name, score in column.means.items():
            values = (*_csv_values(score), int(not column.mark(name)))
            yield (column.name, "mean", "all" if name == OVERALL else name, "", *values)


def for_mlflow(column: Column) -> tuple[dict[str, float], dict[str, str]]:
    """Returns (metrics, tags) of a sweep: accuracies of tasks and means; its origin, and the pre-training run."""
    metrics = {f"task_{name}": score.accuracy for name, score in column.tasks.items()}
    metrics |= {
        "vtab_mean" if name == OVERALL else f"vtab_{name}": score.accuracy for name, score in column.means.items()
    }
    metrics["tasks_scored"] = len(column.tasks)
    facts = column.facts
    tags = tags_of(facts)
    if run_id := facts["checkpoint"].get("run_id"):
        # With the second tag MLflow shows it below the pre-training run, if both are in one store.
        tags |= {"pretraining_run_id": run_id, "mlflow.parentRunId": run_id}
    return metrics, tags


def tags_of(facts: dict[str, Any]) -> dict[str, str]:
    """Tags that say what a sweep was made of. facts: content of its results.json."""
    copies = [count for count in (facts["contamination"] or {}).values() if count is not None]
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


def _score_text(column: Column, task: str) -> str:
    """Scores of other files than the published ones are marked."""
    score = column.tasks.get(task)
    if score is None:
        return "–"
    text = f"{100 * score.accuracy:.1f}{column.mark(task)}"
    if score.interval is None:
        return text
    return f"{text} [{100 * score.interval.low:.1f}, {100 * score.interval.high:.1f}]"


def _mean(column: Column, name: str) -> str:
    if score := column.means.get(name):
        interval = f" [{100 * score.interval.low:.2f}, {100 * score.interval.high:.2f}]" if score.interval else ""
        return f"{100 * score.accuracy:.2f}{column.mark(name)}{interval}"
    names = MEMBERS[name]
    return f"– ({sum(task in column.tasks for task in names)} of {len(names)})"


def about_intervals(ours: Sequence[Column]) -> str:
    """A sentence that says how the intervals of these columns were made; "" if they have none."""
    kinds = {score.interval.over for column in ours for score in column.tasks.values() if score.interval}
    texts = {
        OVER_SEEDS: "Student's t over the seeds, of a mean over each seed's mean, without the noise of the test images",
        OVER_SAMPLES: (
            "Wilson's over the test images of one run, of a mean by the sum of the tasks' variances, without that of"
            " the seed"
        ),
    }
    used = [text for kind, text in texts.items() if kind in kinds]
    return f"Brackets are 95 % intervals: {'; or '.join(used)}." if used else ""


def _csv_values(score: TableScore) -> tuple[Any, ...]:
    interval = score.interval
    spread = (f"{100 * interval.low:.4f}", f"{100 * interval.high:.4f}", interval.over) if interval else ("", "", "")
    return (f"{100 * score.accuracy:.4f}", *spread, score.num_seeds or "", score.num_test or "")


# -------------------------------------------------------------------- charts
# Greys for the paper's columns.
_PAPER = ("0.35", "0.55", "0.75")


def _draw_tasks(table: Sequence[Column]) -> bytes:
    """PNG of a bar with its interval for each task and column; a task without a score has no bar."""
    titles = {task.name: f"{task.title} ({task.group[:2]}.)" for task in TASKS}
    return _draw(table, titles, (15, 5.5), "top-1 accuracy on each test split")


def _draw_means(table: Sequence[Column]) -> bytes:
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
