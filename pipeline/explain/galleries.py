"""Draws figures with Matplotlib: attention, components, positions, filters, predictions.

Colour maps are perceptually uniform (viridis). Pixels are uint8 (H, W, 3), the crops that the model reads; maps float32
(h, w), at least 0.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pipeline.base.gallery import GREY, MAP, SMALL, TEXT, TITLE, Tile, folded, gallery, lines_of, sheet
from pipeline.base.page import style_axes
from pipeline.base.words import counted
from pipeline.evaluate.patches import enlarge
from pipeline.explain.attention import POOLING, Attention
from pipeline.model import ViTConfig

_MAX_MAPS = 12  # of one image in a row
_RIGHT, _WRONG = "#14713a", "#b8252a"
_SHARE_RIGHT = 0.25  # Places on the sheet of predictions that are kept for right ones.
_OWN_SCALE = "Each map is scaled to its own largest value, which is yellow; violet is 0."


def draw_attention(attention: Attention, config: ViTConfig, layer: str, head: str, inputs: Sequence[Tile]) -> Figure:
    """Each image, and beside it the maps of the chosen layers and heads.

    inputs: the images with their captions. layer: "all", or a number from 1. head: "all", "mean", or a number from 1.
    """
    maps, layers, heads = choose_maps(attention, layer, head)
    rows: list[Sequence[Tile | None]] = []
    for image, of_image in zip(inputs, maps.flatten(1, 2).numpy(), strict=False):
        tiles = [
            Tile(overlay(image.pixels, values, config), names)
            for names, values in zip(product(layers, heads), of_image, strict=True)
        ]
        rows += [[None if number else image, *line] for number, line in enumerate(lines_of(tiles, _MAX_MAPS))]
    title = "Attention of the class token" if config.pool in ("token", "both") else "Attention, mean of all patches"
    if POOLING in layers:
        title = f"Attention of the pool's query{'; of blocks, the mean of all patches' if len(layers) > 1 else ''}"
    return gallery(rows, title, _OWN_SCALE)


def choose_maps(attention: Attention, layer: str, head: str) -> tuple[Tensor, list[str], list[str]]:
    """(maps (B, layers, heads, h, w), names of the layers, names of the heads) of this choice; see draw_attention."""
    chosen, of_heads = (
        slice(None) if name in ("all", "mean") else slice(int(name) - 1, int(name)) for name in (layer, head)
    )
    maps, layers = attention.maps[:, chosen, of_heads], attention.layers[chosen]
    if head == "mean":
        return maps.mean(2, keepdim=True), layers, ["mean of the heads"]
    return maps, layers, [f"head {number + 1}" for number in range(attention.maps.shape[2])][of_heads]


def draw_rollout(attention: Attention, config: ViTConfig, inputs: Sequence[Tile]) -> Figure:
    """Each image, and below it the image lit by rollout (ViT paper, D.8)."""
    pairs = zip(inputs, attention.rollout[: len(inputs)].numpy(), strict=True)
    rollout = [Tile(brighten(image.pixels, values, config), ["rollout"]) for image, values in pairs]
    note = "Attention through all blocks, with the identity of the residual connections. Brighter is more."
    return gallery(folded([inputs, rollout]), "Attention rollout", note)


def draw_reconstruction(
    masked: np.ndarray, painted: np.ndarray, losses: Tensor, normalise: bool, inputs: Sequence[Tile]
) -> Figure:
    """Each image, below it what MAE's encoder sees, and below that the image with the removed patches as its decoder
    predicts them. masked, painted, losses: of `reconstruct`.
    """
    rows = [
        inputs,
        [Tile(image, ["visible patches"]) for image in masked],
        [Tile(image, ["reconstruction"]) for image in painted],
    ]
    note = (
        "The image; the patches that the encoder sees; the others as the decoder predicts them. Mean loss"
        f" {losses.mean():.4f}."
    )
    if normalise:
        note += " The decoder predicts normalised pixels: each patch has the mean and deviation of the image itself."
    return gallery(folded(rows), "Reconstruction by MAE", note)


def draw_components(colours: Tensor, shares: Tensor, config: ViTConfig, inputs: Sequence[Tile]) -> Figure:
    """Each image, and below it the first three principal components of its patches as red, green and blue.

    colours, shares: of `patch_components`.
    """
    tiles = [
        Tile(np.dstack([enlarge(of, config, image.pixels.shape[:2]) for of in found.permute(2, 0, 1).numpy()]))
        for image, found in zip(inputs, colours, strict=True)
    ]
    named = zip(("red", "green", "blue"), shares.tolist(), strict=False)
    told = ", ".join(f"{name} {share:.1%}" for name, share in named)
    note = (
        "The first three principal components of the patches of all these images together: patches with similar"
        f" features have similar colours. Shares of the variance: {told}."
    )
    return gallery(folded([inputs, tiles]), "Patches by their features", note)


def order_by_mistake(right: np.ndarray, confidence: np.ndarray, most: int) -> np.ndarray:
    """int64 indices of at most `most` predictions: wrong ones, the most confident first, then right ones, the least
    first.

    right: bool (n,). confidence: float (n,). A quarter of the places is kept for right ones, if there are enough.
    """
    wrong, good = np.flatnonzero(~right), np.flatnonzero(right)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")]
    good = good[np.argsort(confidence[good], kind="stable")]
    num_wrong = min(len(wrong), most - min(len(good), round(_SHARE_RIGHT * most)))
    return np.concatenate([wrong[:num_wrong], good[: most - num_wrong]])


def draw_predictions(
    true: np.ndarray,
    predicted: np.ndarray,
    confidence: np.ndarray,
    names: Sequence[str],
    most: int,
    read: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> Figure:
    """At most `most` images with true class and prediction, in green or red, in the order of `order_by_mistake`; if no
    true class is known, in black, the most confident first.

    true, predicted: int64 (n,), -1 if unknown. confidence: float (n,). names: of all classes, of which some may have
    the same one, as ImageNet's two cranes. read: int64 numbers of images -> (those that can
    be read, their pixels).
    """
    known = np.flatnonzero((true >= 0) & (predicted >= 0))
    if len(known):
        right = true[known] == predicted[known]
        chosen = known[order_by_mistake(right, confidence[known], most)]
        note = (
            f"True class, then prediction: {int((~right).sum()):,} of {len(right):,} are wrong. The most confident"
            " mistakes first, then right predictions, the least confident first."
        )
    else:
        readable = np.flatnonzero(predicted >= 0)
        chosen = readable[np.argsort(-confidence[readable], kind="stable")[:most]]
        note = "The true classes are not known. The most confident first."
    chosen, pixels = read(chosen)
    tiles = []
    for image, number in zip(pixels, chosen.tolist(), strict=True):
        said = f"{names[predicted[number]]}: {confidence[number]:.0%}"
        if true[number] < 0:
            tiles.append(Tile(image, [said]))
        else:
            mark, colour = ("✓", _RIGHT) if true[number] == predicted[number] else ("✗", _WRONG)
            tiles.append(Tile(image, [names[true[number]], f"{mark} {said}"], colour))
    return sheet(tiles, "Predictions", note)


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
    axes.plot(blocks, distances.mean(1), color="black", label="mean of heads")
    axes.axhline(uniform, color=GREY, linestyle="--", label="uniform attention")
    axes.set(xlabel="block", ylabel="mean attention distance (pixels)")
    axes.set_ylim(0, 1.25 * max(uniform, float(distances.max())))
    style_axes(axes)
    figure.suptitle(title, fontsize=TITLE, weight="bold")
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


def draw_filters(components: Tensor, shares: Tensor, num_filters: int, shown: Sequence[int]) -> Figure:
    """Principal components, each with its share of the variance; grey is zero, and each is scaled on its own.

    components, shares, num_filters: of `principal_filters`. shown: `Pixels.shown`.
    """
    tiles = []
    for number, (component, share) in enumerate(zip(components, shares.tolist(), strict=True), start=1):
        pixels = 0.5 + component[list(shown)] / (2 * component.abs().max())
        tiles.append(Tile(pixels.permute(1, 2, 0).numpy(), [f"{number}: {share:.1%}"]))
    count, of = len(tiles), counted(num_filters, "filter")
    height, width = components.shape[2:]
    note = (
        f"{count} principal components of {of}, {height} × {width} px, and their shares of the variance"
        f" ({shares.sum():.1%} in all)"
    )
    return gallery([tiles[i : i + 7] for i in range(0, count, 7)], "Filters of the first layer", note)
