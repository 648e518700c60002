"""Reads images as the model sees them, with enough pixels to look at, and draws a sheet of them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.base.gallery import MAX_IMAGES, Tile, gallery
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.values import to_rgb
from pipeline.data.loading.views import read_by, shown_view
from pipeline.evaluate.loaded_model import LoadedModel, print_unreadable, refuse_none_readable
from pipeline.evaluate.probes.features import read_pixels
from pipeline.settings.commands.weights import LookConfig
from pipeline.settings.quantities import ImageSize


def read_shown(
    config: LookConfig, loaded: LoadedModel, split: Split, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that can be read, and what the model sees of them, with enough pixels to look at, uint8 (n, H, W, 3).

    The others are printed. Raises UserError for none.
    """
    view = shown_view(loaded.view, loaded.image_size, *read_by(loaded.pixels, split))
    with Loader(split, view, config.threads, prefetch=2, max_bad_share=1.0) as loader:
        kept, images = read_pixels(loader, rows, config.batch)
    print_unreadable(loader.bad, split.keys, "left out")
    refuse_none_readable(f"images = {', '.join(config.images)} that were chosen", loader.bad, split, len(rows))
    return kept, to_rgb(images.numpy(), loaded.pixels)


def sheet(
    tiles: Sequence[Tile], title: str, note: str, image_size: ImageSize | int, above: Sequence[Sequence[Tile]] = ()
) -> Figure:
    """Images in rows, below the rows `above`. Says where the model reads less than people see, as some mistakes are due
    to that.
    """
    size = ImageSize.parse(image_size)
    reads = "" if tiles[0].pixels.shape[:2] == size else f" The model reads these crops at {size} px."
    rows = [tiles[first : first + MAX_IMAGES] for first in range(0, len(tiles), MAX_IMAGES)]
    return gallery([*above, *rows], title, note + reads)
