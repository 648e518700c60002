"""Random crops of an image, which SimCLR, DINO and LeJEPA compare, and Gram anchoring of the last two.

Gram anchoring (DINOv3, Siméoni et al., arXiv 2508.10104, section 4.2): patches stay as similar to one another as in
the weights that a run began with.

Long training, and training on other images, improves the feature of an image and worsens those of its patches. Their
cosine similarities within an image, the Gram matrix, are drawn to those of a frozen copy of init.weights, the anchor;
the features themselves are free to change. As in the official configuration of this step, the anchor sees the crop
without its distortions, the loss is of all patches of each large view by itself, and negative similarities count.
The anchor may read the crop at a higher resolution (section 4.3).

Shapes: B batch, G large views, N patches, D width of the backbone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import Mixing
from pipeline.data.loading.views import Views, undistorted
from pipeline.model import Config, Model, ViTConfig
from pipeline.objectives.objective import Facts, Images, Inputs, Metrics, Objective, PublishedTeacher, mean_of_valid
from pipeline.objectives.parts.teacher import find_published
from pipeline.settings.quantities import MAX_SIDE, ImageSize
from pipeline.settings.run import AugmentConfig, RunConfig
from pipeline.settings.schema import Settings, setting

ANCHORED = "anchored"  # The fact that holds the large views as the anchor reads them.
# The `embedding_std` that is called a collapse.
_SAME = 0.05


class ViewSettings(Settings):
    local_views: int = setting(8, min=0, max=100)
    """Number of small views of each image."""
    local_size: int = setting(96, min=1, max=MAX_SIDE, needs="local_views")
    """Side of the small views in pixels."""
    local_area_max: float = setting(0.4, min=0.05, max=1, needs="local_views")
    """Small views: largest share of the image's area, of which 0.05 is the smallest; of large views augment.area_min
    is.
    """
    gram_weight: NonNegativeFloat = 0.0
    """Weight of Gram anchoring, which keeps the similarities between the patches of a large view as in init.weights; 2
    in DINOv3, 0: off.
    """
    gram_size: ImageSize | None = setting(None, needs="gram_weight")
    """Size at which the frozen init.weights read the large views, as 448 or 448x768; null is model.image_size; twice
    that in DINOv3.
    """

    def small_views(self, augment: AugmentConfig) -> tuple[Views, ...]:
        local = replace(augment, area_min=0.05, area_max=self.local_area_max)
        return (Views(self.local_views, self.local_size, local),) if self.local_views else ()


class ComparesCrops(Objective):
    """An objective that compares random crops of an image. It logs `embedding_std`."""

    # What prevents that all features become the same: the end of a sentence.
    remedy = ""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        super().check(config)
        if config.augment.crop not in ("inception", "random_resized"):
            raise UserError(
                f"train.loss = {config.train.loss} needs random crops: augment.crop = {config.augment.crop} must be"
                " random_resized or inception."
            )

    def collapse(self, values: Mapping[str, float]) -> str:
        std = values["embedding_std"]
        same = f"the features of all images are nearly the same (embedding_std {std:.3f}); {self.remedy}"
        return same if std < _SAME else ""


class GramAnchored(ComparesCrops):
    """An objective that compares large and small crops and can be anchored. Its settings are `ViewSettings`, its
    `views` end with `anchored_views`, its `values` begin with those of this class, and its `loss` calls
    `anchor_patches` first and `with_gram` last.
    """

    given: Any  # Its settings, which a subclass sets.

    # ------------------------------------------------------------------ settings and views
    @classmethod
    def anchored_views(cls, config: RunConfig, large: int) -> tuple[Views, ...]:
        """What the anchor sees. large: number of large views, which are the first ones."""
        given: ViewSettings = cls.settings(config)
        size = given.gram_size or config.model.image_size
        return (Views(large, size, undistorted(config.augment), repeats=0),) if given.gram_weight else ()

    @classmethod
    def check(cls, config: RunConfig) -> None:
        given: ViewSettings = cls.settings(config)
        if given.gram_weight and not config.init.weights:
            raise UserError(
                f"objective.gram_weight = {given.gram_weight} keeps similarities as they are in init.weights, which is"
                " not set. Set it, or leave out objective.gram_weight."
            )
        size, view = given.gram_size or config.model.image_size, config.model.image_size
        if size.height * view.width != size.width * view.height:
            raise UserError(
                f"objective.gram_size = {size} has another shape than model.image_size = {view}: patches would not show"
                " the same. Use a multiple of it."
            )
        super().check(config)

    @classmethod
    def check_backbone(cls, config: RunConfig, model: Config) -> None:
        given: ViewSettings = cls.settings(config)
        if given.local_views and isinstance(model, ViTConfig):
            size = given.local_size
            if size % model.patch_pixels:
                raise UserError(
                    f"objective.local_size = {size} is not divisible by patches of {model.patch_pixels} pixels."
                )
            if model.grid_at(size, size) != model.grid:
                model.check_any_grid()
        if not given.gram_weight:
            return
        if not isinstance(model, ViTConfig):
            raise UserError(
                f"objective.gram_weight = {given.gram_weight} compares patches, and a ResNet has none. Use a ViT, or"
                " objective.gram_weight=0."
            )
        anchor = cls.teacher_config(config, model)
        assert isinstance(anchor, ViTConfig)
        if anchor.grid != model.grid:
            model.check_any_grid()
            for one in (anchor, model):  # What no patch covers is another share of each.
                one.check_covered()

    @classmethod
    def published(cls, config: RunConfig) -> PublishedTeacher | None:
        if not cls.settings(config).gram_weight:
            return None
        return find_published("objective.gram_weight reads init.weights", str(config.init.weights))

    @classmethod
    def teacher_adaptation(cls, config: RunConfig, model: Config) -> dict[str, Any]:
        """As the backbone begins, but for the size of its images."""
        size = cls.settings(config).gram_size or config.model.image_size
        return cls.adaptation(config, 0, model.pixels) | {"image_size": size}

    @classmethod
    def values(cls, config: RunConfig) -> Metrics:
        return {"gram_loss": Metric("loss", "lower")} if cls.settings(config).gram_weight else {}

    # ------------------------------------------------------------------ module
    @classmethod
    def of(cls, config: RunConfig, backbone: Model) -> Objective:
        objective = super().of(config, backbone)
        if cls.settings(config).gram_weight:
            objective.frozen_teacher = cls.read_teacher(config, backbone.config)
        return objective

    # ------------------------------------------------------------------ from a batch to the loss
    def inputs(self, batch: Batch, device: torch.device, mixing: Mixing | None) -> Inputs:
        """The anchor's views become a fact, so that `loss` finds the same views with and without an anchor."""
        views, facts = super().inputs(batch, device, mixing)
        return Inputs(views[:-1], facts | {ANCHORED: views[-1]}) if self.frozen_teacher else Inputs(views, facts)

    def anchor_patches(self, views: Images, facts: Facts) -> Tensor | None:
        """float32 (G * B, N, D): the anchor's patch tokens on the backbone's grid; None without an anchor.

        The first line of `loss`, while there are no activations of the backbone in memory.
        """
        anchor = self.frozen_teacher
        if anchor is None:
            return None
        old, new = (cast(ViTConfig, model.config).grid for model in (anchor, self.backbone))
        with torch.no_grad():  # One view after the other takes no more memory than a block of the backbone.
            parts = facts[ANCHORED].to(views[0].dtype).split(len(facts["valid"]))
            patches = torch.cat([anchor(part, with_patches=True)[1] for part in parts]).float()
            return on_grid(patches, old, new)

    def with_gram(
        self, loss: Tensor, values: Facts, patches: Tensor, anchor: Tensor | None, valid: Tensor
    ) -> tuple[Tensor, Facts]:
        """What `loss` returns: with an anchor, with the loss of the Gram matrices.

        patches: (G * B, N, D) of the backbone. anchor: what `anchor_patches` returned.
        """
        if anchor is None:
            return loss, values
        of_views = gram_losses(patches, anchor).view(-1, len(valid))
        gram = mean_of_valid(of_views.mean(0), valid)
        return loss + self.given.gram_weight * gram, values | {"gram_loss": gram.detach()}


# ---------------------------------------------------------------------- the formulae, as functions of tensors (public:
# names and arguments stay)
def gram_losses(patches: Tensor, anchor: Tensor) -> Tensor:
    """(R, N, D), (R, N, D) -> float32 (R,): the mean squared difference of the cosine similarities of all N x N pairs
    of patches of an image (DINOv3, equation 2, over N^2).
    """
    own, target = (F.normalize(tokens.float(), dim=2) for tokens in (patches, anchor))
    return (own @ own.transpose(1, 2) - target @ target.transpose(1, 2)).square().mean((1, 2))


def on_grid(patches: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(R, N, D) patch tokens of a grid (rows, columns) -> of another, bicubic without antialias, as the official
    code.
    """
    if old == new:
        return patches
    images = patches.transpose(1, 2).unflatten(2, old)
    return F.interpolate(images, new, mode="bicubic").flatten(2).transpose(1, 2)
