"""Two or more runs side by side: what differs in their settings, their scores of each class, their losses in one figure."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline import schema
from pipeline.config import RunConfig
from pipeline.data.manifest import replacing
from pipeline.errors import UserError
from pipeline.evaluate import render, report
from pipeline.outputs import try_output
from pipeline.page import Block, Heading, Paragraph, Picture, Table, markdown, single_file
from pipeline.suite_config import CompareConfig
from pipeline.weights_config import ScoreConfig

_OF_CLASS = ("precision", "recall", "f1")
_SUMS = {"top1": "top-1", "top5": "top-5", "macro_precision": "precision, mean over classes",
         "macro_recall": "recall, mean over classes", "macro_f1": "F1, mean over classes"}  # fmt: skip
_MAX_LISTED = 30
# Training losses are drawn as running means over so much of a run.
_SMOOTH = 0.02


@dataclass(frozen=True)
class Run:
    """name: as the comparison calls it. settings: by dotted name. metrics: name -> (steps, values), both (n,)."""

    name: str
    folder: Path
    settings: dict[str, Any]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]


def run(config: CompareConfig) -> dict[str, dict[str, Any]]:
    """Score every run on the same split, write the comparison, print its table; returns run -> its scores.

    Raises UserError for what is no run, and for runs that are not of the same data.
    """
    runs = [read_run(Path(folder)) for folder in config.runs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise UserError(f"these runs have one name: {', '.join(names)}. A comparison could not tell them apart.")
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
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replacing(folder / name) as file:
            file.write(content)
    print(f"comparison: {folder / 'report.md'}")
    return scores


def read_run(folder: Path) -> Run:
    """A run from its folder's config.json and metrics.jsonl. Raises UserError when it has none."""
    try:
        tree = json.loads((folder / "config.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no run that has begun: {Path(error.filename).name} is not there.") from None
    settings = schema.flatten(schema.to_dict(schema.build(RunConfig, tree, str(folder / "config.json"))))
    by_name: dict[str, dict[int, float]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # A kill cut it short; what came after says the step again.
        for name, value in record["metrics"].items():
            # A step that was done again after a crash counts as it was done last.
            by_name.setdefault(name, {})[record["step"]] = float(value)
    metrics = {
        name: (np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for name, values in by_name.items()
    }
    return Run(folder.resolve().name, folder, settings, metrics)


def differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """(setting, its value in each run) where runs differ; their names are no difference."""
    return [
        (key, *(str(run.settings[key]) for run in runs))
        for key in runs[0].settings
        if key != "name" and len({str(run.settings[key]) for run in runs}) > 1
    ]


def class_rows(scores: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each class: its name and support, and each run's precision, recall and F1."""
    rows = []
    for of_class in zip(*(of_run["per_class"] for of_run in scores.values()), strict=True):
        row = {"class": of_class[0]["class"], "support": of_class[0]["support"]}
        for name, values in zip(scores, of_class, strict=True):
            row |= {f"{name} {key}": values[key] for key in _OF_CLASS}
        rows.append(row)
    return rows


def page(runs: Sequence[Run], scores: dict[str, dict[str, Any]], curves: bytes) -> list[Block]:
    """The comparison's page."""
    names = list(scores)
    sums = [(text, *(f"{100 * scores[name][key]:.2f}" for name in names)) for key, text in _SUMS.items()]
    sums.append(("loss", *(f"{scores[name]['loss']:.4f}" for name in names)))
    speeds = [run.metrics.get("images_per_second") for run in runs]
    sums.append(
        ("images/s in training, median", *("not logged" if s is None else f"{np.median(s[1]):,.1f}" for s in speeds))
    )
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
        Heading("What differs in their settings"),
        Table(("setting", *names), changed) if changed else Paragraph("Nothing but their names."),
        Heading("Classes"),
        Paragraph(f"From where {second} has the larger F1 to where {first} has{left}. In per cent."),
        Table(header, classes),
    ]


def draw_losses(runs: Sequence[Run]) -> bytes:
    """A PNG: training losses as running means, evaluation losses as points, a colour for each run."""
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the values around each, fewer at the ends; what is no number is left out."""
    window = max(1, round(_SMOOTH * len(values))) | 1
    ones, there = np.ones(window), np.isfinite(values)
    sums = np.convolve(np.where(there, values, 0), ones, "same")
    return sums / np.maximum(np.convolve(there, ones, "same"), 1e-9)
