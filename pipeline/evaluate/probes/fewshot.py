"""Few-shot linear accuracy in closed form (ViT paper, section 4.1; big_vision, evaluators/fewshot_lsr.py).

Shapes: n training samples, m test samples, D features, K classes, R the smaller of n and D + 1.
"""

from dataclasses import dataclass

import numpy as np

# Almost unregularised bias: a constant column so large that its weight is small.
_BIAS = 100.0


def choose_shots(labels: np.ndarray, num_classes: int, shots: int, seed: int) -> np.ndarray:
    """int64 indices of `shots` samples of each class, fewer where a class has fewer. Smaller sets lie in larger ones.

    labels: int64 (n,), negative for samples of no class. One generator per seed shuffles the classes in order, whatever
    `shots` is, exactly as big_vision does.
    """
    generator = np.random.default_rng(seed)
    # Every class's samples, ascending, in one pass: a search for each of 21,843 classes would take minutes.
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(num_classes + 1))
    chosen = [generator.permutation(order[starts[c] : starts[c + 1]])[:shots] for c in range(num_classes)]
    return np.concatenate(chosen)


@dataclass(frozen=True)
class Ridge:
    """Ridge regression of {-1, +1} targets on whitened features, for every strength at once.

    mean, std: (D,), of the training features. directions: (D + 1, R), eigenvectors of the smaller Gram matrix, as weights;
    values: (R,), its eigenvalues. targets: (R, K), along them. All float64.
    """

    mean: np.ndarray
    std: np.ndarray
    directions: np.ndarray
    values: np.ndarray
    targets: np.ndarray

    def scores(self, features: np.ndarray, l2: float) -> np.ndarray:
        """float (m, D) -> float64 (m, K), which the targets of `fit` are like. l2 > 0: the strength, of the bias, too."""
        return ((_whiten(features, self.mean, self.std) @ self.directions) / (self.values + l2)) @ self.targets

    def classify(self, features: np.ndarray, l2: float) -> np.ndarray:
        """float (m, D) -> int64 (m,): the class of the highest score."""
        return self.scores(features, l2).argmax(1)


def fit(features: np.ndarray, labels: np.ndarray, num_classes: int) -> Ridge:
    """The regression on float (n, D) features of classes `labels`, int64 (n,), 0 to K - 1. float64 throughout.

    With X the features, whitened by their own mean and deviation beside a column of 100: (X'X + l2)^-1 X'Y, or
    X'(XX' + l2)^-1 Y where n < D + 1.
    """
    wide = features.astype(np.float64)
    mean, std = wide.mean(0), wide.std(0)
    x = _whiten(wide, mean, std)
    n, d = x.shape
    if n >= d:
        values, vectors = np.linalg.eigh(x.T @ x)
        # X'Y without Y, which is (n, K): 19 GB for 5 shots of 21,843 classes.
        sums = np.zeros((num_classes, d))
        np.add.at(sums, labels, x)
        return Ridge(mean, std, vectors, values, vectors.T @ (2 * sums.T - x.sum(0)[:, None]))
    values, vectors = np.linalg.eigh(x @ x.T)
    y = np.full((n, num_classes), -1.0)
    y[np.arange(n), labels] = 1.0
    return Ridge(mean, std, x.T @ vectors, values, vectors.T @ y)


def _whiten(features: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return np.concatenate([(features - mean) / (std + 1e-5), np.full((len(features), 1), _BIAS)], 1)
