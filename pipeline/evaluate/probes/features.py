"""Features of selected images of a split, exact on any number of ranks. Shapes: B batch, D features, n images."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.data.loading.loader import Loader
from pipeline.evaluate.classify import each_sample, requests
from pipeline.evaluate.split_reader import SplitReader


@dataclass(frozen=True)
class Features:
    """Features of n images. values: float32 (n, D). readable: bool (n,), False where values are invalid. problems: row
    -> reason.
    """

    values: np.ndarray
    readable: np.ndarray
    problems: dict[int, str]


def extract(features: Callable[[Tensor], Tensor], reader: SplitReader, rows: np.ndarray) -> Features:
    """Run `features` (images (B, H, W, C) -> (B, D)) over the samples `rows`; see `each_sample`."""
    (values,), readable, problems = each_sample(lambda batch: [features(batch.images).float()], reader, rows)
    return Features(values, readable, problems)


def read_pixels(loader: Loader, rows: np.ndarray, batch: int) -> tuple[np.ndarray, Tensor]:
    """Those of the rows that can be read, in their order, and their pixels, (n, H, W, C)."""
    kept, pixels = [], []
    for loaded in loader.batches(requests(rows, batch)):
        kept.append(loaded.rows[loaded.valid.numpy()])
        pixels.append(loaded.images[loaded.valid])
    return np.concatenate(kept), torch.cat(pixels)
