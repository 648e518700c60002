"""Draws figures with Matplotlib.

Colour maps are perceptually uniform (viridis). Pixels are uint8 (H, W, 3), the model's or more of the same crop; maps float32 (h, w), at least 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from pipeline.base.gallery import GREY, MAP, SMALL, TEXT, TITLE, Tile, gallery
from pipeline.base.page import style_axes
from pipeline.base.words import counted
from pipeline.explain.parameters import Cost, Filters
from pipeline.model import ViTConfig
from pipeline.settings.quantities import ImageSize


def enlarge(values: np.ndarray, config: ViTConfig | None, size: tuple[int, int]) -> np.ndarray:
    """Resize a map of patches, (h, w), to the image, (height, width): linear between the centres of the patches.

    config: gives the places of the patches; None for a map whose cells divide the image evenly.
    size: of the image as it is drawn, which may have more pixels than the model reads.
    """
    sides = size if config is None else ImageSize.parse(config.image_size)

    def weights(axis: int) -> np.ndarray:
        cells, side, scale = values.shape[axis], size[axis], size[axis] / sides[axis]
        patch = side / cells if config is None else config.patch_pixels * scale
        centres = patch / 2 + patch * np.arange(cells)
        return np.stack([np.interp(np.arange(side) + 0.5, centres, row) for row in np.eye(cells)], axis=1)

    return weights(0) @ values @ weights(1).T


def overlay(pixels: np.ndarray, values: np.ndarray, config: ViTConfig | None) -> np.ndarray:
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
    num_blocks, num_heads = distances.shape
    figure = Figure(figsize=(max(4.2, 1.8 + 0.22 * num_blocks), 3.4), layout="constrained")
    axes = figure.add_subplot()
    ordered = distances.sort(dim=1).values
    for head in range(num_heads):
        colour = MAP(0.9 * head / max(num_heads - 1, 1))
        label = "head" if head == num_heads // 2 else None
        axes.plot(range(1, num_blocks + 1), ordered[:, head], "o", markersize=4, color=colour, alpha=0.85, label=label)
    axes.plot(range(1, num_blocks + 1), distances.mean(1), color="black", linewidth=1, label="mean of heads")
    axes.axhline(uniform, color=GREY, linestyle="--", linewidth=1, label="uniform attention")
    _style(axes, "block", "mean attention distance (pixels)")
    axes.set_title(title, fontsize=TITLE, weight="bold", parse_math=False)
    axes.set_ylim(0, 1.25 * max(uniform, float(distances.max())))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # Else one block has fractions of a block.
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left", ncols=3)
    return figure


def draw_positions(similarity: Tensor) -> Figure:
    """Cosine similarity of position embeddings, (T, h, w, h, w): at the place of each patch, its similarity to all patches."""
    num_tables = len(similarity)
    columns = min(4, num_tables)
    side = 4.6 if num_tables == 1 else 3.2
    rows = -(-num_tables // columns)
    figure = Figure(figsize=(side * columns + 1.2, side * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for number, (axes, table) in enumerate(zip(panels, similarity.numpy(), strict=False)):
        h, w = table.shape[:2]
        gap = max(1, round(0.12 * w))
        sheet = _sheet(table.astype(np.float64), gap, np.nan)
        image = axes.imshow(sheet, cmap=MAP, vmin=-1, vmax=1, interpolation="nearest")
        for axis, cells in ((axes.yaxis, h), (axes.xaxis, w)):
            shown = np.arange(0, cells, -(-cells // 8))
            axis.set_ticks(shown * (cells + gap) + (cells - 1) / 2, labels=[str(cell + 1) for cell in shown])
        axes.set_xlabel("column of the patch", fontsize=TEXT)
        axes.set_ylabel("row of the patch", fontsize=TEXT)
        axes.tick_params(labelsize=SMALL, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if num_tables > 1:
            axes.set_title(f"before block {number + 1}", fontsize=TEXT)
    for axes in panels[num_tables:]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.8)
    bar.set_label("cosine similarity", fontsize=TEXT)
    bar.ax.tick_params(labelsize=SMALL)
    figure.suptitle("Similarity of position embeddings", fontsize=TITLE, weight="bold")
    return figure


def _sheet(tiles: np.ndarray, gap: int, fill: float) -> np.ndarray:
    """Tiles (rows, columns, height, width, ...) as one image, with gaps between them."""
    rows, columns, height, width, *channels = tiles.shape
    sheet = np.full((rows, columns, height + gap, width + gap, *channels), fill, tiles.dtype)
    sheet[:, :, :height, :width] = tiles
    return sheet.swapaxes(1, 2).reshape(rows * (height + gap), columns * (width + gap), *channels)[:-gap, :-gap]


def draw_filters(filters: Filters, shown: Sequence[int] = (0, 1, 2)) -> Figure:
    """Principal components, each with its share of the variance; grey is zero, and each is scaled on its own. shown: `Pixels.shown`."""
    tiles = []
    for number, (component, share) in enumerate(zip(filters.components, filters.shares.tolist(), strict=True), start=1):
        pixels = 0.5 + component[list(shown)] / (2 * component.abs().max())
        tiles.append(Tile(pixels.permute(1, 2, 0).numpy(), [f"{number}: {share:.1%}"]))
    count, of = len(tiles), f"{counted(filters.num_filters, 'filter')}"
    height, width = filters.components.shape[2:]
    note = f"{count} principal components of {of}, {height} × {width} px, and their shares of the variance ({filters.shares.sum():.1%} in all)"
    return gallery([tiles[i : i + 7] for i in range(0, count, 7)], "Filters of the first layer", note)


def draw_patches(pixels: np.ndarray, config: ViTConfig) -> Figure:
    """An image with the borders of its patches, and cut into them."""
    h, w = config.grid
    patch = config.patch_pixels
    figure = Figure(figsize=(8.2, 4.5), layout="constrained")
    whole, cut = figure.subplots(1, 2)
    whole.imshow(pixels, extent=(0, pixels.shape[1], pixels.shape[0], 0))
    gap = max(1, round(patch / 8))
    for i, (row, column) in enumerate(np.ndindex(h, w), start=1):
        corner = column * patch, row * patch
        whole.add_patch(Rectangle(corner, patch, patch, fill=False, edgecolor="white", linewidth=0.7))
        if h * w <= 100:
            left, top = (place * (patch + gap) + 0.04 * patch for place in (column, row))
            cut.text(
                left,
                top,
                str(i),
                fontsize=SMALL,
                color="white",
                va="top",
                bbox={"facecolor": "black", "alpha": 0.55, "pad": 0.8, "linewidth": 0},
            )
    whole.set_title(f"{h} × {counted(w, 'patch')} of {patch} × {patch} px", fontsize=TEXT)
    patches = sliding_window_view(pixels, (patch, patch), (0, 1))[::patch, ::patch][:h, :w]
    sheet = _sheet(np.moveaxis(patches, 2, -1), gap, 255)
    cut.imshow(sheet, extent=(0, sheet.shape[1], sheet.shape[0], 0))
    token = " and the class token" if config.has_class_token else ""
    token += f" and {counted(config.registers, 'register')}" if config.registers else ""
    cut.set_title(
        f"read row by row: {counted(h * w, 'patch')}{token} = {counted(config.num_tokens, 'token')}", fontsize=TEXT
    )
    for axes in (whole, cut):
        axes.set_axis_off()
    figure.suptitle("An image as tokens", fontsize=TITLE, weight="bold")
    return figure


def draw_costs(costs: Sequence[Cost], own: Cost) -> Figure:
    """Tokens, multiply-adds and attention's share of them against the side of the image, a line for each patch side."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    panels: dict[str, Callable[[Cost], float]] = {
        "tokens": lambda cost: cost.tokens,
        "GMACs of an image, forward": lambda cost: cost.macs / 1e9,
        "of these for attention, %": lambda cost: 100 * cost.attention_macs / cost.macs,
    }
    patches = list(dict.fromkeys(cost.patch for cost in costs))
    mark: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "color": "black", "label": "this model"}
    all_axes = figure.subplots(1, 3)
    for axes, (name, value) in zip(all_axes, panels.items(), strict=True):
        for number, patch in enumerate(patches):
            line = [cost for cost in costs if cost.patch == patch]
            colour = MAP(0.85 * number / max(len(patches) - 1, 1))
            sides, values = [cost.image for cost in line], [value(cost) for cost in line]
            axes.plot(sides, values, ".-", markersize=4, color=colour, label=f"patch {patch}")
        axes.plot([own.image], [value(own)], "o", **mark)
        _style(axes, "image side (pixels)", name)
    tokens, macs, share = all_axes
    tokens.set_yscale("log")
    macs.set_yscale("log")
    share.set_ylim(0)
    tokens.legend(fontsize=SMALL, frameon=False)
    figure.suptitle("Cost for other sizes of image and patch", fontsize=TITLE, weight="bold")
    return figure


def _style(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL)
    style_axes(axes)
