"""Distillation of a classifier: the backbone learns to predict the classes that published weights, its teacher,
predict.

As function matching (Beyer et al., arXiv 2106.05237): teacher and backbone see the same view, mixed in pairs if the
settings say so, and the loss is the Kullback-Leibler divergence of the backbone's probabilities from the teacher's, at
a temperature (Hinton et al., arXiv 1503.02531). Labels are not read, so the images may be any; those of the held-out
split are for scores.

Shapes: B batch, K classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.base.words import counted
from pipeline.model import Config, Model
from pipeline.objectives.classification import Classification, classes_note, moved_class
from pipeline.objectives.objective import Facts, Images, Metrics, Objective, mean_among_valid, mean_of_valid
from pipeline.objectives.parts.teacher import TaughtObjective, TeacherSettings, seen_by_teacher
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import setting


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
