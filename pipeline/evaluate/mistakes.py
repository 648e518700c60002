"""The mistakes of a model, those with the least probable label first, among which wrong labels are found.

In this order, wrong labels are nearer the top than in that of the probability of the predicted class: of 3 % wrong
labels on four classes of CIFAR-10, average precision 0.85 against 0.78.

Shapes: n images.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import cv2
import numpy as np

from pipeline.base import json_record
from pipeline.base.files import table_csv
from pipeline.base.page import Block, Code, Heading, Paragraph, PngImage, Table
from pipeline.base.words import command_line, counted
from pipeline.data.dataset.split import Split

_MAX_LISTED, _MAX_PAIRS = 40, 5
_SIDE = 128  # Pixels of a picture's long side.
# rows, int64 (n,) -> (those that can be read, their pixels, uint8 (n, H, W, 3)).
Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
Files = dict[str, bytes | str | None]
_PICTURES = [f"mistake_{number:02}.png" for number in range(1, _MAX_LISTED + 1)]
NO_FILES: Files = dict.fromkeys(["mistakes.csv", "mistakes.json", *_PICTURES])


@dataclass(frozen=True)
class Mistake:
    """An image that is predicted as another class than its label.

    picture: its file. row: in the manifest. confidence: probability of the predicted class. of_label: that of the
    label.
    """

    picture: str
    split: str
    row: int
    key: str
    label: str
    predicted: str
    confidence: float
    of_label: float


@dataclass(frozen=True)
class ConfusedPair:
    """images: that have the label and are predicted as the other class. share: of the images with this label."""

    label: str
    predicted: str
    images: int
    share: float


@dataclass(frozen=True)
class Mistakes:
    """The mistakes, as files, of which launch/exclude.py reads the CSV.

    data: path of the data set. listed: those with the least probable label. how: they were found, a sentence. num_wrong
    of num_images have another class than predicted. confused: the most frequent pairs of classes.
    """

    data: str
    listed: list[Mistake]
    how: str
    num_images: int
    num_wrong: int
    confused: list[ConfusedPair]

    @classmethod
    def read(cls, folder: Path) -> tuple[Self, dict[str, bytes]] | None:
        """What `files` wrote into a folder; None if it did not. Raises UserError for a damaged file."""
        try:
            found = json_record.read(folder / "mistakes.json", cls)
            return found, {one.picture: (folder / one.picture).read_bytes() for one in found.listed}
        except FileNotFoundError:
            return None

    def files(self, pictures: Mapping[str, bytes]) -> Files:
        """The files that `read` reads, and the CSV; None for what an earlier call may have written."""
        table = table_csv([asdict(one) for one in self.listed]) if self.listed else None
        return {**NO_FILES, **pictures, "mistakes.csv": table, "mistakes.json": json.dumps(asdict(self))}


def how_found(split: str, trained_by: str = "", folds: int = 0) -> str:
    """How doubtful labels are found, a sentence. trained_by: the runs that trained on the split, if any."""
    if folds:
        found = (
            f"Each image of split {split} is predicted from its features by a linear layer that was fitted to the other"
            f" {folds - 1} of {folds} parts of the split."
        )
        trained = f" The weights were trained on this split by {trained_by}, and may know its wrong labels: use others."
        return found + trained * bool(trained_by)
    if trained_by:
        return (
            f"The weights were trained on split {split} by {trained_by}, wrong labels included, so they may find few of"
            " these. launch/evaluate.py with folds=5 and weights that were not trained on it finds more."
        )
    return f"The weights were not trained on split {split}, as far as is known, so they do not know its wrong labels."


def find(
    true: np.ndarray,
    predicted: np.ndarray,
    confidence: np.ndarray,
    of_label: np.ndarray,
    names: Sequence[str],
    split: Split,
    read: Read,
    how: str,
    data: str,
    manifest_split: str = "",
) -> tuple[Mistakes, dict[str, bytes]]:
    """(the mistakes, content of each picture).

    true, predicted: int64 (n,), of `outcomes`, of the first n images of the split. confidence, of_label: probabilities
    of the predicted class and of the label, float (n,). names: of all classes. manifest_split: that the
    samples are of, if the split has another name.
    """
    known = (true >= 0) & (predicted >= 0)
    wrong = np.flatnonzero(known & (true != predicted))
    listed = wrong[np.argsort(of_label[wrong], kind="stable")][:_MAX_LISTED]
    rows, images = read(listed) if len(listed) else (listed, np.empty((0, 1, 1, 3), np.uint8))
    places = zip(_PICTURES, rows.tolist(), split.manifest_rows(rows).tolist(), split.keys(rows), strict=False)
    found = [
        Mistake(
            picture,
            manifest_split or split.name,
            place,
            key,
            names[true[row]],
            names[predicted[row]],
            round(float(confidence[row]), 4),
            round(float(of_label[row]), 4),
        )
        for picture, row, place, key in places
    ]
    pairs = Counter(sorted(zip(true[wrong].tolist(), predicted[wrong].tolist(), strict=True)))
    of_class = np.bincount(true[known], minlength=len(names)).tolist()
    confused = [
        ConfusedPair(names[one], names[other], count, count / of_class[one])
        for (one, other), count in pairs.most_common(_MAX_PAIRS)
    ]
    pictures = dict(zip(_PICTURES, map(_small_png, images), strict=False))
    return Mistakes(data, found, how, int(known.sum()), len(wrong), confused), pictures


def _small_png(image: np.ndarray) -> bytes:
    """A small copy. image: uint8 (H, W, 3)."""
    scale = _SIDE / max(image.shape[:2])
    size = [max(1, round(scale * side)) for side in image.shape[1::-1]]
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    return cv2.imencode(".png", small[:, :, ::-1])[1].tobytes()


def blocks(
    found: Mistakes, pictures: Mapping[str, bytes], folder: Path, confusion: PngImage | None = None
) -> list[Block]:
    """The part of a report. folder: of the CSV. confusion: picture of the confusion matrix."""
    if not found.num_wrong:
        none = Paragraph(f"None of {counted(found.num_images, 'image')} is predicted as another class. {found.how}")
        return [Heading("Mistakes"), none, *([confusion] if confusion else [])]
    pairs = [(of.label, of.predicted, f"{of.images:,}", f"{of.share:.1%}") for of in found.confused]
    confused = Table(("label", "predicted as", "images", "of this label"), pairs)
    rows = [
        (
            PngImage(of.picture, f"{of.label}, predicted as {of.predicted}", pictures[of.picture]),
            of.label,
            of.predicted,
            f"{of.confidence:.1%}",
            f"{of.of_label:.1%}",
            of.key,
        )
        for of in found.listed
    ]
    return [
        Heading("What it confuses"),
        confused,
        *([confusion] if confusion else []),
        Heading("Look at these: the worst mistakes, and doubtful labels"),
        Paragraph(
            f"{found.num_wrong:,} of {counted(found.num_images, 'image')} are predicted as another class than their"
            f" label. First come those whose label is the least probable, where a wrong label is most likely."
            f" {found.how}"
        ),
        Table(("image", "label", "predicted as", "confidence", "label's probability", "key"), rows),
        Paragraph(
            "To train without wrong labels, delete the rows of mistakes.csv whose label is right, and exclude the rest:"
        ),
        Code(command_line("exclude", f"data={found.data}", f"samples={folder / 'mistakes.csv'}")),
    ]
