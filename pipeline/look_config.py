"""The settings of a look at weights: what they say of images, and why. Those of scores are in `config.py`."""

from dataclasses import dataclass

from pipeline.config import WeightsConfig
from pipeline.errors import UserError
from pipeline.schema import REQUIRED, setting

_IMAGES = "image files, folders, tars of samples (* and ? stand for any), or one data set, a folder or URL"


@dataclass(frozen=True, kw_only=True)
class LookConfig(WeightsConfig):
    """Weights and images, wherever these lie."""

    images: list[str] = setting(REQUIRED, f"What they look at: {_IMAGES}")
    split: str = setting("val", "Of a data set: its split.")
    exclude: str = setting("all", "Of a data set: lists of samples to leave out: all, none, or names with commas.")
    class_names: str = setting("", "File with one class name a line, for weights that do not bring them.")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(LookConfig):
    """The most likely classes of images."""

    top: int = setting(5, "How many classes of each image are told, the most likely first.")
    out: str = setting("", "File for the whole table, .csv or .parquet; empty prints its beginning only.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        super().check()
        if self.top < 1:
            raise UserError(f"top = {self.top} must be at least 1.")
        if self.out and not self.out.endswith((".csv", ".parquet")):
            raise UserError(f"out = {self.out} must end with .csv or .parquet.")
