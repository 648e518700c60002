"""Renders scores: report.md, the confusion matrix as a figure, and lines for the terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from pipeline.base.page import COLOURS, Block, Heading, Paragraph, Table, png, style_axes
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted, shorten, significant
from pipeline.data.dataset.split import NOTHING_EXCLUDED
from pipeline.evaluate.intervals import of_samples
from pipeline.evaluate.regression import ENDS

_ACCURACIES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}
_MEANS = {
    "macro_precision": "precision, mean over classes",
    "macro_recall": "recall, mean over classes",
    "macro_f1": "F1, mean over classes",
}
# Scores of numbers -> how they are called, and shown.
_OF_NUMBERS = {
    "r2": ("R²", ".4f"),
    "rmse": ("RMSE", ".4g"),
    "mae": ("MAE", ".4g"),
    "spearman": ("Spearman correlation", ".4f"),
}
_COUNTS = {
    "num_samples": "images",
    "num_groups": "groups of them",
    "num_unreadable": "unreadable images ({})",
    "num_unlabelled": "images without a label (counted as wrong)",
}
_MAX_LISTED = 30
SCATTER = "Predicted against true values, with the line on which they are equal"
CONFUSION = "Confusion matrix: each row is a true class, each cell its share predicted as the column's"
_MAX_DRAWN, _MAX_ANNOTATED, _MAX_SCATTERS = 50, 20, 12


def summary(scores: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of each score in `scores`, as lines for the terminal."""
    rows: list[tuple[str, str]] = []
    over = "groups" if "num_groups" in scores else "images"
    if "map" in scores:
        rows += _with_interval("mAP, mean average precision over labels", [scores["map" + end] for end in ENDS], over)
    of_targets = scores.get("per_target", [])
    if len(of_targets) > 1:
        rows += [
            (f"{_OF_NUMBERS[name][0]}, mean over targets", _in_brackets(name, scores)) for name in ("r2", "spearman")
        ]
    for of in of_targets:
        rows += [(f"{of['target']}: {text}", _in_brackets(name, of)) for name, (text, _) in _OF_NUMBERS.items()]
        missing = scores["num_samples"] - scores["num_unreadable"] - of["num_values"]
        rows += [(f"{of['target']}: missing values (not scored)", f"{missing:,}")] if missing else []
    if of_targets:
        rows.append(("in brackets: 95 % intervals over", over))
    for name, text in _ACCURACIES.items():
        if name in scores:
            of = {"top1": scores[name], "effective_images": scores.get(f"{name}_effective_images")}
            rows += _accuracy(text, of, scores)
    if "linear" in scores:
        rows += _accuracy(f"linear layer, out of {scores['linear']['folds']} folds", scores["linear"], scores)
    if "per_label" in scores:
        rows.append(("F1 of labels above 0.5, mean", f"{scores['label_f1']:.2%}"))
    else:
        rows += [(text, f"{scores[name]:.2%}") for name, text in _MEANS.items() if name in scores]
    if "loss" in scores:
        rows.append((f"loss ({scores['loss_kind']})", f"{scores['loss']:.4f}"))
    for row in scores.get("fewshot", []):
        rows += _accuracy(f"{row['shots']}-shot linear accuracy, λ = {row['l2']:g}", row, scores)
        if row["std"] is not None:
            seeds = counted(len(row["top1_of_seeds"]), "seed")
            rows.append((f"  its standard deviation over {seeds}", f"{row['std']:.2%}"))
    if "knn" in scores:
        text = f"accuracy of {scores['knn']['neighbours']} nearest neighbours"
        rows += _accuracy(text, scores["knn"], scores)
    if "spread" in scores:
        found = scores["spread"]
        most, images = min(found["images"], found["dimensions"]), counted(found["images"], "image")
        rows.append((f"RankMe of {images}, at most {most:,}", f"{found['rankme']:.4g}"))
        rows.append(("standard deviation of their features", f"{found['feature_std']:.4g}"))
    treated = "not scored" if "per_target" in scores else "counted as wrong"
    rows += [(text.format(treated), f"{scores[name]:,}") for name, text in _COUNTS.items() if scores.get(name)]
    rows.append(("images/s", significant(scores["images_per_second"])))
    return rows


def _with_interval(text: str, found: Sequence[float], over: str) -> Iterator[tuple[str, str]]:
    """The rows of a score and its interval, if there is one. found: score, low, high."""
    value, low, high = found
    yield text, f"{value:.2%}"
    if not math.isnan(low):
        yield f"  its 95 % interval over {over}", f"{low:.2%} to {high:.2%}"


def _in_brackets(name: str, scores: Mapping[str, Any]) -> str:
    """A score of numbers and its interval."""
    form = _OF_NUMBERS[name][1]
    value, low, high = (scores[name + end] for end in ENDS)
    return f"{value:{form}}" + (f" [{low:{form}}, {high:{form}}]" if not math.isnan(low) else "")


def _accuracy(text: str, of: Mapping[str, Any], scores: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows of an accuracy and its interval, Wilson's; of a mean over seeds it is too wide rather than too narrow.

    of: top1, and effective_images, of images in groups their `effective_number`.
    """
    value, effective = of["top1"], of.get("effective_images")
    found = of_samples(value, effective or scores["num_samples"])
    low = math.nan if math.isnan(value) else found.low
    return _with_interval(text, (value, low, found.high), "groups" if effective else "images")


def page(scores: dict[str, Any], of_mistakes: Sequence[Block]) -> tuple[str, list[Block]]:
    """The title and the content of the report. of_mistakes: of `mistakes.blocks`."""
    trained = scores.get(TRAINED_BY)
    warning = [Paragraph(f"Note: {not_held_out(scores['split'], trained)}.")] if trained else []
    blocks: list[Block] = [*warning, Table(("score", "value"), summary(scores)), *of_mistakes]
    if "per_class" in scores:
        blocks += _lowest(scores)
    blocks += [Heading("How it was measured"), Paragraph(_how(scores))]
    return f"{scores['weights']} on {scores['data']}, split {scores['split']}", blocks


def _lowest(scores: dict[str, Any]) -> list[Block]:
    """The classes with the lowest F1, or the labels with the lowest average precision."""
    table, what, by, count = "per_class", "class", "f1", "support"
    columns = ["precision", "recall", "f1"]
    if "per_label" in scores:
        table, what, by, count = "per_label", "label", "average_precision", "images"
        columns = [by, *columns]
    tested = sorted((row for row in scores[table] if row[count]), key=lambda row: row[by])
    rows = [
        (row["class"], *(f"{row[column]:.1%}" for column in columns), f"{row[count]:,}") for row in tested[:_MAX_LISTED]
    ]
    about = f"By {by}: {len(rows)} of {counted(len(tested), what)} with images; all are in {table}.csv."
    return [Heading("Lowest scores"), Paragraph(about), Table((what, *columns, "images"), rows)]


def _how(scores: dict[str, Any]) -> str:
    origin = f"Run {scores['run']}, step {scores['step']:,}. " if scores["run"] and scores["step"] is not None else ""
    excluded = "" if scores["excluded"] == NOTHING_EXCLUDED else f"Excluded from the split: {scores['excluded']}. "
    probed = ""
    if "probe_split" in scores:
        probed = f"Features (the head's input) are fitted to split {scores['probe_split']}. "
    learned = f"numbers: {', '.join(scores['targets'])}" if "targets" in scores else ""
    return (
        f"{origin}Data {scores['fingerprint']}, {learned or counted(scores['num_classes'], 'class')}."
        f" {excluded}{probed}Images at {scores['image_size']} pixels: eval_crop = {scores['eval_crop']}, eval_resize ="
        f" {scores['eval_resize']}, resize_filter = {scores['resize_filter']}. Computed in {scores['precision']} on"
        f" {scores['device']}."
    )


# ---------------------------------------------------------------------- numbers
def draw_scatter(predicted: np.ndarray, true: np.ndarray, names: Sequence[str]) -> bytes:
    """A PNG of the predicted against the true values, (n, T), NaN where there is none, of the first targets. names: of
    all targets.
    """
    shown = min(len(names), _MAX_SCATTERS)
    columns = min(3, shown)
    rows = -(-shown // columns)
    figure = Figure(figsize=(4.3 * columns, 4.4 * rows), dpi=110, layout="constrained")
    for place, name in enumerate(names[:shown]):
        axes = figure.add_subplot(rows, columns, place + 1)
        known = np.isfinite(predicted[:, place]) & np.isfinite(true[:, place])
        x, y = (values[known, place].astype(np.float64) for values in (true, predicted))
        if known.any():
            axes.axline((x[0], x[0]), slope=1, color="0.6", linewidth=1, zorder=1)
            axes.scatter(x, y, 8, COLOURS[0], alpha=0.4, linewidth=0, zorder=2)
        axes.set_xlabel(f"true {name}", parse_math=False)
        axes.set_ylabel(f"predicted {name}", parse_math=False)
        axes.set_aspect("equal")
        style_axes(axes)
    caption = f"The first {shown} of {len(names)} targets" if shown < len(names) else ""
    return png(figure, caption=caption)


# ---------------------------------------------------------------------- the confusion matrix
def draw_confusion(true: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> bytes | None:
    """A PNG of the confusion matrix: true classes in rows, predicted ones in columns, with counts for up to 20 classes.

    A cell's colour is its share of the true class. true, predicted: int64 (n,), from `outcomes`; unreadable images and
    samples without labels are ignored. names: of all K classes; None for more than 50.
    """
    if len(names) > _MAX_DRAWN:
        return None
    seen = (true >= 0) & (predicted >= 0)
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (true[seen], predicted[seen]), 1)
    shares = counts / np.maximum(counts.sum(1), 1)[:, None]
    annotated = len(names) <= _MAX_ANNOTATED
    side = max(4.0, (0.55 if annotated else 0.26) * len(names) + 2.0)
    figure = Figure(figsize=(side + 0.8, side), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    # Square root scale, so that a share of 2 % is visible beside a diagonal near 1.
    cells = axes.pcolormesh(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), edgecolors="0.9", linewidth=0.5)
    ticks = [0, 0.01, 0.05, 0.25, 0.5, 1]
    bar = figure.colorbar(cells, ax=axes, shrink=0.8, ticks=ticks)
    bar.ax.set_yticklabels([f"{tick:.0%}" for tick in ticks])
    short, places = [shorten(name) for name in names], np.arange(len(names)) + 0.5
    # A "$" in a name does not start a formula.
    axes.set_xticks(places, short, rotation=90, parse_math=False)
    axes.set_yticks(places, short, parse_math=False)
    title = f"{counted(int(seen.sum()), 'image')}; colour: share of the true class"
    axes.set(xlabel="predicted class", ylabel="true class", title=title, aspect="equal")
    axes.invert_yaxis()
    if annotated:
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.3 else "black"
            place = column + 0.5, row + 0.5
            axes.text(*place, f"{counts[row, column]}", ha="center", va="center", color=colour, fontsize=8)
    return png(figure)
