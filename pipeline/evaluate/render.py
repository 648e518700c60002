"""scores.json as a person reads it: the page report.md, the table per_class.csv, the lines on the terminal."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.data.dataset.split import NOTHING_EXCLUDED
from pipeline.page import Block, Heading, Paragraph, Picture, Table, markdown

_MAX_LISTED, _WORST, _BEST = 30, 15, 5
_MAX_NAMED = 20


def summary(scores: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of the scores that there are, one line each."""
    rows = []
    if "top1" in scores:
        names = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "macro_precision": "precision, mean over classes",
                 "macro_recall": "recall, mean over classes", "macro_f1": "F1, mean over classes"}  # fmt: skip
        rows += [(text, f"{scores[name]:.2%}") for name, text in names.items()]
        rows.append((f"loss ({scores['loss_kind']})", f"{scores['loss']:.4f}"))
    several = len({row["l2"] for row in scores.get("fewshot", [])}) > 1
    for row in scores.get("fewshot", []):
        strength = f", λ = {row['l2']:g}" if several else ""
        rows.append((f"{row['shots']}-shot linear accuracy{strength}, mean", f"{row['top1']:.2%}"))
        if row["std"] is not None:
            rows.append((f"  its standard deviation over {len(row['top1_of_seeds'])} seeds", f"{row['std']:.2%}"))
    if "knn" in scores:
        rows.append((f"accuracy of {scores['knn']['neighbours']} nearest neighbours", f"{scores['knn']['top1']:.2%}"))
    rows.append(("images", f"{scores['num_samples']:,}"))
    if scores["num_unreadable"]:
        rows.append(("unreadable images (counted as wrong)", f"{scores['num_unreadable']:,}"))
    rows.append(("images/s", f"{scores['images_per_second']:,.1f}"))
    return rows


def page(scores: dict[str, Any], picture: bytes | None) -> str:
    """report.md. picture: confusion.png, where the head is scored."""
    blocks: list[Block] = [Paragraph(_how(scores)), Table(("score", "value"), summary(scores))]
    if "probe_split" in scores:
        blocks += [Heading("Features"), *_probes(scores)]
    if "per_class" in scores:
        blocks += [Heading("Classes"), *_classes(scores), Heading("What is taken for what")]
        if scores["confused"]:
            rows = [
                (pair["true"], pair["predicted"], f"{pair['count']:,}", f"{pair['share']:.1%}")
                for pair in scores["confused"]
            ]
            blocks.append(Table(("true class", "predicted as", "images", "share of the true class"), rows))
    if picture is not None:
        about = "Confusion matrix: each row is a true class, each cell its share predicted as the column's"
        blocks.append(Picture("confusion.png", about, picture))
    for title, name in (
        ("Unreadable images", "unreadable"),
        ("Unreadable images that features were to be fitted to", "probe_unreadable"),
    ):
        if bad := scores.get(name):
            named = [(b["key"], b["problem"]) for b in bad[:_MAX_NAMED]]
            blocks += [Heading(title), Table(("image", "problem"), named)]
            if len(bad) > _MAX_NAMED:
                blocks.append(Paragraph(f"The first {_MAX_NAMED} of {len(bad):,}; all are in scores.json."))
    return markdown(f"{scores['weights']} on {scores['data']}, split {scores['split']}", blocks)


def table_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows with the same keys as CSV, the keys as its header."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode()


def _how(scores: dict[str, Any]) -> str:
    origin = f"Run {scores['run']}, step {scores['step']:,}. " if scores["run"] and scores["step"] is not None else ""
    crop = "the whole image resized"
    if scores["eval_crop"] != "resize":
        resized = "short side" if scores["eval_crop"] == "center" else "the whole image, both sides,"
        crop = f"{resized} resized to {scores['eval_resize']}, central crop"
    left_out = "" if scores["excluded"] == NOTHING_EXCLUDED else f"Left out of the split: {scores['excluded']}. "
    return (
        f"{origin}Data {scores['fingerprint']}, {scores['num_classes']:,} classes. {left_out}"
        f"Images at {scores['image_size']} pixels: {crop}. Computed in {scores['precision']} on {scores['device']}."
    )


def _probes(scores: dict[str, Any]) -> Iterator[Block]:
    yield Paragraph(
        f"What the head reads, learnt from images of split {scores['probe_split']} and tested on split {scores['split']}, both "
        "in the evaluation view above."
    )
    if scores["fewshot"]:
        yield Paragraph(
            "Ridge regression on a few images of each class, with strength λ, for seeds 0, 1, ... of their choice:"
        )
        rows = [
            (f"{row['shots']}", f"{row['l2']:g}", ", ".join(f"{top1:.2%}" for top1 in row["top1_of_seeds"]), f"{row['fewest']}")
            for row in scores["fewshot"]
        ]  # fmt: skip
        yield Table(("shots", "λ", "top-1 of each seed", "images of the smallest class"), rows)
        if len({row["l2"] for row in scores["fewshot"]}) > 1:
            yield Paragraph(
                "To take the best λ of this table would be to choose it on the test images: use one, told beforehand."
            )
    if "knn" in scores:
        knn = scores["knn"]
        yield Paragraph(
            f"Nearest neighbours: the {knn['neighbours']} of {knn['images']:,} images with the largest cosine vote, each with "
            f"exp(cosine / {knn['temperature']:g})."
        )


def _classes(scores: dict[str, Any]) -> Iterator[Block]:
    tested = [row for row in scores["per_class"] if row["support"]]
    untested = len(scores["per_class"]) - len(tested)
    if untested:
        yield Paragraph(
            f"{untested:,} classes have no image in this split; the means are over the other {len(tested):,}."
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
