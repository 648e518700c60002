"""Which images stand for all: greedy maximisation of how similar each image is to the nearest chosen one (facility
location).

With s(r, a) the cosine of two images, a choice A covers sum_r max_{a in A} s(r, a). The sum grows by ever less as
images are added to A, so the greedy choice covers at least 1 - 1/e of what the best one of its size does above s = -1
(Nemhauser et al. 1978), and an image's gain need only be computed anew when it is the largest (Minoux 1978). For
choosing images to label: Wei, Iyer and Bilmes, "Submodularity in Data Subset Selection and Active Learning", ICML 2015.

Shapes: n images, D features, k chosen images.
"""

import numpy as np


def directions(values: np.ndarray) -> np.ndarray:
    """float32 (n, D) of length 1: features, float (n, D), relative to their mean. A row that equals it stays 0."""
    centred = values.astype(np.float32) - values.mean(0)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), np.float32(1e-30))


def choose(images: np.ndarray, num: int) -> np.ndarray:
    """int64 (num,): the indices of the chosen images, each the one that adds most to those before it; the first of
    equals.

    images: directions, float32 (n, D), at least `num`. Takes 4 n**2 bytes of memory.
    """
    similar = images @ images.T
    best = np.full(len(images), -1, np.float32)
    gains = np.array([np.maximum(row - best, 0).sum() for row in similar])
    known_at = np.zeros(len(images), np.int64)  # The number of chosen images when the gain was computed.
    chosen: list[int] = []
    while len(chosen) < num:
        top = int(gains.argmax())
        if known_at[top] < len(chosen):  # An upper bound: it can only have become less.
            gains[top] = np.maximum(similar[top] - best, 0).sum()
            known_at[top] = len(chosen)
            continue
        chosen.append(top)
        np.maximum(best, similar[top], out=best)
        gains[top] = -np.inf
    return np.array(chosen, np.int64)
