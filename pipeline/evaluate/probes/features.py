"""Features of chosen images of a split, exact on any number of ranks. Shapes: B batch, D features, n images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.loader import Loader, eval_view
from pipeline.distributed import Ranks
from pipeline.lifecycle.stop import Stop
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig


@dataclass(frozen=True)
class Features:
    """Of n images: values float32 (n, D); readable bool (n,), False where values mean nothing; problems: row -> why."""

    values: np.ndarray
    readable: np.ndarray
    problems: dict[int, str]


@torch.no_grad()
def extract(
    features: Callable[[Tensor], Tensor],
    split: Split,
    rows: np.ndarray,
    image_size: ImageSize | int,
    augment: AugmentConfig,
    batch: int,
    threads: int,
    ranks: Ranks,
    progress: Callable[[int], object] = lambda count: None,
    stop: Stop | None = None,
) -> Features:
    """Run `features` (uint8 (B, H, W, 3) -> (B, D)) over the evaluation view of chosen samples. The same on every rank.

    rows: int64 (n,), n > 0, the samples, in the order wanted. The batches are the same on any number of ranks, which take
    turns, so that the values are too, to the last bit. progress is told of each batch's size.
    Raises Stopped on every rank when the ranks agree to stop.
    """
    values, readable = [], []
    is_unwanted = stop.is_wanted if stop else lambda: False
    with Loader(
        split, eval_view(augment), image_size, threads, prefetch=2, max_bad_share=1.0, is_unwanted=is_unwanted
    ) as loader:
        coming = loader.batches(requests(rows, batch, ranks.rank, ranks.world_size))
        for loaded in stop.together(coming) if stop else coming:
            values.append(features(loaded.images).float().cpu().numpy())
            readable.append(loaded.valid.numpy())
            progress(len(loaded.rows))
    gathered = ranks.gather((values, readable, loader.bad))
    turns = [divmod(number, ranks.world_size) for number in range(-(-len(rows) // batch))]
    return Features(
        np.concatenate([gathered[rank][0][turn] for turn, rank in turns]),
        np.concatenate([gathered[rank][1][turn] for turn, rank in turns]),
        {row: why for _, _, bad in gathered for row, why in bad.items()},
    )


def requests(
    rows: np.ndarray, batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, zeros) of one rank's batches, every world_size-th: what a Loader is asked for.

    As many on every rank, since a forward pass is collective at ZeRO stage 3: where there is none left, the last again.
    """
    last = -(-len(rows) // batch) - 1
    for first in range(0, last + 1, world_size):
        start = min(first + rank, last) * batch
        part = rows[start : start + batch]
        yield part, np.zeros(len(part), dtype=np.int64)
