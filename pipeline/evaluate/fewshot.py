"""Few-shot linear accuracy in closed form (ViT paper, section 4.1; big_vision, evaluators/fewshot_lsr.py)."""

import numpy as np

# Almost unregularised bias: a constant column so large that its weight is small.
_BIAS = 100.0
L2 = 2.0**10


def choose_shots(labels: np.ndarray, num_classes: int, shots: int, seed: int) -> np.ndarray:
    """int64 indices of `shots` samples of each class, fewer where a class has fewer. Smaller sets lie in larger ones.

    labels: int64 (n,). One generator per seed shuffles the classes in order, whatever `shots` is.
    """
    generator = np.random.default_rng(seed)
    chosen = [generator.permutation(np.flatnonzero(labels == c))[:shots] for c in range(num_classes)]
    return np.concatenate(chosen)


def accuracy(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray, num_classes: int, l2: float = L2
) -> float:
    """Share of test samples that ridge regression to {-1, +1} targets classifies right.

    train: float (n, D) features of the shots; test: float (m, D); labels int64. Both are whitened with the statistics of
    `train` and get a bias column; the solution goes through the eigenvectors of the smaller Gram matrix.
    """
    mean, std = train.mean(0), train.std(0)
    x, x_test = (_with_bias((part - mean) / (std + 1e-5)) for part in (train.astype(np.float64), test.astype(np.float64)))
    y = 2.0 * np.eye(num_classes)[train_labels] - 1
    n, d = x.shape
    values, vectors = np.linalg.eigh(x.T @ x if n >= d else x @ x.T)
    inverse = (vectors / (values + l2)) @ vectors.T
    weights = inverse @ (x.T @ y) if n >= d else x.T @ (inverse @ y)
    return float((np.argmax(x_test @ weights, 1) == test_labels).mean())


def _with_bias(features: np.ndarray) -> np.ndarray:
    return np.concatenate([features, np.full((len(features), 1), _BIAS)], 1)
