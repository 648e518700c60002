"""Random crops of an image, which SimCLR, DINO and LeJEPA compare; the last two small ones as well."""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.base.errors import UserError
from pipeline.data.loading.views import Views
from pipeline.objectives.objective import Objective
from pipeline.settings.quantities import MAX_SIDE
from pipeline.settings.run import AugmentConfig, RunConfig
from pipeline.settings.schema import Settings, setting

# The `embedding_std` that is called a collapse.
_SAME = 0.05


class LocalViewSettings(Settings):
    local_views: int = setting(8, min=0, max=100)
    """Number of small views of each image."""
    local_size: int = setting(96, min=1, max=MAX_SIDE, needs="local_views")
    """Side of the small views in pixels."""
    local_area_max: float = setting(0.4, min=0.05, max=1, needs="local_views")
    """Small views: largest share of the image's area, of which 0.05 is the smallest; of large views augment.area_min
    is.
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
