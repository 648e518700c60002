"""Regression: the backbone predicts numbers of an image, such as an age or a dose.

Each target is standardised by the mean and the deviation of its values in the training split, so that targets of
different units weigh the same. A missing value contributes nothing. The head predicts standardised values; checkpoints
say how they are standardised (`extra`), and `pipeline.model.load` makes a head of it that predicts the values
themselves.

Shapes: B batch, T targets, n samples.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor, nn

from pipeline.base.metric import Metric
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch, to_device
from pipeline.data.loading.mix import Mixing, mix_pairs
from pipeline.data.mixture.run_data import RunData
from pipeline.model import Model
from pipeline.model.weights import TARGET_SCALE, TARGETS
from pipeline.objectives.objective import Facts, Images, Inputs, Metrics, Objective
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings


class RegressionSettings(Settings):
    delta: PositiveFloat = 1.0
    """Error from which the Huber loss is linear, in standard deviations of the target, so that few wrong or extreme
    values do not decide; below, half of its square. 100 is the squared error.
    """


class Regression(Objective):
    """Huber loss of standardised targets."""

    Settings = RegressionSettings
    predicts = "targets"
    trains_backbone_alone = True

    @classmethod
    def metrics(cls, config: RunConfig) -> Metrics:
        return {**metrics_of(config.data.targets), **super().metrics(config)}

    @classmethod
    def of_backbone(cls, config: RunConfig, num_classes: int) -> dict[str, Any]:
        return {"num_classes": len(config.data.target_names)}

    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> Objective:
        return cls(backbone, cls.settings(config), config.data.target_names)

    def __init__(self, backbone: Model, given: RegressionSettings, names: Sequence[str]) -> None:
        super().__init__(backbone)
        self.given, self.names, self.scale = given, list(names), TargetScale(len(names))

    def learn_from(self, data: RunData, head_is_trained: bool) -> str:
        """Take mean and deviation of the targets from what is trained on; returns a line that says them."""
        values = data.split.target_values
        of_values = standardisation(values)
        for buffer, found in zip((self.scale.mean, self.scale.deviation), of_values, strict=True):
            buffer.copy_(torch.from_numpy(found))
        if head_is_trained:  # It predicts the values themselves.
            weight, bias = (self.backbone.get_parameter(f"head.{name}") for name in ("weight", "bias"))
            mean, deviation = (of.to(weight.device) for of in (self.scale.mean, self.scale.deviation))
            with torch.no_grad():
                weight.div_(deviation[:, None])
                bias.sub_(mean).div_(deviation)
        counts = np.isfinite(values).sum(0).tolist()
        described = (
            f"{name} {mean:.6g} +- {deviation:.6g} ({counted(count, 'value')})"
            for name, mean, deviation, count in zip(self.names, *of_values, counts, strict=True)
        )
        return f"targets, mean and deviation in training: {', '.join(described)}"

    def extra(self) -> dict[str, Any]:
        scale = {"mean": self.scale.mean.tolist(), "deviation": self.scale.deviation.tolist()}
        return {TARGETS: self.names, TARGET_SCALE: scale}

    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        views, facts = super().inputs(batch, device, mixing)
        targets = self.scale.standardised(to_device(batch.targets, device))
        if (own := facts.get("own")) is not None:
            # A sample that is not mixed keeps its values where its partner lacks them.
            targets = torch.where(own[:, None] == 1, targets, mix_pairs(targets, own))
        return Inputs(views, facts | {"targets": targets})

    def losses_of(self, values: Tensor, targets: Tensor) -> Tensor:
        """The loss (n,) of predictions and targets (n, T) in their own units."""
        predicted, true = (self.scale.standardised(of.to(self.scale.mean.device)) for of in (values, targets))
        return losses(predicted, true, self.given.delta).cpu()

    def losses(self, views: Images, facts: Facts) -> Tensor:
        return losses(self.backbone(views[0]), facts["targets"], self.given.delta)

    def forward(
        self, views: Images, facts: Facts, task: Literal["loss", "measure", "backbone"] = "loss"
    ) -> Any:  # "backbone": values in the targets' own units.
        found = super().forward(views, facts, task)
        return found.float() * self.scale.deviation + self.scale.mean if task == "backbone" else found


class TargetScale(nn.Module):
    """What standardises targets. mean, deviation: float32 (T,), of the values in the training split of the first
    start: a set that is added to a mixture later does not change what the head says.
    """

    def __init__(self, num_targets: int) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(num_targets, dtype=torch.float32))
        self.deviation = nn.Buffer(torch.ones(num_targets, dtype=torch.float32))

    def standardised(self, targets: Tensor) -> Tensor:
        """Targets (B, T) in their own units -> in deviations from their mean."""
        return (targets - self.mean) / self.deviation


def metric_name(target: str) -> str:
    """How the metrics of a target end: its name, with _ for what names of metrics may not have."""
    return re.sub(r"[^\w.-]", "_", target)


def metrics_of(targets: Sequence[str]) -> Metrics:
    """The scores of predictions of these targets, the most telling first; with several, also those of each, and of all
    only the means that have no unit.
    """
    scores = {
        "r2": Metric(better="higher"),
        "rmse": Metric(better="lower"),
        "mae": Metric(better="lower"),
        "spearman": Metric(better="higher"),
    }
    if len(targets) < 2:
        return scores
    of_each = {f"{name}_{metric_name(of)}": metric for of in targets for name, metric in scores.items()}
    return {"r2": scores["r2"], "spearman": scores["spearman"], **of_each}


def losses(predicted: Tensor, targets: Tensor, delta: float) -> Tensor:
    """Loss per sample, float32 (B,), of standardised predictions and targets (B, T), NaN for a missing one: the sum
    over those that are there, divided by T, so that each value counts the same.

    Half of the squared error up to delta, delta * (error - delta / 2) beyond (Huber 1964).
    """
    present = targets.isfinite()
    # In place of a missing value, the prediction: NaN times 0 would be NaN, also in the gradient.
    predicted = predicted.float()
    known = torch.where(present, targets, predicted.detach())
    return F.huber_loss(predicted, known, reduction="none", delta=delta).mean(1)


def standardisation(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, deviation), float32 (T,) each, of the values (n, T) that are there, computed in float64. The deviation of
    a constant is 1.

    values: NaN where one is missing, each target with at least one.
    """
    columns = [column[np.isfinite(column)].astype(np.float64) for column in values.T]
    mean = np.array([column.mean() for column in columns], np.float32)
    deviation = np.array([column.std() for column in columns], np.float32)
    return mean, np.where(deviation > 0, deviation, np.float32(1))
