"""LeJEPA (Balestriero & LeCun, arXiv 2511.08544): views of an image predict one another, and projections are normally
distributed.

Large and small views of each image go through the backbone and a projector. The prediction loss draws the projections
of all views of an image to the mean of those of its large views. SIGReg alone prevents collapse, without a teacher:
along random directions, the projections of each view must have a standard normal distribution, as the Epps-Pulley test
measures it.

The statistics are of all readable images on all ranks, those of BatchNorm of all their views, so the loss does not
depend on how a batch is divided over ranks.

Shapes: B batch, V views, W width of the backbone, R rows, D width of the projections, M directions, K knots.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.base.random_numbers import Purpose, torch_seed
from pipeline.data.loading.loader import to_device
from pipeline.data.loading.views import Views
from pipeline.model import Model
from pipeline.objectives.objective import Facts, Images, Metrics, embedding_std, mean_of_valid, read_backbone
from pipeline.objectives.parts.across_ranks import Projector, summed, total
from pipeline.objectives.parts.crops import GramAnchored, ViewSettings
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import setting

# Angles that SIGReg computes at a time. More would be slower on a CPU; a GPU starts few kernels for small batches.
_ANGLES = 2**20
_DIRECTIONS = Purpose.named("sigreg_directions")


class LejepaSettings(ViewSettings):
    global_views: int = setting(2, min=1, max=100)
    """Number of large views of each image, of model.image_size."""
    local_views: int = setting(6, min=0, max=100)
    """Number of small views of each image."""
    local_area_max: float = setting(0.3, min=0.05, max=1, needs="local_views")
    """Small views: largest share of the image's area."""
    hidden: int = setting(2048, min=1, max=2**16)
    """Width of the projector's two hidden layers."""
    width: int = setting(128, min=1, max=2**16)
    """Width of the projections; 16 to 512."""
    directions: int = setting(1024, min=1, max=2**16)
    """Random directions of each step, along which projections are tested; 256 to 1024."""
    sigreg: Literal["views", "pooled"] = "views"
    """SIGReg as the mean over views of the statistic of each view (views; the authors' default), or as one statistic of
    all views (pooled).
    """
    weight: float = setting(0.87, above=0, below=1)
    """Weight of SIGReg; the prediction loss, a sum over `width` dimensions, has the rest. The paper's w of a mean over
    them is w x width / (1 - w + w x width): 0.72 to 0.87 for 0.02 to 0.05 and a width of 128. With sigreg=pooled, w is
    like w x V / (1 - w + w x V) of V single views.
    """

    def check(self) -> None:
        super().check()
        if self.global_views + self.local_views < 2:
            raise UserError(
                "objective.global_views = 1 and objective.local_views = 0 leave no view to predict: use 2 or more."
            )


class Lejepa(GramAnchored):
    """A backbone and a projector. It keeps no state: statistics are those of the step, directions come from (seed,
    step).
    """

    Settings = LejepaSettings
    remedy = "raise objective.weight, or lower optimizer.lr"
    directions: Tensor

    # ------------------------------------------------------------------ settings and views
    @classmethod
    def views(cls, config: RunConfig) -> tuple[Views, ...]:
        given: LejepaSettings = cls.settings(config)
        large = Views(given.global_views, config.model.image_size, config.augment)
        return large, *given.small_views(config.augment), *cls.anchored_views(config, given.global_views)

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        return super().values(config) | {
            "prediction": Metric("loss", "lower"),
            "sigreg": Metric("loss", "lower"),
            "embedding_std": Metric("ratio", "higher"),
        }

    # ------------------------------------------------------------------ module
    def __init__(self, backbone: Model, given: LejepaSettings, seed: int = 0) -> None:
        super().__init__(backbone)
        self.given, self.seed = given, seed
        self.projector = Projector(backbone.config.num_features, given.hidden, given.width)
        # Those of the step; every start draws them again.
        self.register_buffer("directions", torch.zeros(given.width, given.directions), persistent=False)

    # ------------------------------------------------------------------ from a batch to the loss
    def loss(self, views: Images, facts: Facts) -> tuple[Tensor, Facts]:
        valid, V = facts["valid"], self.given.global_views + self.given.local_views
        large, *small = views
        anchor = self.anchor_patches(views, facts)
        of_large, patches = read_backbone(self.backbone, large, anchor is not None)
        features = torch.cat([of_large, *(self.backbone(images, any_size=True) for images in small)])
        counted = valid.repeat(V)
        projections = self.projector(features, counted).float()  # (V * B, D)
        of_views = projections.view(V, len(valid), -1)
        errors = prediction_losses(of_views, self.given.global_views)
        prediction = mean_of_valid(errors, valid)
        if self.given.sigreg == "pooled":
            normality = sigreg(projections, self.directions, counted=counted)
        else:
            normality = sigreg(of_views, self.directions, counted=valid)
        values = {
            "prediction": prediction.detach(),
            "sigreg": normality.detach(),
            "embedding_std": embedding_std(features.detach(), counted),
        }
        loss = (1 - self.given.weight) * prediction + self.given.weight * normality
        return self.with_gram(loss, values, patches, anchor, valid)

    # ------------------------------------------------------------------ around a step
    def before_step(self, step: int) -> None:
        drawn = random_directions(self.given.width, self.given.directions, torch_seed(self.seed, _DIRECTIONS, step))
        self.directions.copy_(to_device(drawn, self.directions.device), non_blocking=True)


# ---------------------------------------------------------------------- the formulae, as functions of tensors (public:
# names and arguments stay)
def sigreg(
    projections: Tensor, directions: Tensor, knots: int = 17, t_max: float = 3.0, counted: Tensor | None = None
) -> Tensor:
    """How far projections are from a standard normal distribution: the mean over directions of the Epps-Pulley
    statistic. Collective.

    For each direction, N times the integral over t of |phi(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2), where phi(t) = mean
    exp(i t x) of the projections x on it; by the trapezoidal rule with `knots` points of [0, t_max], doubled because it
    is symmetric.
    projections: (N, D) of this rank, or (..., N, D) for the mean of several statistics; N and the means are over all
    ranks. directions: (D, M), unit columns, the same on all ranks.
    counted: bool (N,), which rows take part. Returns a scalar, float32.
    """
    kept = (projections.new_ones(projections.shape[-2]) if counted is None else counted).float()
    number = summed(kept.sum())
    along = projections.float() @ directions.float()  # (..., N, M)
    t = torch.linspace(0, t_max, knots, device=along.device)
    sums = torch.cat(
        [
            torch.stack([kept @ angles.cos(), kept @ angles.sin()], 1)
            for some in t.split(max(1, _ANGLES // max(1, along.numel())))
            for angles in [some.view(-1, *[1] * along.ndim) * along]  # (some of K, ..., N, M)
        ]
    ).flatten(2)  # (K, 2, M of all statistics)
    real, imaginary = (total(sums) / number.clamp(min=1)).unbind(1)  # (K, M) each
    normal = (-t.square() / 2).exp()
    spacing = torch.full_like(t, 2 * t_max / (knots - 1))
    spacing[:: knots - 1].fill_(t_max / (knots - 1))  # Assigning a number would copy it to the GPU, and wait.
    distance = (real - normal[:, None]).square() + imaginary.square()
    return number * ((spacing * normal) @ distance).mean()


def prediction_losses(projections: Tensor, global_views: int) -> Tensor:
    """(V, B, D), the large views first -> (B,): the mean over views of the squared distance to the mean of the large
    views.
    """
    return (projections - projections[:global_views].mean(0)).square().sum(2).mean(0)


def random_directions(width: int, number: int, seed: int) -> Tensor:
    """float32 (width, number): columns of length 1, uniform on the sphere."""
    drawn = torch.randn(width, number, generator=torch.Generator().manual_seed(seed))
    return F.normalize(drawn, dim=0)
