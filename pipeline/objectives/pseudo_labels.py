"""Pseudo-labels: learning from few labels and many images without one, as Semi-ViT does (Cai et al., arXiv 2208.05688).

The teacher, an average of the weights, sees a weakly augmented view of each image, its crop and flip alone, and the
backbone a view with all augmentations. An image with labels is learned as in classification. One without gets the
teacher's most likely class as its label if the teacher gives it at least `threshold` of the probability, and otherwise
contributes nothing, as in FixMatch (Sohn et al., arXiv 2001.07685), where the backbone is its own teacher. Each image
counts the same, as with the paper's weight of 5 for the loss of five times as many images without a label.

Shapes: B batch, K classes, M labels per sample.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.base.metric import Metric
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import Mixing, mix_images, partner
from pipeline.data.loading.views import Views, undistorted
from pipeline.model import Model
from pipeline.objectives.classification import Classification, losses
from pipeline.objectives.objective import Facts, Images, Inputs, Metrics, Objective, mean_among_valid, mean_of_valid
from pipeline.settings.quantities import Share, ShareBelow1
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings


class PseudoLabelsSettings(Settings):
    threshold: Share = 0.6
    """Probability of the teacher's most likely class from which it is an image's label; Semi-ViT has 0.6 with 1 % of
    ImageNet's labels and 0.5 with 10 %.
    """
    momentum: ShareBelow1 = 0.9999
    """Weight of the teacher's old average in each step; with a new head, at most (1 + step) / (10 + step). Smaller for
    short runs.
    """


class PseudoLabels(Classification):
    """A backbone that predicts classes, and a teacher, its average, which is what is exported and scored."""

    Settings = PseudoLabelsSettings
    trains_backbone_alone = False
    teacher: nn.ModuleDict

    # ------------------------------------------------------------------ settings and views
    @classmethod
    def views(cls, config: RunConfig) -> tuple[Views, ...]:
        size = config.model.image_size
        return Views(1, size, config.augment), Views(1, size, undistorted(config.augment))

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        losses_of_kinds = dict.fromkeys(("supervised_loss", "unsupervised_loss"), Metric("loss", "lower"))
        return {**losses_of_kinds, "confident": Metric("share"), "pseudo_classes": Metric(better="higher")}

    # ------------------------------------------------------------------ module
    @classmethod
    def create(cls, config: RunConfig, backbone: Model) -> Objective:
        has_head = bool(config.init.weights) and not config.init.new_head
        return cls(backbone, cls.settings(config), config.train.label_smoothing, has_head)

    def __init__(
        self, backbone: Model, given: PseudoLabelsSettings, label_smoothing: float = 0.0, has_head: bool = True
    ) -> None:
        """has_head: whether the backbone's head was trained."""
        super().__init__(backbone, "softmax", label_smoothing)
        self.given, self.has_head = given, has_head
        self.add_teacher("backbone")

    # ------------------------------------------------------------------ from a batch to the loss
    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        """Views: that of the backbone, that of the teacher, and with `mixing` the first one mixed in pairs."""
        views, facts = super().inputs(batch, device, None)
        if mixing is not None:
            mixed, facts["own"] = mix_images(views[0], facts["valid"], mixing)
            views = (*views, mixed)
        return Inputs(views, facts)

    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        labels, valid = facts["labels"], facts["valid"]
        with torch.no_grad():  # First, while there are no activations of the backbone in memory.
            probabilities = self.teacher["backbone"](views[1]).float().softmax(1)
        surest, guess = probabilities.max(1)
        unlabelled = valid & (labels < 0).all(1)
        used = unlabelled & (surest >= self.given.threshold)
        learned = torch.where(used[:, None], guess[:, None], labels)
        images, own = views[0], None
        if "own" in facts:
            # Only where both have a label: in a mixture with what is not known, the other one's label would be learned
            # as if it were alone.
            known = (learned >= 0).any(1)
            both = known & partner(known)
            images = torch.where(both[:, None, None, None], views[2], images)
            own = torch.where(both, facts["own"], 1.0)
        logits = self.backbone(images)
        found = losses(logits, learned, self.loss_kind, self.label_smoothing, own)
        shares = F.one_hot(guess, probabilities.shape[1]).float().T @ used.float() / used.sum().clamp(min=1)
        return mean_of_valid(found, valid), {
            "supervised_loss": mean_among_valid(found.detach(), valid & ~unlabelled),
            "unsupervised_loss": mean_among_valid(found.detach(), unlabelled),
            "confident": mean_among_valid(used.float(), unlabelled),
            "pseudo_classes": torch.special.entr(shares).sum().exp() * used.any(),
        }

    # ------------------------------------------------------------------ around a step
    def teacher_momentum(self, step: int) -> float:
        # The average of a new head would be sure of nothing for long; that of a trained one is better than the weights
        # at high rates.
        return self.given.momentum if self.has_head else min(self.given.momentum, (1 + step) / (10 + step))
