"""Small views of an image beside the large ones, as DINO and LeJEPA compare them."""

from dataclasses import replace

from pipeline.base.errors import UserError
from pipeline.data.loading.views import Views
from pipeline.model import Config
from pipeline.objectives.objective import check_small_views
from pipeline.settings.quantities import MAX_SIDE
from pipeline.settings.run import AugmentConfig, RunConfig
from pipeline.settings.schema import Settings, setting


class LocalViewSettings(Settings):
    local_views: int = setting(8, "Number of small views of each image.", min=0, max=100)
    local_size: int = setting(96, "Side of the small views in pixels.", min=1, max=MAX_SIDE, needs="local_views")
    local_area_min: float = setting(
        0.05, "Small views: smallest share of the image's area.", above=0, max=1, needs="local_views"
    )
    local_area_max: float = setting(
        0.4,
        "Small views: largest share of the image's area; augment.area_min is the smallest of large views.",
        above=0,
        max=1,
        needs="local_views",
    )

    def small_views(self, augment: AugmentConfig) -> tuple[Views, ...]:
        local = replace(augment, area_min=self.local_area_min, area_max=self.local_area_max)
        return (Views(self.local_views, self.local_size, local),) if self.local_views else ()

    def check_views(self, config: RunConfig, model: Config | None) -> None:
        """Raise UserError for views that do not fit, and for settings that cut the same crop of an image each time.

        model: the backbone's, None if it is not known.
        """
        if config.augment.crop not in ("inception", "random_resized"):
            raise UserError(
                f"train.loss = {config.train.loss} needs random crops: augment.crop = {config.augment.crop} must be"
                " random_resized or inception."
            )
        if self.local_area_min > self.local_area_max:
            raise UserError(
                f"objective.local_area_min = {self.local_area_min} must not be above objective.local_area_max ="
                f" {self.local_area_max}."
            )
        if self.local_views and model is not None:
            check_small_views(model, self.local_size)
