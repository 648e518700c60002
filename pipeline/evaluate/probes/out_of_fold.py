"""Predicts the class of each image by a linear layer that was fitted to other images, to find wrong labels.

Shapes: n samples, D features, K classes.
"""

import numpy as np

from pipeline.base import random_numbers
from pipeline.base.random_numbers import Purpose
from pipeline.evaluate.classify import Features
from pipeline.evaluate.probes import fewshot

_L2 = 2.0**10  # As in big_vision.
# Candidates for the factor of the ridge regression's targets, which are in [-1, 1], that makes logits of them.
_FACTORS = np.geomspace(0.5, 64, 29)


def predict_out_of_fold(
    features: Features, labels: np.ndarray, num_classes: int, folds: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (predicted class, int64, -1 where it is not known; its probability; that of the label), (n,) each.

    features: of all n samples. labels: int64 (n,), -1 without one. groups: int64 (n,), of `Split.groups`, which are not
    divided. The samples of a fold are predicted by `fewshot.fit` to those of the others. Probabilities are the softmax
    of its targets times the factor of the fold for which the labels are the most likely.
    """
    usable = np.flatnonzero(features.usable & (labels >= 0))
    values, known = features.values[usable], labels[usable]
    fold = divide(known, folds, None if groups is None else groups[usable])
    predicted, of_predicted, of_labels = np.full(len(labels), -1), np.zeros(len(labels)), np.zeros(len(labels))
    for number in range(folds):
        tested = fold == number
        if tested.all() or not tested.any():
            continue
        targets = fewshot.fit(values[~tested], known[~tested], num_classes)(values[tested], _L2)
        targets -= targets.max(1, keepdims=True)
        of_label = np.take_along_axis(targets, known[tested][:, None], 1)[:, 0]
        # The probability of the most likely class is 1 / the sum.
        sums = {factor: np.exp(factor * targets).sum(1) for factor in _FACTORS}
        best = max(sums, key=lambda factor: float((factor * of_label - np.log(sums[factor])).sum()))
        predicted[usable[tested]] = targets.argmax(1)
        of_predicted[usable[tested]] = 1 / sums[best]
        of_labels[usable[tested]] = np.exp(best * of_label) / sums[best]
    return predicted, of_predicted, of_labels


def divide(labels: np.ndarray, folds: int, groups: np.ndarray | None) -> np.ndarray:
    """int64 (n,), 0 to folds - 1: the fold of each sample, at random, each with about its share of each class; groups
    are not divided.
    """
    _, first, units = np.unique(np.arange(len(labels)) if groups is None else groups, True, True)
    order = random_numbers.permutation(len(first), 0, Purpose.named("folds"))
    order = order[np.argsort(labels[first][order], kind="stable")]
    found = np.empty(len(first), np.int64)
    found[order] = np.arange(len(first)) % folds
    return found[units]
