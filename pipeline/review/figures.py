"""A sheet of predictions, from the last evaluation of a run."""

from functools import partial

import numpy as np

from pipeline.base.gallery import DPI
from pipeline.base.page import png
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.values import to_rgb
from pipeline.data.loading.views import shown_view
from pipeline.evaluate.classify import read_pixels
from pipeline.explain import galleries
from pipeline.review.record import LastPredictions
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

_NUM_IMAGES = 32
_THREADS = 1


def read_shown(split: Split, config: RunConfig, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the rows that can be read, the crops that the model sees, with enough pixels to look at, uint8 (n, H, W, 3))."""
    view = shown_view(config.augment, config.model.image_size, split.pixels)
    with Loader(split, view, _THREADS, prefetch=2, max_bad_share=1.0) as loader:
        rows, pixels = read_pixels(loader, rows, 16)
    return rows, to_rgb(pixels.numpy(), split.pixels)


def draw_sheet(found: LastPredictions, names: list[str], split: Split, config: RunConfig) -> bytes | None:
    """PNG of images, in the crops that the model sees, with true and predicted class: confident mistakes first, then
    right ones.

    None if no image has both.
    """
    if not ((found.true >= 0) & (found.predicted >= 0)).any():
        return None
    size, read = ImageSize.parse(config.model.image_size), partial(read_shown, split, config)
    figure = galleries.draw_predictions(found.true, found.predicted, found.probability, names, _NUM_IMAGES, size, read)
    return png(figure, DPI, split.pixels.describe_shown())
