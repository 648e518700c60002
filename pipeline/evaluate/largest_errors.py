"""The predictions of numbers that are the furthest from the true ones, among which wrong values are found: as part of a
report, and as a CSV that launch/exclude.py makes a list of excluded samples of.

Shapes: n images, T targets, E of the errors are listed.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pipeline.base import json_record
from pipeline.base.files import table_csv
from pipeline.base.page import Block, Code, Heading, Paragraph, PngImage, Table
from pipeline.base.words import counted
from pipeline.data.dataset.split import Split
from pipeline.evaluate.mistakes import MAX_LISTED, Read, small_png

CSV, JSON = "largest_errors.csv", "largest_errors.json"
_PICTURES = [f"error_{number:02}.png" for number in range(1, MAX_LISTED + 1)]
# The files of `files`, as those to remove.
NO_FILES = dict.fromkeys([CSV, JSON, *_PICTURES])


@dataclass(frozen=True)
class LargeError:
    """A true and a predicted number of an image, in the target's unit. picture: its file. row: in the manifest.
    deviations: the error in standard deviations of the true values.
    """

    picture: str
    split: str
    row: int
    key: str
    target: str
    true: float
    predicted: float
    deviations: float


@dataclass(frozen=True)
class LargeErrors:
    """data: path of the data set. num_values: that are scored. listed: the largest error of each image, the largest
    first.
    """

    data: str
    num_values: int
    listed: list[LargeError]


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
    none. Others: see `mistakes.find`.
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
    order = order[largest[order] > 0]
    rows, images = read(order) if len(order) else (order, np.empty((0, 1, 1, 3), np.uint8))
    places = error[rows].argmax(1) if len(rows) else rows
    found = [
        LargeError(
            picture,
            manifest_split or split.name,
            at,
            key,
            names[place],
            float(f"{targets[row, place]:.6g}"),
            float(f"{values[row, place]:.6g}"),
            round(float(error[row, place]), 3),
        )
        for picture, row, place, at, key in zip(
            _PICTURES,
            rows.tolist(),
            places.tolist(),
            split.manifest_rows(rows).tolist(),
            split.keys(rows),
            strict=False,
        )
    ]
    return LargeErrors(data, int(known.sum()), found), dict(zip(_PICTURES, map(small_png, images), strict=False))


def read(folder: Path) -> tuple[LargeErrors, dict[str, bytes]] | None:
    """What `files` wrote into a folder; None if it did not. Raises UserError for a damaged file."""
    try:
        found = json_record.read(folder / JSON, LargeErrors)
        return found, {one.picture: (folder / one.picture).read_bytes() for one in found.listed}
    except FileNotFoundError:
        return None


def files(found: LargeErrors, pictures: Mapping[str, bytes]) -> dict[str, bytes | str | None]:
    """The files that `read` reads, and the CSV; None for what an earlier call may have written."""
    table = table_csv([asdict(one) for one in found.listed]) if found.listed else None
    return {**NO_FILES, **pictures, CSV: table, JSON: json.dumps(asdict(found))}


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
        Paragraph(f"To train without wrong values, delete the rows of {CSV} that are right, and exclude the rest:"),
        Code(f"python launch/exclude.py {shlex.join([f'data={found.data}', f'samples={folder / CSV}'])}"),
    ]
