"""Weights, ready to look at images: the one way from a weights file to logits of evaluation, prediction and explanation.

Shapes: B batch, H, W image height and width, D features, K classes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import model as models
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import normalise
from pipeline.distributed import Ranks
from pipeline.errors import UserError
from pipeline.evaluate.classify import Predictions, probabilities_of
from pipeline.evaluate.probes.features import Features
from pipeline.evaluate.split_reader import Progress, SplitReader
from pipeline.model import Model, ViTConfig
from pipeline.outputs import try_output
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig
from pipeline.settings.weights import WeightsConfig


@dataclass(frozen=True)
class LoadedModel:
    """Weights on their device, in evaluation mode.

    view: the preprocessing of images. loss_kind: softmax or sigmoid. extra: what the weights' file says of them.
    """

    model: Model
    device: torch.device
    dtype: torch.dtype
    image_size: ImageSize
    view: AugmentConfig
    loss_kind: str
    extra: dict[str, Any]

    def reader(self, split: Split, batch: int, threads: int, progress: Progress | None = None) -> SplitReader:
        """A split as these weights are to see it, read by this process alone."""
        alone = Ranks(0, 0, 1, self.device)
        return SplitReader(split, self.image_size, self.view, batch, threads, alone, progress)

    def images(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, 3) -> (B, 3, H, W), what the model reads."""
        return normalise(pixels, self.device, self.dtype)

    def features(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, 3) -> (B, D), what the head reads."""
        return self.model.features(self.images(pixels))

    def logits(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, 3) -> float32 (B, K)."""
        return self.model.head(self.features(pixels)).float()

    def probabilities(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, 3) -> float32 (B, K), of the classes."""
        return probabilities_of(self.logits(pixels), self.loss_kind)


def load_model(config: WeightsConfig) -> LoadedModel:
    """The model in evaluation mode, on its device. Raises UserError for weights that cannot be read as asked."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError("device = cuda, but torch sees no GPU here. Use device=cpu.")
    device = torch.device("cuda" if available and config.device != "cpu" else "cpu")
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    # Once: a run that is still training moves its pointer, and what is said here must be of these very weights.
    trained, state, extra = models.read_weights(config.weights, say=print)
    image_size = ImageSize.parse(config.image_size or trained.image_size)
    view = evaluation_view(config, image_size, extra.get("preprocessing", {}))
    loss_kind = extra.get("loss", "softmax") if config.loss == "auto" else config.loss
    model = models.build(replace(trained, image_size=image_size))
    if isinstance(trained, ViTConfig) and isinstance(model.config, ViTConfig):
        state = models.resample_state(state, trained, model.config)
    model.load_state_dict(state)
    return LoadedModel(model.eval().to(device, dtype), device, dtype, image_size, view, loss_kind, extra)


def evaluation_view(config: WeightsConfig, image_size: ImageSize | int, trained: dict[str, Any]) -> AugmentConfig:
    """The preprocessing asked for, else that of the weights, `trained`, else the default.

    At another image size than theirs the weights' eval_resize keeps its ratio to it.
    """
    asked = {"eval_crop": config.eval_crop, "resize_filter": config.resize_filter}
    usual = {"eval_crop": "center", "resize_filter": "linear"}
    chosen = {name: trained.get(name, usual[name]) if value == "auto" else value for name, value in asked.items()}
    short = min(ImageSize.parse(image_size))
    resize = round(trained.get("eval_resize", 0) * short / trained.get("image_size", short))
    view = schema.build(AugmentConfig, {**chosen, "eval_resize": config.eval_resize or resize}, config.weights)
    if view.eval_crop != "resize" and 0 < view.eval_resize < short:
        raise UserError(f"eval_resize = {view.eval_resize} is smaller than image_size = {image_size}.")
    return view


def check_outputs(weights: str, where: str, seen: Predictions | Features, split: Split) -> None:
    """Raises UserError when no image of the split could be read, or the model gives no finite number for some.

    weights, where: what the user calls the weights and the images.
    """
    values = seen.loss if isinstance(seen, Predictions) else seen.values.sum(1)
    if not seen.readable.any():
        row = min(seen.problems)
        raise UserError(
            f"none of the {len(split):,} images of {where} can be read; the first is {split.keys([row])[0]}: "
            f"{seen.problems[row]}. Check the files."
        )
    broken = np.flatnonzero(seen.readable & ~np.isfinite(values))
    if len(broken):
        raise UserError(
            f"{weights} gives NaN or infinity for {len(broken):,} of {len(split):,} images, the first "
            f"{split.keys(broken[:1])[0]}. Use precision=fp32, or an earlier checkpoint."
        )


def output_folder(out: str, weights: str, kind: str, name: str = "") -> Path:
    """`out`, else <run>/<kind>/<name>, or runs/<kind>/<weights>-<name> for weights of no run.

    Raises UserError when it cannot be written.
    """
    path = Path(weights)
    if out:
        folder = Path(out)
    elif (path / "checkpoints").is_dir():
        folder = path / kind / name
    else:
        folder = Path("runs") / kind / "-".join([path.resolve().stem, *([name] if name else [])])
    try_output("out", folder)
    return folder
