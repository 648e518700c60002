"""Compares two or more runs: differing settings, scores per class, and losses in one figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline import json_record
from pipeline.data.storage.whole import write_files
from pipeline.errors import UserError
from pipeline.evaluate import architecture, render, report
from pipeline.monitor.metrics_file import by_name, read_metrics
from pipeline.outputs import try_output
from pipeline.page import Block, Heading, Paragraph, Picture, Table, markdown, png, single_file
from pipeline.settings import schema
from pipeline.settings.reports import CompareConfig
from pipeline.settings.run import RunConfig
from pipeline.settings.weights import ScoreConfig

_OF_CLASS = ("precision", "recall", "f1")
_MAX_LISTED = 30
# With fewer log lines the median says little, because the first ones are slow.
_MIN_SPEEDS = 5
# Window of the running mean of training losses, as a share of the run.
_SMOOTH = 0.02


@dataclass(frozen=True)
class Run:
    """settings: by dotted name; `model.*` is the architecture as built. metrics: name -> (steps, values), (n,) each."""

    name: str
    folder: Path
    settings: dict[str, Any]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]


def run(config: CompareConfig) -> dict[str, dict[str, Any]]:
    """Score the runs on the same split, write the comparison and print its table; returns run name -> scores.

    Raises UserError for a folder that is not a run, and for runs on different data.
    """
    runs = [read_run(Path(folder)) for folder in config.runs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise UserError(f"these runs have the same name: {', '.join(names)}. A comparison could not tell them apart.")
    for key in ("data.path", "data.eval_split"):
        if len(values := {run.settings[key] for run in runs}) > 1 and not (key == "data.eval_split" and config.split):
            raise UserError(
                f"these runs differ in {key}: {', '.join(map(str, sorted(values)))}. Compare runs of one data set."
            )
    data, split = runs[0].settings["data.path"], config.split or runs[0].settings["data.eval_split"]
    folder = Path(config.out) if config.out else Path("runs") / "compare" / "-".join(names)
    try_output("out", folder)
    scores = {}
    for run in runs:
        print(f"{run.name}:")
        settings = [f"weights={run.folder}", f"data={data}", f"split={split}", "shots=0", f"batch={config.batch}",
                    f"threads={config.threads}"]  # fmt: skip
        scores[run.name] = report.run(schema.load(ScoreConfig, None, settings))
    curves = draw_losses(runs)
    title = f"{' against '.join(names)} on {data}, split {split}"
    blocks = page(runs, scores, curves)
    files = {
        "report.md": markdown(title, blocks).encode(),
        "report.html": single_file(title, blocks).encode(),
        "losses.png": curves,
        "per_class.csv": render.table_csv(class_rows(scores)),
    }
    write_files(folder, files)
    print(f"comparison: {folder / 'report.md'}")
    return scores


def read_run(folder: Path) -> Run:
    """Read a run from its folder; prints the number of damaged metrics lines. Raises UserError for a missing file."""
    file, records_file = folder / "config.json", folder / "metrics.jsonl"
    for needed in (file, records_file):
        if not needed.exists():
            raise UserError(f"{folder} is not the folder of a started run: {needed.name} is missing.")
    tree = json_record.read(file, dict[str, Any])
    records, num_damaged = read_metrics(records_file)
    if num_damaged:
        print(f"{records_file}: {num_damaged:,} damaged lines are ignored")
    settings = schema.flatten(schema.to_dict(schema.build(RunConfig, tree, str(file))))
    if (resolved := architecture.of_run(folder)) is not None:
        settings = {name: value for name, value in settings.items() if not name.startswith("model.")} | resolved
    metrics = {
        name: (np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for name, values in by_name(records).items()
    }
    return Run(folder.resolve().name, folder, settings, metrics)


def differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Rows (setting, value in each run) of the settings that differ, other than the name."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "name")
    rows = [(key, *(str(run.settings.get(key, "-")) for run in runs)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def speed(run: Run) -> str:
    """The median training speed and its number of log lines; no number for fewer than five."""
    _, speeds = run.metrics.get("images_per_second", ((), ()))
    if len(speeds) < _MIN_SPEEDS:
        return f"{len(speeds)} log lines, too few" if len(speeds) else "not logged"
    return f"{np.median(speeds):,.1f} of {len(speeds):,}"


def class_rows(scores: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per class: name, support, and precision, recall and F1 of each run."""
    rows = []
    for of_class in zip(*(of_run["per_class"] for of_run in scores.values()), strict=True):
        row = {"class": of_class[0]["class"], "support": of_class[0]["support"]}
        for name, values in zip(scores, of_class, strict=True):
            row |= {f"{name} {key}": values[key] for key in _OF_CLASS}
        rows.append(row)
    return rows


def page(runs: Sequence[Run], scores: dict[str, dict[str, Any]], curves: bytes) -> list[Block]:
    """The page of the comparison."""
    names = list(scores)
    sums = [(text, *(f"{100 * scores[name][key]:.2f}" for name in names)) for key, text in render.SCORES.items()]
    sums.append(("loss", *(f"{scores[name]['loss']:.4f}" for name in names)))
    sums.append(("images/s in training, median of log lines", *map(speed, runs)))
    first, second = names[:2]
    rows = sorted(class_rows(scores), key=lambda row: row[f"{first} f1"] - row[f"{second} f1"])
    shown = rows if len(rows) <= _MAX_LISTED else [*rows[: _MAX_LISTED // 2], *rows[-_MAX_LISTED // 2 :]]
    classes = [
        (
            row["class"],
            *(f"{100 * row[f'{name} {key}']:.1f}" for key in _OF_CLASS for name in names),
            f"{row['support']:,}",
        )
        for row in shown
    ]
    header = ("class", *(f"{'F1' if key == 'f1' else key}, {name}" for key in _OF_CLASS for name in names), "images")
    left = f"; {len(shown)} of {len(rows)} classes, all are in per_class.csv" if len(shown) < len(rows) else ""
    changed = differences(runs)
    return [
        Table(("score, %", *names), sums),
        Picture("losses.png", "Loss of each run over its steps, in training and on the evaluation split", curves),
        Heading("Differing settings"),
        Table(("setting", *names), changed) if changed else Paragraph("None but their names."),
        Heading("Classes"),
        Paragraph(f"Sorted by F1 of {first} minus F1 of {second}{left}. In per cent."),
        Table(header, classes),
    ]


def draw_losses(runs: Sequence[Run]) -> bytes:
    """A PNG: training losses with their running mean, evaluation losses as points, one colour per run."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        colour = f"C{number}"
        if "loss" in run.metrics:
            steps, losses = run.metrics["loss"]
            axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, _smooth(losses), color=colour, label=f"{run.name}, training")
        split = f"{'dev' if run.settings['data.dev_share'] else run.settings['data.eval_split']}_loss"
        if split in run.metrics:
            axes.plot(
                *run.metrics[split], "o--", color=colour, markersize=4, linewidth=0.8, label=f"{run.name}, {split[:-5]}"
            )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_lines():
        for text in axes.legend(frameon=False).get_texts():
            text.set_parse_math(False)
    return png(figure)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred running mean; the window is cut at the ends, and non-finite values are ignored."""
    window = max(1, round(_SMOOTH * len(values))) | 1
    ones, there = np.ones(window), np.isfinite(values)
    sums = np.convolve(np.where(there, values, 0), ones, "same")
    return sums / np.maximum(np.convolve(there, ones, "same"), 1e-9)
