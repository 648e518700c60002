"""One image as the input of a model, as evaluation reads it: `pipeline.model`'s `preprocess`."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.architecture.config import Config
from pipeline.architecture.pixels import ANY_TYPE, Pixels
from pipeline.base.errors import UserError
from pipeline.data.images.stored import DecodeError, upright
from pipeline.data.loading.decode import decode, to_rgb8
from pipeline.data.loading.loader import normalise
from pipeline.data.loading.values import batch_values
from pipeline.data.loading.views import write_eval_view
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig


def model_input(image: str | Path | Image.Image | np.ndarray, config: Config, trained: Mapping[str, Any]) -> Tensor:
    """float32 (C, height, width), as `ImageModel.preprocess`. config: of the model. trained: as of `trained_view`."""
    pixels, name = config.pixels, str(image) if isinstance(image, str | Path) else "the image"
    if pixels.type == ANY_TYPE:
        raise UserError(
            "preprocess: this model reads images by the range that their data set records, and a single image has none:"
            " read a data set by pipeline.data.loading.loader."
        )
    try:
        values = batch_values(_decoded(image, pixels), pixels)
    except DecodeError as error:
        raise UserError(f"{name} cannot be read: {error}.") from None
    out = np.empty((*config.image_size, pixels.num_channels), pixels.batch_type)
    write_eval_view(values, out, trained_view(trained, ImageSize.parse(config.image_size), name))
    return normalise(torch.from_numpy(out)[None], torch.device("cpu"), torch.float32, pixels)[0]


def trained_view(
    trained: Mapping[str, Any], image_size: ImageSize, where: str, asked: Mapping[str, Any] | None = None
) -> AugmentConfig:
    """The evaluation preprocessing of weights; for another image size their eval_resize is scaled with it.

    trained: their metadata. where: name of the weights in an error. asked: settings to use instead of theirs, except
    for those that are "auto" or 0. Raises UserError.
    """
    short = min(image_size)
    chosen = {name: trained[name] for name in ("eval_crop", "resize_filter") if name in trained}
    chosen["eval_resize"] = round(trained.get("eval_resize", 0) * short / trained.get("image_size", short))
    chosen |= {name: value for name, value in (asked or {}).items() if value not in ("auto", 0)}
    view = schema.build(AugmentConfig, chosen, where)
    if view.eval_crop != "resize" and 0 < view.eval_resize < short:
        raise UserError(f"eval_resize = {view.eval_resize} is smaller than image_size = {image_size}.")
    return view


def _decoded(image: str | Path | Image.Image | np.ndarray, pixels: Pixels) -> np.ndarray:
    """(H, W, C) of `pixels.type`. Raises DecodeError."""
    if isinstance(image, str | Path):
        return decode(Path(image).read_bytes(), pixels=pixels)
    if isinstance(image, Image.Image) and pixels.is_rgb8:
        return upright(*to_rgb8(image))
    as_file = io.BytesIO()  # An array is read as its .npy is.
    np.save(as_file, np.asarray(image), allow_pickle=False)
    return decode(as_file.getvalue(), pixels=pixels)
