"""Features of selected images of a split, exact on any number of ranks. Shapes: B batch, D features, n images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.data.loading.loader import Loader
from pipeline.evaluate.split_reader import SplitReader


@dataclass(frozen=True)
class Features:
    """Features of n images. values: float32 (n, D). readable: bool (n,), False where values are invalid. problems: row
    -> reason.
    """

    values: np.ndarray
    readable: np.ndarray
    problems: dict[int, str]


@torch.no_grad()
def extract(features: Callable[[Tensor], Tensor], reader: SplitReader, rows: np.ndarray) -> Features:
    """Run `features` (images (B, H, W, C) -> (B, D)) over the samples `rows`, int64 (n,), n > 0, and return them in
    this order.

    Collective; the result is the same on every rank. Ranks take turns at batches that do not depend on their number, so
    that values are equal bit for bit on any number of ranks. Raises UserError when more images are unreadable than the
    reader's budget allows, and Stopped on all ranks when they agree to stop.
    """
    values, readable, ranks, batch = [], [], reader.ranks, reader.batch
    with reader.open(requests(rows, batch, ranks.rank, ranks.world_size), len(rows)) as (batches, problems):
        for loaded in batches:
            values.append(features(loaded.images).float().cpu().numpy())
            readable.append(loaded.valid.numpy())
    gathered = ranks.gather((values, readable, problems))
    turns = [divmod(number, ranks.world_size) for number in range(-(-len(rows) // batch))]
    return Features(
        np.concatenate([gathered[rank][0][turn] for turn, rank in turns]),
        np.concatenate([gathered[rank][1][turn] for turn, rank in turns]),
        reader.problems_of_all((bad for _, _, bad in gathered), len(rows)),
    )


def requests(
    rows: np.ndarray, batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows, zeros) for a Loader: every world_size-th batch, beginning with number `rank`.

    All ranks get the same number of batches, because a forward pass is collective at ZeRO stage 3: ranks without a
    batch left repeat the last one.
    """
    last = -(-len(rows) // batch) - 1
    for first in range(0, last + 1, world_size):
        start = min(first + rank, last) * batch
        part = rows[start : start + batch]
        yield part, np.zeros(len(part), dtype=np.int64)


def read_pixels(loader: Loader, rows: np.ndarray, batch: int) -> tuple[np.ndarray, Tensor]:
    """Those of the rows that can be read, in their order, and their pixels, (n, H, W, C)."""
    kept, pixels = [], []
    for loaded in loader.batches(requests(rows, batch)):
        kept.append(loaded.rows[loaded.valid.numpy()])
        pixels.append(loaded.images[loaded.valid])
    return np.concatenate(kept), torch.cat(pixels)
