"""Draws figures with Matplotlib.

Colour maps are perceptually uniform (viridis). Pixels are uint8 (H, W, 3), the model's or more of the same crop; maps
float32 (h, w), at least 0.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pipeline.base.gallery import GREY, MAP, SMALL, TEXT, TITLE, Tile, gallery
from pipeline.base.page import style_axes
from pipeline.base.words import counted
from pipeline.explain.parameters import Filters
from pipeline.model import ViTConfig


def enlarge(values: np.ndarray, config: ViTConfig, size: tuple[int, int]) -> np.ndarray:
    """Resize a map of patches, (h, w), to the image, (height, width): linear between the centres of the patches.

    config: gives the places of the patches. size: of the image as it is drawn, which may have more pixels than the
    model reads.
    """
    places = []
    for cells, side, own in zip(values.shape, size, config.image_size, strict=True):
        patch = config.patch_pixels * side / own
        centres = patch / 2 + patch * np.arange(cells)
        places.append(np.stack([np.interp(np.arange(side) + 0.5, centres, row) for row in np.eye(cells)], axis=1))
    rows, columns = places
    return rows @ values @ columns.T


def overlay(pixels: np.ndarray, values: np.ndarray, config: ViTConfig) -> np.ndarray:
    """A map in colours over the image in grey, scaled to its own largest value."""
    grey = pixels.mean(2, keepdims=True) / 255
    scaled = enlarge(values / max(values.max(), 1e-12), config, pixels.shape[:2])
    return 0.4 * grey + 0.6 * MAP(scaled)[..., :3]


def brighten(pixels: np.ndarray, values: np.ndarray, config: ViTConfig) -> np.ndarray:
    """The image, bright where the map is large (ViT paper, Figure 6), and never fully dark."""
    scaled = enlarge(values / max(values.max(), 1e-12), config, pixels.shape[:2])
    return pixels / 255 * (0.15 + 0.85 * scaled**0.7)[..., None]


def draw_distances(distances: Tensor, uniform: float, title: str) -> Figure:
    """Mean attention distance of each head by depth (ViT paper, Figure 7, right).

    distances: (blocks, H) in pixels. uniform: the distance for uniform attention.
    """
    blocks = range(1, len(distances) + 1)
    figure = Figure(figsize=(max(4.2, 1.8 + 0.22 * len(distances)), 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(blocks, distances, "o", markersize=4, color=MAP(0.5), alpha=0.6)
    axes.plot(blocks, distances.mean(1), color="black", linewidth=1, label="mean of heads")
    axes.axhline(uniform, color=GREY, linestyle="--", linewidth=1, label="uniform attention")
    axes.set_xlabel("block", fontsize=TEXT)
    axes.set_ylabel("mean attention distance (pixels)", fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    style_axes(axes)
    axes.set_title(title, fontsize=TITLE, weight="bold", parse_math=False)
    axes.set_ylim(0, 1.25 * max(uniform, float(distances.max())))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # Else one block has fractions of a block.
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left", ncols=3)
    return figure


def draw_positions(similarity: Tensor) -> Figure:
    """Cosine similarity of position embeddings, (T, h, w, h, w): at the place of each patch, its similarity to all
    patches.
    """
    num_tables = len(similarity)
    columns = min(4, num_tables)
    side = 4.6 if num_tables == 1 else 3.2
    rows = -(-num_tables // columns)
    figure = Figure(figsize=(side * columns + 1.2, side * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for number, (axes, table) in enumerate(zip(panels, similarity.numpy(), strict=False)):
        gap = max(1, round(0.12 * table.shape[1]))
        tiles = np.pad(table, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
        sheet = np.concatenate(np.concatenate(tiles, 1), 1)[:-gap, :-gap]
        image = axes.imshow(sheet, cmap=MAP, vmin=-1, vmax=1, interpolation="nearest")
        axes.set_axis_off()
        if num_tables > 1:
            axes.set_title(f"before block {number + 1}", fontsize=TEXT)
    for axes in panels[num_tables:]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.8)
    bar.set_label("cosine similarity", fontsize=TEXT)
    bar.ax.tick_params(labelsize=SMALL)
    figure.suptitle("Similarity of position embeddings", fontsize=TITLE, weight="bold")
    return figure


def draw_filters(filters: Filters, shown: Sequence[int] = (0, 1, 2)) -> Figure:
    """Principal components, each with its share of the variance; grey is zero, and each is scaled on its own. shown:
    `Pixels.shown`.
    """
    tiles = []
    for number, (component, share) in enumerate(zip(filters.components, filters.shares.tolist(), strict=True), start=1):
        pixels = 0.5 + component[list(shown)] / (2 * component.abs().max())
        tiles.append(Tile(pixels.permute(1, 2, 0).numpy(), [f"{number}: {share:.1%}"]))
    count, of = len(tiles), f"{counted(filters.num_filters, 'filter')}"
    height, width = filters.components.shape[2:]
    note = (
        f"{count} principal components of {of}, {height} × {width} px, and their shares of the variance"
        f" ({filters.shares.sum():.1%} in all)"
    )
    return gallery([tiles[i : i + 7] for i in range(0, count, 7)], "Filters of the first layer", note)
