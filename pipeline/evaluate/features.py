"""Features of chosen images of a split. Shapes: B batch, D features, n images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.config import AugmentConfig
from pipeline.data.loader import Loader, eval_view
from pipeline.data.manifest import Split
from pipeline.length import ImageSize


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
    progress: Callable[[int], object] = lambda count: None,
) -> Features:
    """Run `features` (uint8 (B, H, W, 3) -> (B, D)) over the evaluation view of chosen samples.

    rows: int64 (n,), the samples, in the order wanted. progress is told of each batch's size.
    """
    values, readable = [], []
    with Loader(split, eval_view(augment), image_size, threads, prefetch=2, max_bad_share=1.0) as loader:
        for loaded in loader.batches(requests(rows, batch)):
            values.append(features(loaded.images).float().cpu().numpy())
            readable.append(loaded.valid.numpy())
            progress(len(loaded.rows))
    return Features(np.concatenate(values), np.concatenate(readable), loader.bad)


def requests(rows: np.ndarray, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows, zeros) of batch after batch: what a Loader is asked for."""
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        yield part, np.zeros(len(part), dtype=np.int64)
