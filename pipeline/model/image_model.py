"""What all models have beside their tensors: names of classes, and how an image becomes their input."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from pipeline.architecture.config import Config

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image


class ImageModel(nn.Module):
    """extra: what the weights say of images and classes, plain data: as of `save`; empty for a new model."""

    config: Config

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}

    @property
    def classes(self) -> list[str] | None:
        """Class names in the order of the logits, readable ones where the weights have some; None if they name none."""
        return self.extra.get("class_names") or self.extra.get("classes")

    def preprocess(self, image: "str | Path | Image | np.ndarray") -> Tensor:
        """float32 (C, height, width) on the CPU, the model's input: bit for bit as `launch/evaluate.py` reads images.

        image: a file of any format that is read, a PIL image, or an array (H, W), (H, W, C) or (C, H, W) of the type
        of the model's images, `uint8` for photographs. Raises UserError, a ValueError, for images that cannot be read.
        """
        # The only import of a room above: this one alone needs more than torch and numpy.
        from pipeline.data.loading.single_image import model_input

        return model_input(image, self.config, self.extra.get("preprocessing", {}))
