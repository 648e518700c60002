"""The predictions of numbers that are the furthest from the true ones, among which wrong values are found.

Shapes: n images, T targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.base.page import Block, Heading, Paragraph, PngImage, Table
from pipeline.base.words import counted
from pipeline.data.dataset.split import Split
from pipeline.evaluate.mistakes import MAX_LISTED, ImageList, ListedImage, Read


@dataclass(frozen=True)
class LargeError(ListedImage):
    """A true and a predicted number of an image, in the target's unit. deviations: the error in standard deviations of
    the true values.
    """

    target: str
    true: float
    predicted: float
    deviations: float


@dataclass(frozen=True)
class LargeErrors(ImageList):
    """listed: the largest error of each image, the largest first. num_values: that are scored."""

    name, picture = "largest_errors", "error"
    listed: list[LargeError]
    num_values: int


def find(
    values: np.ndarray,
    targets: np.ndarray,
    names: Sequence[str],
    split: Split,
    read: Read,
    data: str,
    manifest_split: str = "",
) -> tuple[LargeErrors, dict[str, bytes]]:
    """(the errors, content of each picture).

    values, targets: float32 (n, T), predicted and true numbers of the first n images of the split, NaN where there is
    none. names: of the targets. manifest_split: see `ImageList.pictured`.
    """
    known = np.isfinite(values) & np.isfinite(targets)
    error = np.where(known, np.abs(values - targets), 0).astype(np.float64)
    # In deviations, so that targets of different units compare.
    spread = np.array(
        [column[there].std() if there.any() else 0 for column, there in zip(targets.T, known.T, strict=True)]
    )
    error = np.divide(error, spread, out=np.zeros_like(error), where=spread > 0)
    largest = error.max(1, initial=0)
    order = np.argsort(-largest, kind="stable")[:MAX_LISTED]
    rows, places, pictures = LargeErrors.pictured(order[largest[order] > 0], split, read, manifest_split)
    found = []
    for row, place in zip(rows.tolist(), places, strict=True):
        target = int(error[row].argmax())
        true, predicted = (float(f"{of[row, target]:.6g}") for of in (targets, values))
        found.append(LargeError(*place, names[target], true, predicted, round(float(error[row, target]), 3)))
    return LargeErrors(data, found, int(known.sum())), pictures


def blocks(found: LargeErrors, pictures: Mapping[str, bytes], folder: Path) -> list[Block]:
    """The part of a report. folder: of the CSV."""
    if not found.listed:
        return []
    rows = [
        (
            PngImage(of.picture, f"{of.target} {of.true:g}, predicted {of.predicted:g}", pictures[of.picture]),
            of.target,
            f"{of.true:g}",
            f"{of.predicted:g}",
            f"{of.predicted - of.true:+.4g}",
            f"{of.deviations:.2f}",
            of.key,
        )
        for of in found.listed
    ]
    return [
        Heading("Look at these: the largest errors, and doubtful values"),
        Paragraph(
            f"The largest of {counted(found.num_values, 'value')}, at most one of each image, in standard deviations of"
            " the true values."
        ),
        Table(("image", "target", "true", "predicted", "error", "in deviations", "key"), rows),
        *found.how_to_exclude(folder, "wrong values", "that are right"),
    ]
