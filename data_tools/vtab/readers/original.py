"""What a source data set holds, whatever it was read from: pools of samples with their keys, labels and images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from data_tools.sources.images import png
from data_tools.vtab.readers.files import Place
from pipeline.data.storage.bucket import AnyPath, make_folder
from pipeline.data.storage.whole import replacing

# Rows in ascending order -> pixels of each, uint8 (H, W) or (H, W, 3).
Pixels = Callable[[np.ndarray], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Pool:
    """All samples of one of tensorflow_datasets' splits. keys: n, as its hash takes them. labels: (n,) int64, of the task.

    images: n places of image files; or, of a file of bare pixels, a function that reads some of them.
    """

    keys: list[str]
    labels: np.ndarray
    images: list[Place] | Pixels


@dataclass(frozen=True)
class Original:
    """A task's samples. classes: names, by label. pools: by name.

    notes: how this differs from the official data, in words. convert: see `Listing`.
    """

    classes: list[str]
    pools: dict[str, Pool]
    notes: list[str] = field(default_factory=list)
    convert: Callable[[bytes], bytes] | None = None


def places_of(pool: Pool, rows: np.ndarray, staged: AnyPath) -> dict[int, Place]:
    """Row -> place of its image file. staged: where pixels are written to, as PNGs one after another."""
    if isinstance(pool.images, list):
        return {row: pool.images[row] for row in rows.tolist()}
    rows = np.unique(rows)
    make_folder(staged.parent)
    places, offset = {}, 0
    with replacing(staged) as file:
        for row, pixels in zip(rows.tolist(), pool.images(rows), strict=True):
            size = file.write(png(pixels))
            places[row] = Place(f"image {row}", str(staged), offset, size)
            offset += size
    return places
