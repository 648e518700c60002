"""Scores of images with several labels: average precision, and precision, recall and F1 at a probability of 0.5.

Shapes: n samples, K classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.base.words import counted
from pipeline.data.dataset.split import Split
from pipeline.evaluate.classify import ClassReport, Predictions, label_table
from pipeline.evaluate.intervals import SHARE, bootstrapped
from pipeline.evaluate.measures import Ranking, mean_of_known

CSV = "per_label.csv"
_THRESHOLD = 0.5
# 0.8 GB of probabilities.
_MAX_VALUES = 200_000_000


def is_multilabel(split: Split, loss_kind: str) -> bool:
    """Whether images may have any number of labels: some have several, or, with sigmoid, some have none."""
    return split.max_labels > 1 or (loss_kind == "sigmoid" and bool((split.label_counts == 0).any()))


def fits_memory(split: Split, num_classes: int) -> bool:
    """Whether the probabilities of all classes can be kept; says so if not."""
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


class MeanPrecision(NamedTuple):
    """mAP with the ends of its interval, NaN if no image has a label. of_classes: (K,), average precisions."""

    value: float
    low: float
    high: float
    of_classes: np.ndarray


def mean_average_precision(predictions: Predictions, split: Split, num_classes: int) -> MeanPrecision:
    """The mean over the classes with images. predictions: with `of_classes`."""
    columns = zip(_scores(predictions).T, has_labels(split, num_classes).T, strict=True)
    rankings = [Ranking(*column) for column in columns]

    def precisions(weights: np.ndarray) -> np.ndarray:
        return np.array([ranking.average_precision(weights) for ranking in rankings])

    def mean(weights: np.ndarray) -> float:
        return float(mean_of_known(precisions(weights)))  # A draw may leave out all images of a rare class.

    found = bootstrapped(mean, SHARE, len(split), split.groups, num_classes)
    return MeanPrecision(*found, precisions(np.ones(len(split))))


def score(predictions: Predictions, split: Split, names: Sequence[str]) -> dict[str, Any]:
    """map with map_low and map_high, and label_f1, means over the classes with images; per_label, a row for each class.

    predictions: with `of_classes`.
    """
    scores, has = _scores(predictions), has_labels(split, len(names))
    if not has.any():
        return {}
    found = mean_average_precision(predictions, split, len(names))
    chosen = scores >= _THRESHOLD
    report = ClassReport.of((chosen & has).sum(0), chosen.sum(0), has.sum(0))
    rows = [
        {
            "class": name,
            "images": int(report.support[number]),
            "average_precision": float(found.of_classes[number]),
            **{column: float(values[number]) for column, values in report._asdict().items() if column != "support"},
        }
        for number, name in enumerate(names)
    ]
    means = {"map": found.value, "map_low": found.low, "map_high": found.high}
    return {**means, "label_f1": report.macro()["macro_f1"], "per_label": rows}
