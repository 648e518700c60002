"""The content of a source data set, for all file formats: pools of samples with keys, labels and images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from data_tools.sources.images import png
from data_tools.vtab.readers.files import FileLocation
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, make_folder

# Reads some rows, in ascending order: yields the pixels of each, uint8 (H, W) or (H, W, 3).
Pixels = Callable[[np.ndarray], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Pool:
    """All samples of a split of tensorflow_datasets. keys: n, as hashed there. labels: (n,) int64, of the task.

    images: places of n image files; or, for pixel arrays, a function that reads some of them.
    """

    keys: list[str]
    labels: np.ndarray
    images: list[FileLocation] | Pixels


@dataclass(frozen=True)
class Original:
    """The samples of a task. classes: names, by label. pools: by name.

    notes: differences from the official data. convert: see `Listing`.
    """

    classes: list[str]
    pools: dict[str, Pool]
    notes: list[str] = field(default_factory=list)
    convert: Callable[[bytes], bytes] | None = None


def places_of(pool: Pool, rows: np.ndarray, staged: AnyPath) -> dict[int, FileLocation]:
    """Returns row -> place of its image file. staged: file to which pixel arrays are written, as concatenated PNGs."""
    if isinstance(pool.images, list):
        return {row: pool.images[row] for row in rows.tolist()}
    rows = np.unique(rows)
    make_folder(staged.parent)
    places, offset = {}, 0
    with replacing(staged) as file:
        for row, pixels in zip(rows.tolist(), pool.images(rows), strict=True):
            size = file.write(png(pixels))
            places[row] = FileLocation(f"image {row}", str(staged), offset, size)
            offset += size
    return places
