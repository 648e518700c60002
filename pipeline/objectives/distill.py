"""Distillation: the backbone learns to predict what published weights, its teacher, say of images without labels:
features (`Distill`) or classes (`DistillClasses`).

Features. Teacher and backbone see the same view. From the backbone's feature (its class token, or whatever it pools) a
LayerNorm and a linear layer predict the teacher's, and another pair predicts from each patch token the teacher's token
of the same place. As Proteus (Zhang et al., arXiv 2407.10366), whose third loss, of masked patches, is left out. As in
FD (Wei et al., arXiv 2205.14141), what is predicted is whitened: a LayerNorm without parameters gives each feature mean
0 and variance 1, so that the scale of a teacher's features does not matter.

Classes. As function matching (Beyer et al., arXiv 2106.05237): teacher and backbone see the same view, mixed in pairs
if the settings say so, and the loss is the Kullback-Leibler divergence of the backbone's probabilities from the
teacher's, at a temperature (Hinton et al., arXiv 1503.02531). Labels are not read, so the images may be any; those of
the held-out split are for scores.

Shapes: B batch, N patches, D width of the backbone, T width of the teacher, K classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.base.words import counted
from pipeline.model import Config, Model, ViTConfig
from pipeline.objectives.classification import Classification, classes_note, moved_class
from pipeline.objectives.objective import (
    Facts,
    Images,
    Metrics,
    Objective,
    mean_among_valid,
    mean_of_valid,
    read_backbone,
)
from pipeline.objectives.parts.teacher import TaughtObjective, TeacherSettings, seen_by_teacher
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import setting


class DistillSettings(TeacherSettings):
    patch_weight: float = setting(1.0, min=0, max=1e4)
    """Weight of the loss of patch tokens; that of the feature has 1. 0 for a ResNet, which has no patches."""


class Distill(TaughtObjective):
    """A backbone, two heads that predict the teacher's features from its own, and the teacher."""

    Settings = DistillSettings

    # ------------------------------------------------------------------ settings
    @classmethod
    def check_backbone(cls, config: RunConfig, model: Config) -> None:
        cls.teacher_config(config, model)

    @classmethod
    def teacher_adaptation(cls, config: RunConfig, model: Config) -> dict[str, Any]:
        """Arguments of the teacher: no head, and an image size that gives as many patches as the backbone's.

        Images of the backbone's own size, if either of them has no patches. Raises UserError for weights that cannot be
        read, and if patches are compared that are not there.
        """
        given: DistillSettings = cls.settings(config)
        saved = cls.published(config).config
        size = model.image_size
        if isinstance(model, ViTConfig) and isinstance(saved, ViTConfig):
            height, width = (n * saved.patch_pixels for n in model.grid)
            size = height, width
        elif given.patch_weight:
            raise UserError(
                f"objective.patch_weight = {given.patch_weight} compares patch tokens, and a ResNet has none: set"
                " objective.patch_weight=0."
            )
        return {"image_size": size, "num_classes": 0, "representation": False}

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        patches = {"patch_loss": Metric("loss", "lower")} if cls.settings(config).patch_weight else {}
        return {"feature_loss": Metric("loss", "lower"), **patches, "explained": Metric("ratio", "higher")}

    # ------------------------------------------------------------------ module
    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> Objective:
        return cls(backbone, cls.read_teacher(config, backbone.config), cls.settings(config).patch_weight)

    def __init__(self, backbone: Model, teacher: Model, patch_weight: float = 1.0) -> None:
        """teacher: frozen, without a head, for images with the backbone's grid of patches."""
        super().__init__(backbone)
        self.patch_weight = patch_weight
        self.frozen_teacher = teacher
        self.feature_head = _head(backbone.config.num_features, teacher.config.num_features)
        self.patch_head = _head(backbone.config.width, teacher.config.width) if patch_weight else None

    # ------------------------------------------------------------------ from a batch to the loss
    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        of_feature, of_patches, target = self.compare(views, facts)
        valid = facts["valid"]
        values = {
            "feature_loss": mean_of_valid(of_feature.detach(), valid),
            "explained": explained(of_feature.detach(), target, valid),
        }
        if self.patch_head:
            values["patch_loss"] = mean_of_valid(of_patches.detach(), valid)
        return mean_of_valid(of_feature + self.patch_weight * of_patches, valid), values

    def losses(self, views: Images, facts: Facts) -> Tensor:
        of_feature, of_patches, _ = self.compare(views, facts)
        return of_feature + self.patch_weight * of_patches

    def compare(self, views: Images, facts: Facts) -> tuple[Tensor, Tensor, Tensor]:
        """Returns of each image the loss of its feature and that of its patches, float32 (B,), 0 if they are not
        compared; and the feature to predict, float32 (B, T)."""
        with torch.no_grad():  # First, while there are no activations of the backbone in memory.
            seen = seen_by_teacher(views, facts)
            target, target_patches = read_backbone(self.frozen_teacher, seen, bool(self.patch_head))
            target = whitened(target)
        feature, patches = read_backbone(self.backbone, views[0], bool(self.patch_head))
        predicted = self.feature_head(feature).float()
        of_feature = (predicted - target).square().mean(1)
        if self.patch_head is None:
            return of_feature, torch.zeros_like(of_feature), target
        errors = self.patch_head(patches).float() - whitened(target_patches)
        return of_feature, errors.square().mean((1, 2)), target


class DistillClassesSettings(TeacherSettings):
    temperature: float = setting(1.0, min=0.01, max=1000)
    """By which the logits of both are divided; above 1, unlikely classes count more."""


class DistillClasses(TaughtObjective, Classification):
    """A backbone with a head for the teacher's classes, and the teacher."""

    Settings = DistillClassesSettings
    trains_backbone_alone = False

    # ------------------------------------------------------------------ settings
    @classmethod
    def check_classes(cls, config: RunConfig, num_classes: int, names: Sequence[str]) -> str:
        teacher, published = cls.settings(config).teacher, cls.published(config)
        if published.config.num_classes != num_classes:
            raise UserError(
                f"objective.teacher = {teacher} has {counted(published.config.num_classes, 'class')},"
                f" {config.data.path} has {num_classes}. Use weights that were fine-tuned on these classes."
            )
        of_teacher = published.extra.get("classes") or ()
        if moved := moved_class(config.data.path, names, teacher, of_teacher):
            raise UserError(
                f"objective.teacher: {moved}. The accuracy on held-out images would be that of other classes. Use a"
                " data set with the teacher's classes in their order (class_list of launch/shard.py)."
            )
        return classes_note(config.data.path, names, teacher, of_teacher) if names else ""

    @classmethod
    def teacher_adaptation(cls, config: RunConfig, model: Config) -> dict[str, Any]:
        """Its own image size, or the view's if that has another shape."""
        own, view = cls.published(config).config.image_size, config.model.image_size
        return {"image_size": own if own[0] * view.width == own[1] * view.height else view}

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        return {"agreement": Metric("share", "higher")}

    # ------------------------------------------------------------------ module
    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> Objective:
        kind = str(cls.published(config).extra.get("loss", "softmax"))
        return cls(backbone, cls.read_teacher(config, backbone.config), kind, cls.settings(config).temperature)

    def __init__(self, backbone: Model, teacher: Model, kind: str = "softmax", temperature: float = 1.0) -> None:
        """teacher: frozen, with the classes of the backbone. kind: see `divergence`."""
        super().__init__(backbone, kind)
        self.temperature, self.frozen_teacher = temperature, teacher

    # ------------------------------------------------------------------ from a batch to the loss
    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        with torch.no_grad():  # First, while there are no activations of the backbone in memory.
            target = self.frozen_teacher(seen_by_teacher(views, facts)).float()
        logits = self.backbone(views[0]).float()
        found = divergence(logits, target, self.loss_kind, self.temperature)
        agrees = (logits.detach().argmax(1) == target.argmax(1)).float()
        return mean_of_valid(found, facts["valid"]), {"agreement": mean_among_valid(agrees, facts["valid"])}


# ---------------------------------------------------------------------- the formulae, as functions of tensors
def whitened(features: Tensor) -> Tensor:
    """(..., T) -> float32 (..., T): each feature with mean 0 and variance 1."""
    return F.layer_norm(features.float(), features.shape[-1:])


def explained(errors: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """The share of the variance of the targets (B, T) over the valid samples that is predicted: 1 is all of it, 0 no
    more than their mean.

    errors: (B,), the mean squared error of each. Returns a scalar, 0 if the targets do not vary, as of a single sample.
    """
    counted = valid.float()
    mean = counted @ targets / counted.sum().clamp(min=1)
    variance = mean_among_valid((targets - mean).square().mean(1), valid)
    share = 1 - mean_among_valid(errors, valid) / variance.clamp(min=1e-6)
    return torch.where(variance > 1e-6, share, torch.zeros_like(share))


def divergence(logits: Tensor, target: Tensor, kind: str, temperature: float) -> Tensor:
    """The Kullback-Leibler divergence of the probabilities of logits from those of other logits, float32 (B, K) ->
    (B,).

    Of the softmax, or the sum over classes of that of each sigmoid (kind), of both divided by the temperature; times
    its square, so that gradients stay as large (Hinton et al.).
    """
    logits, target = logits / temperature, target / temperature
    if kind == "sigmoid":
        sure = target.sigmoid()
        differs = [F.binary_cross_entropy_with_logits(of, sure, reduction="none") for of in (logits, target)]
        found = differs[0] - differs[1]
    else:
        found = F.kl_div(F.log_softmax(logits, 1), F.log_softmax(target, 1), reduction="none", log_target=True)
    return temperature**2 * found.sum(1)


def _head(width: int, of_teacher: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, of_teacher))
