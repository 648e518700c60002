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

from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch
from pipeline.evaluate.classify import each_sample
from pipeline.evaluate.split_reader import SplitReader
from pipeline.objectives.regression import metric_name


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

    def columns(batch: Batch) -> list[Tensor]:
        return [forward(batch.images).float()]

    (values,), readable, problems = each_sample(columns, reader)
    return TargetPredictions(values, reader.split.target_values, readable, problems)


@dataclass(frozen=True)
class RegressionScores:
    """Scores of each target, by its name: {"num_values": m, "r2": ..., "rmse": ..., "mae": ..., "spearman": ...}. loss:
    mean over the readable images, None where it is not known.
    """

    per_target: dict[str, dict[str, float]]
    num_samples: int
    num_unreadable: int
    loss: float | None = None

    def to_dict(self) -> dict[str, float]:
        """The metrics that `objectives.regression.metrics_of` declares."""
        each = list(self.per_target.values())
        if len(each) == 1:
            found = {name: value for name, value in each[0].items() if name != "num_values"}
        else:
            found = {name: float(np.mean([of[name] for of in each])) for name in ("r2", "spearman")}
            for target, of in self.per_target.items():
                found |= {f"{name}_{metric_name(target)}": of[name] for name in of if name != "num_values"}
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
    predictions: TargetPredictions, names: Sequence[str], losses: Callable[[Tensor, Tensor], Tensor] | None = None
) -> RegressionScores:
    """Scores of predictions of the named targets. losses: values and targets, float32 (n, T) -> (n,)."""
    scored, readable = predictions.scored, predictions.readable
    per_target = {}
    for place, name in enumerate(names):
        of = scored[:, place]
        predicted, true = (values[of, place].astype(np.float64) for values in (predictions.values, predictions.targets))
        found = {score.__name__: score(predicted, true) for score in (r2, rmse, mae, spearman)}
        per_target[name] = {"num_values": len(true), **found}
    loss = None
    if losses is not None:
        values, targets = (torch.from_numpy(of[readable]) for of in (predictions.values, predictions.targets))
        loss = float(losses(values, targets).double().mean())
    return RegressionScores(per_target, len(readable), int((~readable).sum()), loss)


# Of predicted and true values, float64 (m,); NaN without any.
def r2(predicted: np.ndarray, true: np.ndarray) -> float:
    """The coefficient of determination, 1 - sum((true - predicted)^2) / sum((true - mean(true))^2): 1 is perfect, 0 as
    good as always saying the mean of the values scored, below 0 worse. NaN for values that are all the same.
    """
    total = float(np.square(true - true.mean()).sum()) if len(true) else 0.0
    return 1 - float(np.square(true - predicted).sum()) / total if total else float("nan")


def rmse(predicted: np.ndarray, true: np.ndarray) -> float:
    """The root of the mean squared error."""
    return float(np.sqrt(np.square(true - predicted).mean())) if len(true) else float("nan")


def mae(predicted: np.ndarray, true: np.ndarray) -> float:
    """The mean absolute error."""
    return float(np.abs(true - predicted).mean()) if len(true) else float("nan")


def spearman(predicted: np.ndarray, true: np.ndarray) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. NaN where either is constant."""
    ranks = [_ranks(values) for values in (predicted, true)]
    centred = [of - of.mean() for of in ranks] if len(true) else ranks
    norm = float(np.sqrt(np.square(centred[0]).sum() * np.square(centred[1]).sum()))
    return float((centred[0] * centred[1]).sum()) / norm if norm else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    """float64 (m,), ranks from 1, of equal values their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
