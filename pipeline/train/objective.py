"""Objectives: image classification and masked patch prediction. Each has a loss and a score.

Shapes: B batch, K classes, M labels, N patches, C corrupted patches, T targets of a patch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.data.loading.loader import Batch, normalise, to_device
from pipeline.data.loading.mix import Mixing, mix_images
from pipeline.evaluate.classify import Predictions, Scores, predict, score
from pipeline.evaluate.masked import MaskedScores, score_masked
from pipeline.evaluate.split_reader import SplitReader
from pipeline.model import MaskedViT, Model
from pipeline.objectives import classification
from pipeline.objectives.masked_patches import Masking
from pipeline.settings.run import RunConfig


class Targets(NamedTuple):
    """Targets of a batch.

    values: labels int64 (B, M), or targets of the corrupted patches (B, C, T). valid: bool (B,), False for samples that could
    not be read. own: float32 (B,), weight of each sample's own labels if images were mixed in pairs, else None.
    """

    values: Tensor
    valid: Tensor
    own: Tensor | None


class Objective(Protocol):
    """Interface of an objective for the training step, the dry run and evaluation."""

    def prepare(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> tuple[tuple[Tensor, ...], Targets]:
        """Return the model's inputs on the device, images float32 (B, 3, H, W) first, and the targets."""

    def extra_inputs(self, batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
        """Return the model's inputs other than the images."""

    def loss(self, predictions: Tensor, targets: Targets) -> Tensor:
        """Return the scalar loss: sum over valid samples, divided by B."""

    def score_on_all_ranks(
        self, forward: Callable[..., Tensor], reader: SplitReader
    ) -> tuple[Scores | MaskedScores, Predictions | None]:
        """Score a whole split; returns also the predictions of classes, if it predicts classes.

        forward: (uint8 images (B, H, W, 3), extra inputs) -> predictions.
        """


def normalised(pixels: Tensor, device: torch.device) -> Tensor:
    """uint8 (B, H, W, 3) -> float32 (B, 3, H, W) in [-1, 1] on the device."""
    return normalise(pixels, device, torch.float32)


@dataclass(frozen=True)
class Classification:
    """Softmax or sigmoid cross-entropy against class labels. read: uint8 pixels -> model input."""

    kind: str
    label_smoothing: float = 0.0
    read: Callable[[Tensor, torch.device], Tensor] = normalised

    def prepare(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> tuple[tuple[Tensor, ...], Targets]:
        pixels = batch.images.to(device, non_blocking=True)
        labels, valid = to_device(batch.labels, device), to_device(batch.valid, device)
        images, own = self.read(pixels, device), None
        if mixing is not None:
            images, own = mix_images(images, valid, mixing)
        return (images,), Targets(labels, valid, own)

    def extra_inputs(self, batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
        return ()

    def loss(self, predictions: Tensor, targets: Targets) -> Tensor:
        return classification.batch_loss(
            predictions, targets.values, targets.valid, self.kind, self.label_smoothing, targets.own
        )

    def score_on_all_ranks(self, forward: Callable[..., Tensor], reader: SplitReader) -> tuple[Scores, Predictions]:
        found = predict(forward, reader, self.kind)
        return score(found, reader.split), found


@dataclass(frozen=True)
class MaskedPatches:
    """Masked patch prediction (ViT paper, B.1.2). Mixing images is refused by the settings."""

    masking: Masking

    def prepare(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> tuple[tuple[Tensor, ...], Targets]:
        assert mixing is None
        pixels, valid = batch.images.to(device, non_blocking=True), to_device(batch.valid, device)
        sources, corrupted = self.extra_inputs(batch, device)
        return (normalised(pixels, device), sources, corrupted), Targets(
            self.masking.targets(pixels, corrupted), valid, None
        )

    def extra_inputs(self, batch: Batch, device: torch.device) -> tuple[Tensor, ...]:
        return self.masking.inputs(batch, device)

    def loss(self, predictions: Tensor, targets: Targets) -> Tensor:
        return self.masking.batch_loss(predictions, targets.values, targets.valid)

    def score_on_all_ranks(self, forward: Callable[..., Tensor], reader: SplitReader) -> tuple[MaskedScores, None]:
        return score_masked(forward, self.masking, reader), None


def objective_of(model: Model, config: RunConfig) -> Objective:
    """Return the objective that matches the model and the settings."""
    if isinstance(model, MaskedViT):
        return MaskedPatches(Masking(model.config, config.seed))
    return Classification(config.train.loss, config.train.label_smoothing)
