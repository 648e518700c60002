"""Scores of images with several labels: average precision, and precision, recall and F1 at a probability of 0.5.

Shapes: n samples, K classes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.base.words import counted
from pipeline.data.dataset.split import Split
from pipeline.evaluate.classify import ClassReport, Predictions, label_table
from pipeline.evaluate.intervals import SHARE, bootstrapped
from pipeline.evaluate.measures import average_precision, mean_of_known

CSV = "per_label.csv"
_THRESHOLD = 0.5
# 0.8 GB of probabilities.
_MAX_VALUES = 200_000_000


def is_multilabel(split: Split, num_classes: int, loss_kind: str) -> bool:
    """Whether images may have any number of labels: some have several, or, with sigmoid, some have none; and the
    probabilities of all classes can be kept, which is said if not.
    """
    has_bare = loss_kind == "sigmoid" and bool((split.label_counts == 0).any())
    if split.max_labels <= 1 and not has_bare:
        return False
    if len(split) * num_classes <= _MAX_VALUES:
        return True
    images = counted(len(split), "image")
    print(f"no mAP: the probabilities of {num_classes:,} classes for {images} take too much memory")
    return False


def has_labels(split: Split, num_classes: int) -> np.ndarray:
    """bool (n, K): whether each sample has each label."""
    found, labels = np.zeros((len(split), num_classes), bool), label_table(split)
    for column in labels.T:
        rows = np.flatnonzero(column >= 0)
        found[rows, column[rows]] = True
    return found


def _scores(predictions: Predictions) -> np.ndarray:
    """(n, K): the probabilities; of images without a prediction below all others, as they count as wrong."""
    assert predictions.of_classes is not None
    return np.where(predictions.computed[:, None], predictions.of_classes, -1)


def mean_average_precision(
    predictions: Predictions, split: Split, num_classes: int
) -> tuple[dict[str, Any], np.ndarray]:
    """(map, the mean over the classes with images, and map_low and map_high, the ends of its interval, NaN if no image
    has a label; the average precision of each class, (K,)). predictions: with `of_classes`.
    """
    columns = zip(_scores(predictions).T, has_labels(split, num_classes).T, strict=True)
    of_each = [average_precision(*column) for column in columns]

    def precisions(weights: np.ndarray) -> np.ndarray:
        return np.array([of(weights) for of in of_each])

    def mean(weights: np.ndarray) -> np.ndarray:
        return mean_of_known(precisions(weights))[None]  # A draw may leave out all images of a rare class.

    found = bootstrapped(mean, [SHARE], len(split), split.groups, num_classes)[:, 0].tolist()
    return dict(zip(("map", "map_low", "map_high"), found, strict=True)), precisions(np.ones(len(split)))


def score(predictions: Predictions, split: Split, names: Sequence[str]) -> dict[str, Any]:
    """map with map_low and map_high, and label_f1, means over the classes with images; per_label, a row for each class.

    predictions: with `of_classes`.
    """
    scores, has = _scores(predictions), has_labels(split, len(names))
    if not has.any():
        return {}
    means, of_classes = mean_average_precision(predictions, split, len(names))
    chosen = scores >= _THRESHOLD
    report = ClassReport.of((chosen & has).sum(0), chosen.sum(0), has.sum(0))
    first = {"class": names, "images": report.support, "average_precision": of_classes}
    rows = pa.table({**first, **report._asdict()}).drop_columns("support").to_pylist()
    return {**means, "label_f1": report.macro()["macro_f1"], "per_label": rows}
