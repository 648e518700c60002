"""Few-shot linear accuracy in closed form (ViT paper, section 4.1; big_vision, evaluators/fewshot_lsr.py).

Shapes: n training samples, m test samples, D features, K classes, R the smaller of n and D + 1.
"""

from collections.abc import Callable

import numpy as np

# Value of the constant column. It is so large that its weight is small, hence hardly regularised.
_BIAS = 100.0


def choose_shots(
    labels: np.ndarray, num_classes: int, shots: int, seed: int, groups: np.ndarray | None = None
) -> np.ndarray:
    """int64 indices of `shots` samples per class, or all of a smaller class. Smaller sets are subsets of larger ones.

    labels: int64 (n,), negative for samples without a class. As in big_vision, one generator per seed shuffles class
    after class, whatever `shots` is. groups: int64 (n,), of `Split.groups`: each group of a class then gives one sample
    before any gives a second one, because several samples of one patient teach little more than one does.
    """
    generator = np.random.default_rng(seed)
    # Samples of all classes, ascending, in one pass: a search per class would take minutes for 21,843 classes.
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(num_classes + 1))
    chosen = []
    for c in range(num_classes):
        shuffled = generator.permutation(order[starts[c] : starts[c + 1]])
        if groups is not None:
            shuffled = shuffled[np.argsort(_num_before(groups[shuffled]), kind="stable")]
        chosen.append(shuffled[:shots])
    return np.concatenate(chosen)


def _num_before(groups: np.ndarray) -> np.ndarray:
    """int64 (n,): how many samples before each are of its group."""
    order = np.argsort(groups, kind="stable")
    ordered, found = groups[order], np.empty(len(groups), np.int64)
    found[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered)
    return found


def fit(features: np.ndarray, labels: np.ndarray, num_classes: int) -> Callable[[np.ndarray, float], np.ndarray]:
    """Ridge regression of {-1, +1} targets on whitened features, float (n, D), of the classes `labels`, int64 (n,), 0
    to K - 1, fitted in float64 once for all strengths.

    Returns the function (features, float (m, D), l2) -> predicted targets, float64 (m, K). l2 > 0: the strength, which
    also applies to the bias. With X the whitened features and a column of 100, and Y the targets: (X'X + l2)^-1 X'Y, or
    X'(XX' + l2)^-1 Y if n < D + 1.
    """
    wide = features.astype(np.float64)
    mean, std = wide.mean(0), wide.std(0)

    def whiten(features: np.ndarray) -> np.ndarray:
        return np.concatenate([(features - mean) / (std + 1e-5), np.full((len(features), 1), _BIAS)], 1)

    x = whiten(wide)
    n, d = x.shape
    # directions: (D + 1, R), eigenvectors of the smaller Gram matrix, as weights; values: (R,), its eigenvalues;
    # targets: (R, K), projected on the eigenvectors.
    if n >= d:
        values, directions = np.linalg.eigh(x.T @ x)
        # X'Y without building Y, (n, K), which takes 19 GB for 5 shots of 21,843 classes.
        sums = np.zeros((num_classes, d))
        np.add.at(sums, labels, x)
        targets = directions.T @ (2 * sums.T - x.sum(0)[:, None])
    else:
        values, vectors = np.linalg.eigh(x @ x.T)
        y = np.full((n, num_classes), -1.0)
        y[np.arange(n), labels] = 1.0
        directions, targets = x.T @ vectors, vectors.T @ y
    return lambda features, l2: ((whiten(features) @ directions) / (values + l2)) @ targets
