"""Predictions of numbers, and their scores, exact on any number of ranks.

Unreadable images and missing values are not scored, but counted.

Shapes: n samples, T targets, m values that are scored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset, Split
from pipeline.evaluate import measures
from pipeline.evaluate.classify import each_sample
from pipeline.evaluate.intervals import CORRELATION, ERROR, EXPLAINED, bootstrapped
from pipeline.evaluate.split_reader import SplitReader
from pipeline.objectives.regression import metric_name

SCORES = ("r2", "rmse", "mae", "spearman")
_SCALES = (EXPLAINED, ERROR, ERROR, CORRELATION)
ENDS = ("", "_low", "_high")
_WITH_ENDS = [f"{score}{end}" for score in SCORES for end in ENDS]


@dataclass(frozen=True)
class TargetPredictions:
    """Predictions for all samples of a split, in row order.

    values: float32 (n, T), in the targets' own units. targets: float32 (n, T), the true ones, NaN where one is missing.
    readable: bool (n,), False where the image could not be decoded. problems: row -> reason.
    """

    values: np.ndarray
    targets: np.ndarray
    readable: np.ndarray
    problems: dict[int, str]

    @property
    def scored(self) -> np.ndarray:
        """bool (n, T), the values that are scored."""
        return self.readable[:, None] & np.isfinite(self.targets)


def predict_targets(forward: Callable[[Tensor], Tensor], reader: SplitReader) -> TargetPredictions:
    """Run `forward` (images (B, H, W, C) -> (B, T)) over the whole split; see `each_sample`."""
    (values,), readable, problems = each_sample(lambda batch: [forward(batch.images).float()], reader)
    return TargetPredictions(values, reader.split.target_values, readable, problems)


def with_targets_of(weights: str, names: Sequence[str], dataset: Dataset, split: Split) -> Split:
    """The split with the numbers that weights predict; those that the data set lacks are missing, which is said.

    Raises UserError if the split has no value of any.
    """
    split = split.with_targets(names, dataset.targets)
    lacking = [name for name, column in zip(names, split.target_values.T, strict=True) if not np.isfinite(column).any()]
    where = f"split {split.name!r} of {dataset.path}"
    if len(lacking) == len(names):
        known = f" It has: {', '.join(dataset.targets)}." if dataset.targets else ""
        raise UserError(
            f"{weights} predicts {', '.join(names)}, and {where} has no values of that, so nothing can be scored on"
            f" it.{known} Without a score: launch/predict.py."
        )
    if lacking:
        print(f"not scored, since {where} has no values: {', '.join(lacking)}")
    return split


@dataclass(frozen=True)
class RegressionScores:
    """Scores of each target, by its name: num_values, and r2, rmse, mae, spearman, each with the ends of its interval,
    r2_low and r2_high. means: r2 and spearman over the targets, which have no unit, likewise. loss: mean over the
    readable images, None where it is not known.
    """

    per_target: dict[str, dict[str, float]]
    means: dict[str, float]
    num_samples: int
    num_unreadable: int
    loss: float | None = None

    def to_dict(self) -> dict[str, float]:
        """The metrics that `objectives.regression.metrics_of` declares."""
        each = list(self.per_target.values())
        if len(each) == 1:
            found = {name: value for name, value in each[0].items() if name != "num_values"}
        else:
            found = dict(self.means)
            for target, of in self.per_target.items():
                own = metric_name(target)
                found |= {f"{name}_{own}{end}": of[name + end] for name in SCORES for end in ENDS}
        loss = {} if self.loss is None else {"loss": self.loss}
        return {**found, **loss, "num_samples": self.num_samples, "num_unreadable": self.num_unreadable}

    def records(self) -> list[dict[str, Any]]:
        """A row for each target."""
        return [{"target": target, **of} for target, of in self.per_target.items()]

    def __str__(self) -> str:
        of_targets = "; ".join(
            f"{target} R2 {of['r2']:.4f}, RMSE {of['rmse']:.4g}, MAE {of['mae']:.4g}, Spearman {of['spearman']:.4f}"
            + f" ({counted(int(of['num_values']), 'value')})" * (of["num_values"] != self.num_samples)
            for target, of in self.per_target.items()
        )
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        bad = f", {self.num_unreadable:,} unreadable (not scored)" if self.num_unreadable else ""
        return f"{of_targets}{loss} on {counted(self.num_samples, 'image')}{bad}"


def score_targets(
    predictions: TargetPredictions,
    names: Sequence[str],
    groups: np.ndarray | None = None,
    losses: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> RegressionScores:
    """Scores of predictions of the named targets. groups: int64 (n,), of `Split.groups`. losses: values and targets,
    float32 (n, T) -> (n,).
    """
    measure = measure_of(predictions)
    num_samples, num_targets = predictions.values.shape
    found = bootstrapped(measure, _SCALES * (num_targets + 1), num_samples, groups, num_targets)
    rows = [
        dict(zip(_WITH_ENDS, of.T.ravel().tolist(), strict=True)) for of in np.split(found, num_targets + 1, axis=1)
    ]
    counts = predictions.scored.sum(0).tolist()
    per_target = {name: {"num_values": count, **row} for name, count, row in zip(names, counts, rows, strict=False)}
    means = {name: value for name, value in rows[-1].items() if name.startswith(("r2", "spearman"))}
    loss, readable = None, predictions.readable
    if losses is not None:
        pair = (torch.from_numpy(of[readable]) for of in (predictions.values, predictions.targets))
        loss = float(losses(*pair).double().mean())
    return RegressionScores(per_target, means, len(readable), int((~readable).sum()), loss)


def measure_of(predictions: TargetPredictions) -> measures.Measure:
    """How often each sample counts, (n,), -> SCORES of each target, and after those their means over the targets that
    have values, ((T + 1) x 4,).
    """
    known = []
    for scored, *pair in zip(predictions.scored.T, predictions.targets.T, predictions.values.T, strict=True):
        true, predicted = (of[scored].astype(np.float64) for of in pair)
        known.append((scored, true, predicted, (measures.places(true), measures.places(predicted))))

    def measure(weights: np.ndarray) -> np.ndarray:
        rows = []
        for scored, true, predicted, places in known:
            own = weights[scored]
            errors = (score(true, predicted, own) for score in (measures.r2, measures.rmse, measures.mae))
            rows.append([*errors, measures.spearman(*places, own)])
        return np.concatenate([*rows, measures.mean_of_known(np.array(rows))])

    return measure
