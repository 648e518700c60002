"""The report of a segmentation: numbers, tables, and what MLflow shows."""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.metric import metric_of
from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table
from pipeline.base.trained_on import TRAINED_BY
from pipeline.base.words import counted
from pipeline.evaluate import architecture
from pipeline.evaluate.loaded_model import LoadedModel
from pipeline.evaluate.segmentation.counts import PixelCounts, scores_of
from pipeline.evaluate.segmentation.masks import MaskClasses
from pipeline.monitor.run_page import DatasetFacts, RunFacts, WeightsOrigin, dataset_name
from pipeline.monitor.tracking import send_report
from pipeline.settings.commands.segment import SegmentConfig

# Of segmentation.json, what MLflow shows as parameters.
_PARAMETERS = ("weights", "step", "data", TRAINED_BY, "image_size", "short_side", "layers", "lr", "precision")


def numbers(counts: PixelCounts, classes: MaskClasses, learnt: np.ndarray, scored: np.ndarray) -> dict[str, Any]:
    """The scores, as segmentation.json has them. learnt, scored: share of the pixels in each class, float64 (K,)."""
    found, alone = scores_of(counts), scores_of(_largest_alone(counts))
    columns = zip(
        classes.names, found.iou.tolist(), found.recall.tolist(), scored.tolist(), learnt.tolist(), strict=True
    )
    return {
        "miou": found.miou, "interval": [found.low, found.high], "num_groups": counts.num_units if len(counts.groups) else None, "pixel_accuracy": found.pixel_accuracy, "mean_recall": found.mean_recall,
        "largest_class_alone": {"miou": alone.miou, "pixel_accuracy": alone.pixel_accuracy}, "no_class": float(1 - scored.sum()),
        "per_class": [dict(zip(("class", "iou", "recall", "share", "share_learnt"), row, strict=True)) for row in columns],
    }  # fmt: skip


def _largest_alone(counts: PixelCounts) -> PixelCounts:
    """The counts of a prediction of the most frequent class everywhere: what a score is to be compared with."""
    largest = int(counts.true.sum(0).argmax())
    predicted, right = np.zeros_like(counts.true), np.zeros_like(counts.true)
    predicted[:, largest], right[:, largest] = counts.true.sum(1), counts.true[:, largest]
    return PixelCounts(counts.rows, right, predicted, counts.true, counts.groups)


def summary(scores: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of each score, as lines for the terminal."""
    low, high = scores["interval"]
    alone = scores["largest_class_alone"]
    over = counted(scores["num_groups"], "group") if scores["num_groups"] else "images"
    rows = [
        ("mIoU", f"{scores['miou']:.2%}"),
        (f"  its 95 % interval over {over}", "none of one" if np.isnan(low) else f"{low:.2%} to {high:.2%}"),
        ("pixel accuracy", f"{scores['pixel_accuracy']:.2%}"),
        ("recall, mean over classes", f"{scores['mean_recall']:.2%}"),
        ("mIoU, pixel accuracy of the largest class alone", f"{alone['miou']:.2%}, {alone['pixel_accuracy']:.2%}"),
        (f"images{', which the weights were trained on' * bool(scores.get(TRAINED_BY))}", f"{scores['num_samples']:,}"),
    ]
    if scores["num_unreadable"]:
        rows.append(("images that cannot be read (left out)", f"{scores['num_unreadable']:,}"))
    if scores["num_turned"]:
        rows.append(("images turned by EXIF, masks taken as upright", f"{scores['num_turned']:,}"))
    return rows


def blocks(scores: dict[str, Any], sheet: bytes | None) -> list[Block]:
    """The report."""
    rows, columns = scores["grid"]
    step = f", step {scores['step']:,}" if scores["step"] is not None else ""
    origin = f"Run {scores['run']}{step}. " if scores["run"] else ""
    last = f"last {scores['layers']} blocks" if scores["layers"] > 1 else "last block"
    how = (
        f"{origin}BatchNorm and a dense layer on the patch tokens of the {last}, {rows} x {columns} of a window of "
        f"{scores['image_size']} pixels; the weights are frozen. Trained for {counted(scores['steps'], 'step')} of {scores['train_batch']} random crops of "
        f"{counted(scores['num_learnt'], 'image')}. Scored on {scores['data']}: images with a short side of {scores['short_side']} pixels, in overlapping windows, at the "
        f"masks' own size. Computed in {scores['precision']} on {scores['device']}."
    )
    if runs := scores[TRAINED_BY]:
        how = f"The scored split was trained on by {runs}: its scores are not of held-out images. {how}"
    per_class = [
        (row["class"], *(_per_cent(row[name]) for name in ("iou", "recall", "share", "share_learnt")))
        for row in scores["per_class"]
    ]
    parts: list[Block] = [Paragraph(how), Table(("score", "value"), summary(scores))]
    if sheet is not None:
        parts.append(PngImage("sheet.png", "Images, their masks and the predictions", sheet))
    header = ("class", "IoU", "recall", "share of the scored pixels", "share of the pixels learnt from")
    parts += [Heading("Classes"), Table(header, per_class)]
    if scores["unreadable"]:
        parts += [
            Heading("Images that cannot be read"),
            Table(("image", "problem"), [(bad["name"], bad["problem"]) for bad in scores["unreadable"]]),
        ]
    return parts


def _per_cent(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1%}"


def send(
    config: SegmentConfig,
    data: DatasetFacts,
    loaded: LoadedModel,
    origin: WeightsOrigin,
    scores: dict[str, Any],
    files: list[Path],
) -> None:
    """Send the scores to MLflow, as a run that names the run of the weights. data: what was scored on."""
    metrics = {f"{data.split}_{name}": scores[name] for name in ("miou", "pixel_accuracy", "mean_recall")}
    parameters = {name: scores[name] for name in _PARAMETERS}
    parameters["length"] = (
        f"{scores['steps']} steps of {scores['train_batch']}"  # "steps" are those of the weights' run.
    )
    name = f"{loaded.extra.get('run') or Path(config.weights).name} segments {dataset_name(data)}"
    tags = {
        "model": architecture.name_of(loaded.model.config),
        "data": data.digest,
        "dataset": data.name,
    }
    description = (
        f"**Segmentation** of {dataset_name(data)} by a linear layer on the frozen patch tokens of `{config.weights}`."
    )
    parents = {"parent": origin.run_id} if origin.run_id else {}
    facts = RunFacts(
        name, "evaluation", parameters, tags, (data,), description, parents, score=f"{data.split}_miou", scored_on=f"mIoU {dataset_name(data)}",
        origin=origin, metrics={name: metric_of(name) for name in metrics},
    )  # fmt: skip
    send_report(config.mlflow, files[0].parent, facts, metrics, files, config.experiment)
