"""SimCLR (Chen et al., arXiv 2002.05709): two views of an image are more alike than those of any two images.

Two random crops of each image go through the backbone and a projector. For each view the other one of its image must be
found among all other views of the step, by a softmax over cosine similarities (NT-Xent). The other images prevent
collapse, so larger batches are better.

The views compared, and those of BatchNorm's statistics, are of all readable images on all ranks, so the loss does not
depend on how a batch is divided over ranks.

Shapes: B batch, D width of the projections, R ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base.metric import Metric
from pipeline.data.loading.views import Views
from pipeline.model import Model
from pipeline.objectives.objective import Facts, Images, Metrics, embedding_std, mean_among_valid, mean_of_valid
from pipeline.objectives.parts.across_ranks import Projector, StepNorm, gathered, own_rows
from pipeline.objectives.parts.crops import ComparesCrops
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Settings, setting


class SimclrSettings(Settings):
    hidden: int = setting(2048, min=1, max=2**16)
    """Width of the projector's hidden layer."""
    width: int = setting(128, min=1, max=2**16)
    """Width of the projections."""
    temperature: float = setting(0.1, above=0)
    """What similarities are divided by: 0.1 for batches of thousands, 0.5 for CIFAR-10, in the paper."""


class Simclr(ComparesCrops):
    """A backbone and a projector of two layers, each followed by BatchNorm, as in the official code."""

    Settings = SimclrSettings
    remedy = "lower optimizer.lr, or raise train.global_batch"

    # ------------------------------------------------------------------ settings and views
    @classmethod
    def views(cls, config: RunConfig) -> tuple[Views, ...]:
        return (Views(2, config.model.image_size, config.augment),)

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        return {"pair_accuracy": Metric("share", "higher"), "embedding_std": Metric("ratio", "higher")}

    # ------------------------------------------------------------------ module
    def __init__(self, backbone: Model, given: SimclrSettings, seed: int = 0) -> None:
        super().__init__(backbone)
        self.temperature = given.temperature
        self.projector = Projector(backbone.config.num_features, given.hidden, given.width, hidden_layers=1)
        self.norm = StepNorm(given.width)

    # ------------------------------------------------------------------ from a batch to the loss
    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        counted = facts["valid"].repeat(2)
        features = self.backbone(views[0])
        projections = self.norm(self.projector(features, counted), counted)
        losses, is_found = nt_xent(projections, self.temperature, counted)
        values = {
            "pair_accuracy": mean_among_valid(is_found.float(), counted),
            "embedding_std": embedding_std(features.detach(), counted),
        }
        return mean_of_valid(losses, counted), values


# ---------------------------------------------------------------------- the formula (public: names and arguments stay)
def nt_xent(projections: Tensor, temperature: float, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised temperature-scaled cross-entropy (equation 1): of each view, minus the logarithm of the softmax over
    the other views of exp(cosine / temperature), at the other view of its image. Collective.

    projections: (2B, D) of this rank, all first views before all second ones; B is the same on all ranks. counted: bool
    (2B,), the views that others are compared with. Returns the losses, float32 (2B,), and whether each one's other view
    is the most similar one, bool (2B,).
    """
    units = F.normalize(projections.float(), dim=1)
    every, candidates = gathered(units), gathered(counted.float()) > 0  # (R * 2B, D), (R * 2B,)
    own = own_rows(units)
    itself = own[:, None] == torch.arange(len(every), device=units.device)
    similarity = (units @ every.T / temperature).masked_fill(itself | ~candidates, torch.finfo(torch.float32).min)
    other = own.roll(len(units) // 2)
    return F.cross_entropy(similarity, other, reduction="none"), similarity.argmax(1) == other
