"""Few-shot linear accuracy in closed form (ViT paper, section 4.1; big_vision, evaluators/fewshot_lsr.py).

Shapes: n training samples, m test samples, D features, K classes, M labels of a test sample.
"""

import numpy as np

from pipeline.evaluate.classify import is_any

# Almost unregularised bias: a constant column so large that its weight is small.
_BIAS = 100.0
L2 = 2.0**10
# Test samples at a time: their scores for 21,843 classes take 180 MB.
_CHUNK = 1024


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


def accuracy(
    train: np.ndarray,
    train_labels: np.ndarray,
    test: np.ndarray,
    test_labels: np.ndarray,
    num_classes: int,
    l2: float = L2,
) -> float:
    """Share of test samples that ridge regression to {-1, +1} targets classifies right.

    train: float (n, D), features of the shots; train_labels: int64 (n,). test: float (m, D); test_labels: int64 (m, M),
    any of them is right, -1 never is.
    """
    predicted = classify(train, train_labels, test, num_classes, l2)
    return float(is_any(predicted[:, None], test_labels).mean())


def classify(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, num_classes: int, l2: float = L2
) -> np.ndarray:
    """int64 (m,): the class that ridge regression to {-1, +1} targets gives to each test sample.

    Both sets are whitened with the statistics of `train` and get a bias column, which is regularised as the others are;
    the solution goes through the eigenvectors of the smaller Gram matrix. float64 throughout.
    """
    train = train.astype(np.float64)
    mean, std = train.mean(0), train.std(0)

    def whiten(part: np.ndarray) -> np.ndarray:
        return np.concatenate([(part - mean) / (std + 1e-5), np.full((len(part), 1), _BIAS)], 1)

    x = whiten(train)
    n, d = x.shape
    values, vectors = np.linalg.eigh(x.T @ x if n >= d else x @ x.T)
    inverse = (vectors / (values + l2)) @ vectors.T
    if n >= d:
        # x.T @ y without y, which is (n, K): 19 GB for 5 shots of 21,843 classes.
        sums = np.zeros((num_classes, d))
        np.add.at(sums, train_labels, x)
        weights = inverse @ (2 * sums.T - x.sum(0)[:, None])
    else:
        y = np.full((n, num_classes), -1.0)
        y[np.arange(n), train_labels] = 1.0
        weights = x.T @ (inverse @ y)
    return np.concatenate([np.argmax(whiten(test[i : i + _CHUNK]) @ weights, 1) for i in range(0, len(test), _CHUNK)])
