"""Masked patch prediction (ViT paper, B.1.2): the choice of corrupted patches, the targets and the loss.

The embeddings of half of an image's patches are corrupted: 80 % become the mask token, 10 % the embedding of another
patch of the image, 10 % stay unchanged. The model predicts the content of each of them. The choice is drawn from (seed,
epoch, sample), so it is the same on any number of ranks and after a restart.

Shapes: B batch, N patches, C corrupted patches, P patch side in pixels, T targets per patch.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base import random_numbers
from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.base.random_numbers import Purpose
from pipeline.data.loading.loader import Batch, images_to_device, normalise
from pipeline.data.loading.mix import Mixing
from pipeline.model import MaskedViT, Model
from pipeline.model.layers import patches_of
from pipeline.objectives.objective import Facts, Images, Inputs, Metrics, Objective
from pipeline.settings.run import RunConfig

_COLORS = 512  # 3 bits per channel
_MASK_TOKEN, _OTHER_PATCH = 0.8, 0.1


class MaskedPatches(Objective):
    """Masked patch prediction. The mask token and the head are parts of the backbone, a MaskedViT, and are left out of
    its weights.
    """

    trains_backbone_alone = True

    @classmethod
    def metrics(cls, config: RunConfig) -> Metrics:
        colors = {"color_accuracy": Metric("share", "higher")} if config.train.loss != "masked_pixels" else {}
        return super().metrics(config) | colors

    @classmethod
    def check(cls, config: RunConfig) -> None:
        loss = config.train.loss
        if config.init.weights is not None:
            raise UserError(
                f"train.loss = {loss} starts with a new model: set model.name, and leave out init.weights. To fine-tune"
                " its weights, use launch/finetune.py with train.loss=softmax."
            )
        super().check(config)

    @classmethod
    def of_backbone(cls, config: RunConfig, num_classes: int) -> dict[str, Any]:
        return {"num_classes": 0, "masked": config.train.loss.removeprefix("masked_")}

    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> Objective:
        return cls(backbone, config.seed)

    def __init__(self, backbone: Model, seed: int) -> None:
        super().__init__(backbone)
        assert isinstance(backbone, MaskedViT)
        self.config, self.seed = backbone.config, seed
        self.predicts_pixels = backbone.config.masked == "pixels"

    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        assert mixing is None
        moved = replace(batch, views=(images_to_device(batch.views[0], device),))
        views, facts = super().inputs(moved, device, mixing)
        return Inputs(views, facts | {"targets": self.targets(moved.images, facts["corrupted"])})

    def losses(self, views: Images, facts: Facts) -> Tensor:
        return self.patch_losses(self.predict(views, facts), facts["targets"])

    def measure(self, views: Images, facts: Facts) -> Facts:
        predictions = self.predict(views, facts)
        found = {"loss": self.patch_losses(predictions, facts["targets"])}
        if not self.predicts_pixels:
            found["color_accuracy"] = self.color_accuracy(predictions, facts["targets"])
        return found

    def predict(self, views: Images, facts: Facts) -> Tensor:
        """float32 (B, C, outputs): what the corrupted patches are predicted to be."""
        return self.backbone(views[0], facts["sources"], facts["corrupted"]).float()

    def draw(self, batch: Batch, training: bool) -> dict[str, Tensor]:
        """The model's inputs in addition to the images: `sources`, int64 (B, N), and `corrupted`, int64 (B, C); see
        MaskedViT.
        """
        N, C = self.config.num_patches, self.config.num_corrupted
        patch = np.arange(N)
        sample = (batch.epochs[:, None], batch.rows[:, None], patch)
        order = np.argsort(random_numbers.bits(self.seed, Purpose.MASKED_PATCHES, *sample), axis=1, kind="stable")
        corrupted = np.sort(order[:, :C], axis=1)
        how = random_numbers.uniform(self.seed, Purpose.MASK_KIND, *sample)
        offset = (random_numbers.uniform(self.seed, Purpose.MASK_REPLACEMENT, *sample) * (N - 1)).astype(np.int64)
        other = (patch + 1 + offset) % N
        drawn = np.where(how < _MASK_TOKEN, N, np.where(how < _MASK_TOKEN + _OTHER_PATCH, other, patch))
        sources = np.tile(patch, (len(batch.rows), 1))
        np.put_along_axis(sources, corrupted, np.take_along_axis(drawn, corrupted, axis=1), axis=1)
        return {"sources": torch.from_numpy(sources), "corrupted": torch.from_numpy(corrupted)}

    def targets(self, images: Tensor, corrupted: Tensor) -> Tensor:
        """Targets (B, C, T) of the corrupted patches of a batch's images (B, height, width, K).

        mean_color: int64, T = 1. small_patch: int64, T = 16, row by row. pixels: float32, as the model reads them, T =
        K P P.
        """
        if self.predicts_pixels:
            planes = normalise(images, images.device, torch.float32, self.config.pixels)
        else:
            planes = images.permute(0, 3, 1, 2)
        P = self.config.patch_pixels
        patches = patches_of(planes, P).unflatten(2, (P, P, -1)).movedim(4, 2)  # (B, N, K, P, P)
        patches = patches[torch.arange(len(images), device=images.device)[:, None], corrupted]
        if self.predicts_pixels:
            return patches.flatten(2)
        return mean_colors(patches, 1 if self.config.masked == "mean_color" else 4)

    def patch_losses(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Loss per sample, float32 (B,), from predictions (B, C, outputs) and targets (B, C, T): the mean over C and T.

        Colours: cross-entropy of T predictions of 512 classes. Pixels: squared difference.
        """
        if self.predicts_pixels:
            return (predictions - targets).square().mean((1, 2))
        logits = predictions.view(-1, _COLORS)
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view(len(targets), -1).mean(1)

    def color_accuracy(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Accuracy of the predicted colours of each sample, float32 (B,)."""
        logits = predictions.view(*targets.shape, _COLORS)
        return (logits.argmax(3) == targets).float().mean((1, 2))


def mean_colors(patches: Tensor, side: int) -> Tensor:
    """Colour classes, int64 (B, C, side * side), of patches uint8 (B, C, 3, P, P) cut into side x side parts.

    A class is 64 r + 8 g + b of the mean colour, each floor(8 mean / 255) and at most 7. The paper does not define the
    rounding.
    """
    P = patches.shape[-1] // side
    sums = patches.unflatten(4, (side, P)).unflatten(3, (side, P)).sum((4, 6))  # int64 (B, C, 3, side, side)
    bits = (8 * sums // (255 * P * P)).clamp(max=7)  # integers: the same on every device
    return (64 * bits[:, :, 0] + 8 * bits[:, :, 1] + bits[:, :, 2]).flatten(2)
