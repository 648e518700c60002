"""Classification, of pre-training and fine-tuning: the backbone predicts the labels of an image.

Shapes: B batch, K classes, M labels per sample.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.metric import Metric
from pipeline.data.loading.loader import Batch, to_device
from pipeline.data.loading.mix import Mixing, mix_pairs
from pipeline.model import Model
from pipeline.objectives.objective import (
    Facts,
    Images,
    Inputs,
    Metrics,
    Objective,
)
from pipeline.settings.run import RunConfig

# Number of classes that top-5 accuracy looks at.
TOP = 5


class Classification(Objective):
    """Softmax or sigmoid cross-entropy against class labels. kind: see `losses`. read: in place of `normalised`."""

    predicts = "classes"
    trains_backbone_alone = True

    @classmethod
    def metrics(cls, config: RunConfig) -> Metrics:
        accuracy = Metric("proportion", "higher")
        asked = {"map": Metric("share", "higher")} if config.evaluate.mean_ap else {}
        return {**asked, "top1": accuracy, "top5": accuracy, **super().metrics(config)}

    @classmethod
    def check_classes(cls, config: RunConfig, num_classes: int, names: Sequence[str]) -> str:
        if num_classes == 1 and config.train.loss != "sigmoid":
            raise UserError(
                f"train.loss = {config.train.loss} needs at least two classes, and this data set has one, so nothing is"
                " learned. Use train.loss=sigmoid if some images do not have the label, or an objective that needs no"
                " labels."
            )
        return ""

    @classmethod
    def of_backbone(cls, config: RunConfig, num_classes: int) -> dict[str, Any]:
        return {"num_classes": num_classes}

    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> Objective:
        return cls(backbone, config.train.loss, config.train.label_smoothing)

    def __init__(
        self,
        backbone: Model,
        kind: str,
        label_smoothing: float = 0.0,
        read: Callable[[Tensor, torch.device], Tensor] | None = None,
    ) -> None:
        super().__init__(backbone)
        self.loss_kind, self.label_smoothing = kind, label_smoothing
        self.normalised = read or self.normalised  # type: ignore[assignment, method-assign]

    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        views, facts = super().inputs(batch, device, mixing)
        return Inputs(views, facts | {"labels": to_device(batch.labels, device)})

    def losses(self, views: Images, facts: Facts) -> Tensor:
        return losses(self.backbone(views[0]), facts["labels"], self.loss_kind, self.label_smoothing, facts.get("own"))


def moved_class(data: str, of_data: Sequence[str], weights: str, of_weights: Sequence[str]) -> str:
    """The first class of a data set that weights of as many classes have, by its name, at another place: as the
    beginning of an error.

    "" for none, and for weights whose classes have no names. data, weights: what they are called.
    """
    numbers = {name: n for n, name in enumerate(of_weights)}
    for n, (name, there) in enumerate(zip(of_data, of_weights, strict=False)):
        if name != there and name in numbers:
            return f"class {n} of {data} is {quoted(name)}, which is class {numbers[name]} of {weights}"
    return ""


def unnamed_note(weights: str, data: str, classes: Sequence[str]) -> str:
    """A line for weights without class names, such as an .npz, whose classes are taken by number: in another order, all
    are wrong. classes: of the data.
    """
    return (
        f"{weights} has no class names: its classes are taken to be those of {data}, in the same order: 0 is"
        f" {quoted(classes[0])}, {len(classes) - 1:,} is {quoted(classes[-1])}"
    )


def classes_note(data: str, of_data: Sequence[str], weights: str, of_weights: Sequence[str]) -> str:
    """A line for classes that a data set and weights match by number alone; "" if all have the same names. Arguments:
    see `moved_class`.
    """
    if not of_weights:
        return unnamed_note(weights, data, of_data)
    other = [n for n, pair in enumerate(zip(of_data, of_weights, strict=False)) if pair[0] != pair[1]]
    if not other:
        return ""
    return (
        f"classes by number: {len(other):,} of {data} are called otherwise in {weights}, such as"
        f" {quoted(of_data[other[0]])} for {quoted(of_weights[other[0]])}"
    )


def has_top5(num_classes: int) -> bool:
    """Whether top-5 accuracy says anything: of five classes or fewer, each is among the five most likely ones."""
    return num_classes > TOP


def targets(labels: Tensor, num_classes: int) -> Tensor:
    """Multi-hot targets, float32 (B, K), of labels int64 (B, M), -1 where a sample has fewer than M."""
    hot = torch.zeros((labels.shape[0], num_classes + 1), dtype=torch.float32, device=labels.device)
    # Missing labels go into an extra column, which is dropped.
    hot.scatter_(1, torch.where(labels < 0, num_classes, labels), 1.0)
    return hot[:, :num_classes]


def losses(
    logits: Tensor, labels: Tensor, kind: str, label_smoothing: float = 0.0, own: Tensor | None = None
) -> Tensor:
    """Loss per sample, float32 (B,), from logits (B, K) and labels int64 (B, M).

    kind "softmax": cross-entropy with the mean of the labels, smoothed over all classes. "sigmoid": binary
    cross-entropy summed over the classes, as the paper's authors train on multi-label data (big_vision,
    configs/vit_i21k.py).
    own: for a batch mixed in pairs, weight of each sample's own labels, float32 (B,) (`data/loading/mix.py`).
    With softmax, a sample without a label has the loss 0, and in a mixed pair only its partner's labels count.
    """
    logits = logits.float()
    target, unlabelled = targets(labels, logits.shape[1]), (labels < 0).all(1, keepdim=True).float()
    if kind == "softmax":
        target = target / target.sum(1, keepdim=True).clamp(min=1)
    if own is not None:
        target, unlabelled = mix_pairs(target, own), mix_pairs(unlabelled, own)
    if kind == "sigmoid":
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)
    # Smoothed as far as there are labels: else an image without one would be trained to the uniform distribution.
    smoothing = label_smoothing / logits.shape[1]
    target = target * (1 - label_smoothing) + (smoothing - smoothing * unlabelled)
    return -(target * F.log_softmax(logits, dim=1)).sum(1)
