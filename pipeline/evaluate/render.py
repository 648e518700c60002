"""Renders scores: report.md, per_class.csv, the confusion matrix as a figure, and lines for the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table, markdown, png
from pipeline.base.trained_on import TRAINED_BY, not_held_out
from pipeline.base.words import counted, shorten
from pipeline.data.dataset.split import NOTHING_EXCLUDED
from pipeline.evaluate.classify import confusion
from pipeline.evaluate.intervals import of_samples

SCORES = {
    "top1": "top-1 accuracy",
    "top5": "top-5 accuracy",
    "macro_precision": "precision, mean over classes",
    "macro_recall": "recall, mean over classes",
    "macro_f1": "F1, mean over classes",
}
_MAX_LISTED, _WORST, _BEST = 30, 15, 5
_MAX_NAMED = 20
_MAX_DRAWN, _MOST_CONFUSED = 50, 30
_MAX_ANNOTATED = 20


def summary(scores: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of each score in `scores`, as lines for the terminal."""
    rows = []
    if "top1" in scores:
        for name, text in SCORES.items():
            if name in scores:
                rows.append((text, f"{scores[name]:.2%}"))
            if name in ("top1", "top5") and name in scores:
                rows += _interval(scores[name], scores, scores.get(f"{name}_effective_images"))
        over = f", of {counted(scores['num_samples'] - scores['num_unreadable'], 'image')}" * bool(
            scores["num_unreadable"]
        )
        if scores["loss_kind"] == "softmax" and scores.get("num_unlabelled"):
            over += ", without those that have no label"
        rows.append((f"loss ({scores['loss_kind']}{over})", f"{scores['loss']:.4f}"))
    several = len({row["l2"] for row in scores.get("fewshot", [])}) > 1
    for row in scores.get("fewshot", []):
        strength = f", λ = {row['l2']:g}" if several else ""
        rows.append((f"{row['shots']}-shot linear accuracy{strength}, mean", f"{row['top1']:.2%}"))
        if row["std"] is not None:
            rows.append(
                (f"  its standard deviation over {counted(len(row['top1_of_seeds']), 'seed')}", f"{row['std']:.2%}")
            )
        rows += _interval(row["top1"], scores, row.get("effective_images"))
    if "knn" in scores:
        rows.append((f"accuracy of {scores['knn']['neighbours']} nearest neighbours", f"{scores['knn']['top1']:.2%}"))
        rows += _interval(scores["knn"]["top1"], scores, scores["knn"].get("effective_images"))
    if "spread" in scores:
        found = scores["spread"]
        most, images = min(found["images"], found["dimensions"]), counted(found["images"], "image")
        rows.append((f"RankMe of {images}, at most {most:,}", f"{found['rankme']:.4g}"))
        rows.append(("standard deviation of their features", f"{found['feature_std']:.4g}"))
    trained = ", which the weights were trained on" * bool(scores.get(TRAINED_BY))
    rows.append((f"images{trained}", f"{scores['num_samples']:,}"))
    if "num_groups" in scores:
        rows.append(("groups of them", f"{scores['num_groups']:,}"))
    if scores["num_unreadable"]:
        rows.append(("unreadable images (counted as wrong)", f"{scores['num_unreadable']:,}"))
    if scores.get("num_unlabelled"):
        rows.append(("images without a label (counted as wrong)", f"{scores['num_unlabelled']:,}"))
    rows.append(("images/s", f"{scores['images_per_second']:,.1f}"))
    return rows


def _interval(accuracy: float, scores: dict[str, Any], effective: float | None) -> list[tuple[str, str]]:
    """The row of an accuracy's interval over the images of the split, Wilson's; of a mean over seeds it is too wide rather than too narrow.

    effective: of images in groups, their `effective_number`.
    """
    if np.isnan(accuracy):
        return []
    found = of_samples(accuracy, effective or scores["num_samples"])
    over = "groups" if effective else "images"
    return [(f"  its 95 % interval over {over}", f"{found.low:.2%} to {found.high:.2%}")]


def page(scores: dict[str, Any], picture: bytes | None) -> str:
    """The text of report.md. picture: content of confusion.png, None if the head is not scored."""
    blocks: list[Block] = [Paragraph(_how(scores)), Table(("score", "value"), summary(scores))]
    if "probe_split" in scores:
        blocks += [Heading("Features"), *_probes(scores)]
    if "per_class" in scores:
        blocks += [Heading("Classes"), *_classes(scores), Heading("Most frequent confusions")]
        if scores["confused"]:
            rows = [
                (pair["true"], pair["predicted"], f"{pair['count']:,}", f"{pair['share']:.1%}")
                for pair in scores["confused"]
            ]
            blocks.append(Table(("true class", "predicted as", "images", "share of the true class"), rows))
    if picture is not None:
        about = "Confusion matrix: each row is a true class, each cell its share predicted as the column's"
        blocks.append(PngImage("confusion.png", about, picture))
    for title, name in (
        ("Unreadable images", "unreadable"),
        ("Unreadable images of the probe's training split", "probe_unreadable"),
    ):
        if bad := scores.get(name):
            named = [(b["key"], b["problem"]) for b in bad[:_MAX_NAMED]]
            blocks += [Heading(title), Table(("image", "problem"), named)]
            if len(bad) > _MAX_NAMED:
                blocks.append(Paragraph(f"The first {_MAX_NAMED} of {len(bad):,}; all are in scores.json."))
    return markdown(f"{scores['weights']} on {scores['data']}, split {scores['split']}", blocks)


def _how(scores: dict[str, Any]) -> str:
    origin = f"Run {scores['run']}, step {scores['step']:,}. " if scores["run"] and scores["step"] is not None else ""
    crop = "the whole image resized"
    if scores["eval_crop"] != "resize":
        resized = "short side" if scores["eval_crop"] == "center" else "the whole image, both sides,"
        crop = f"{resized} resized to {scores['eval_resize']}, central crop"
    excluded = "" if scores["excluded"] == NOTHING_EXCLUDED else f"Excluded from the split: {scores['excluded']}. "
    trained = f"{not_held_out(scores['split'], scores[TRAINED_BY])}. " if scores.get(TRAINED_BY) else ""
    return (
        f"{trained}{origin}Data {scores['fingerprint']}, {counted(scores['num_classes'], 'class')}. {excluded}"
        f"Images at {scores['image_size']} pixels: {crop}, by resize_filter = {scores['resize_filter']}. Computed in {scores['precision']} on {scores['device']}."
    )


def _probes(scores: dict[str, Any]) -> Iterator[Block]:
    yield Paragraph(
        f"Input of the head. Fitted to images of split {scores['probe_split']}, tested on split {scores['split']}, both in the "
        "evaluation view above."
    )
    if scores["fewshot"]:
        turns = " in turn from each group of a class" * ("num_groups" in scores)
        yield Paragraph(
            f"Ridge regression of strength λ on a few images per class, chosen{turns} with seeds 0, 1, ...:"
        )
        rows = [
            (
                f"{row['shots']}",
                f"{row['l2']:g}",
                ", ".join(f"{top1:.2%}" for top1 in row["top1_of_seeds"]),
                f"{row['fewest']}",
            )
            for row in scores["fewshot"]
        ]
        yield Table(("shots", "λ", "top-1 of each seed", "images of the smallest class"), rows)
        if len({row["l2"] for row in scores["fewshot"]}) > 1:
            yield Paragraph(
                "Choosing the best λ from this table would be choosing it on the test images: fix one beforehand."
            )
    if "knn" in scores:
        knn = scores["knn"]
        yield Paragraph(
            f"Nearest neighbours: of {counted(knn['images'], 'image')}, the {knn['neighbours']} with the largest cosine vote, each with "
            f"exp(cosine / {knn['temperature']:g})."
        )


def _classes(scores: dict[str, Any]) -> Iterator[Block]:
    tested = [row for row in scores["per_class"] if row["support"]]
    untested = len(scores["per_class"]) - len(tested)
    if untested:
        yield Paragraph(
            f"Without an image in this split: {counted(untested, 'class')}; the means are over the other {len(tested):,}."
        )
    header = ("class", "precision", "recall", "F1", "images")
    if len(tested) <= _MAX_LISTED:
        yield Table(header, [_class_cells(row) for row in tested])
        return
    ranked = sorted(tested, key=lambda row: row["f1"])
    yield Paragraph(
        f"The {_WORST} with the lowest F1, the {_BEST} with the highest; all are in [per_class.csv](per_class.csv)."
    )
    rows = [_class_cells(row) for row in ranked[:_WORST]]
    yield Table(header, [*rows, ("...",) * len(header), *(_class_cells(row) for row in ranked[-_BEST:])])


def _class_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["class"], *(f"{row[name]:.1%}" for name in ("precision", "recall", "f1")), f"{row['support']:,}")


# ---------------------------------------------------------------------- the confusion matrix
def draw_confusion(true: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> bytes:
    """A PNG of the confusion matrix: true classes in rows, predicted ones in columns, with counts for up to 20 classes.

    A cell's colour is its share of the true class. true, predicted: int64 (n,), from `outcomes`; unreadable images and samples
    without labels are ignored. names: of all K classes. Of more than 50 classes, the 30 most confused ones are drawn.
    """
    seen = (true >= 0) & (predicted >= 0)
    true, predicted = true[seen], predicted[seen]
    drawn, title = np.arange(len(names)), f"{counted(len(true), 'image')}; colour: share of the true class"
    if len(names) > _MAX_DRAWN:
        drawn = most_confused_classes(true, predicted, len(names))
        title = f"The {len(drawn)} most confused of {counted(len(names), 'class')}; rows do not sum to 100 %"
    counts = confusion(true, predicted, drawn)
    totals = np.bincount(true, minlength=len(names))[drawn]
    return _draw(counts, counts / np.maximum(totals, 1)[:, None], [names[c] for c in drawn.tolist()], title)


def most_confused_classes(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 (30,), ascending: the classes of the most frequent mistakes, filled up with the first classes."""
    pairs, counts = np.unique(np.stack([true, predicted])[:, true != predicted], axis=1, return_counts=True)
    most_first = pairs[:, np.argsort(-counts, kind="stable")].T.ravel()
    candidates = np.concatenate([most_first, np.arange(num_classes)])
    first_places = np.sort(np.unique(candidates, return_index=True)[1])
    return np.sort(candidates[first_places[:_MOST_CONFUSED]])


def _draw(counts: np.ndarray, shares: np.ndarray, names: Sequence[str], title: str) -> bytes:
    annotated = len(names) <= _MAX_ANNOTATED
    side = max(4.0, (0.55 if annotated else 0.26) * len(names) + 2.0)
    figure = Figure(figsize=(side + 0.8, side), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    # Square root scale, so that a share of 2 % is visible beside a diagonal near 1.
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 0.01, 0.05, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1 %", "5 %", "25 %", "50 %", "100 %"])
    short = [shorten(name) for name in names]
    # A "$" in a name does not start a formula.
    axes.set_xticks(range(len(names)), short, rotation=90, parse_math=False)
    axes.set_yticks(range(len(names)), short, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(title)
    axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    if annotated:
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour, fontsize=8)
    return png(figure)
