"""The settings of a look at weights: what they say of images, and why. Those of scores are in `config.py`."""

from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.config import WeightsConfig
from pipeline.errors import UserError
from pipeline.schema import REQUIRED, setting

_IMAGES = "image files, folders, tars of samples (* and ? stand for any), or one data set, a folder or URL"
Drawing = Literal[
    "attention", "rollout", "distance", "gradcam", "predictions", "patches", "positions", "filters", "cost"
]
DRAWINGS: tuple[Drawing, ...] = get_args(Drawing)


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


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(LookConfig):
    """Pictures of what is inside weights."""

    images: list[str] = setting(list, f"What they look at: {_IMAGES}. None: only the drawings that need no image.")
    draw: list[Drawing] = setting(list, "Which drawings, as [attention,rollout]; empty is all that this model has.")
    layer: str = setting("all", "Of attention: a block's number from 1, all, or mean.")
    head: str = setting("mean", "Of attention: a head's number from 1, all, or mean.")
    num_drawn: int = setting(6, "Images that are drawn, chosen at random.")
    num_averaged: int = setting(128, "Images that the attention distance is the mean of (the paper's is of 128).")
    num_predicted: int = setting(1000, "Images among which the sheet of predictions looks for the worst mistakes.")
    seed: int = setting(0, "Which images are chosen; a smaller choice lies in a larger one.")
    out: str = setting("", "Folder of the drawings; empty is <run>/explain, or runs/explain/... for a file.")
    mlflow: str = setting("", "MLflow tracking URI that the numbers and pictures are sent to; empty sends nothing.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        super().check()
        for name in ("num_drawn", "num_averaged", "num_predicted"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1.")
        if self.seed < 0:
            raise UserError(f"seed = {self.seed} must not be negative.")
        for name, value in {"layer": self.layer, "head": self.head}.items():
            if value not in ("all", "mean") and not (value.isascii() and value.isdigit() and int(value) > 0):
                raise UserError(f"{name} = {value} must be a number from 1, all, or mean.")
