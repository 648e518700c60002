"""Batches of noise: the time of a step does not depend on the images."""

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.data.loading.loader import Batch

NUM_CLASSES = 1000


def noise_views(
    shapes: Sequence[tuple[int, int, int]], size: int, num_classes: int = NUM_CLASSES, seed: int = 0
) -> Batch:
    """A batch of groups of views. shapes: (number, height, width) of each."""
    rng = np.random.default_rng(seed)
    views = [torch.from_numpy(rng.integers(0, 256, (count, size, *side, 3), np.uint8)) for count, *side in shapes]
    labels = torch.from_numpy(rng.integers(0, num_classes, (size, 1)))
    return Batch(tuple(views), labels, torch.ones(size, dtype=torch.bool), np.arange(size), np.zeros(size, np.int64))
