"""Pictures of many images: what of each is attended to, what speaks for a class, and what was taken for what.

Pixels are uint8 (n, S, S, 3), what the model sees; maps are float32 (n, h, w).
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from pipeline.explain.attention import POOLING, Attention
from pipeline.explain.figures import Tile, gallery, lit, overlay
from pipeline.model import ViTConfig

_COLUMNS, _MAPS = 8, 12  # images, or maps of one image, beside each other
_RIGHT, _WRONG = "#14713a", "#b8252a"
# Of a sheet full of mistakes so many places are kept for what is right.
_SHARE_RIGHT = 0.25
_OWN_SCALE = "Each map is scaled to its own largest value."


def draw_attention(
    attention: Attention, config: ViTConfig, layer: str, head: str, pixels: np.ndarray, captions: Sequence[str]
) -> dict[str, Figure]:
    """One gallery, "attention", rows for each image; of all heads of all layers one for each, "attention-1" and so on.

    layer, head: "all", "mean", or a number from 1.
    """
    maps, layers, heads = choose_maps(attention, layer, head)
    is_matrix = len(layers) > 1 and len(heads) > 1
    galleries: list[list[list[Tile | None]]] = []
    for image, (own, caption) in enumerate(zip(pixels, captions, strict=True)):
        tiles = [
            [Tile(overlay(own, maps[image, i, j].numpy(), config), [_name(of_layer, of_head, layers, heads)])
             for j, of_head in enumerate(heads)]
            for i, of_layer in enumerate(layers)
        ]  # fmt: skip
        lines = tiles if is_matrix else _lines([tile for row in tiles for tile in row], _MAPS)
        if is_matrix or not galleries:
            galleries.append([])
        galleries[-1] += [[Tile(own, [caption]) if i == 0 else None, *line] for i, line in enumerate(lines)]
    which = ", ".join(names[0] for names in (layers, heads) if len(names) == 1)
    note = f"{which[:1].upper()}{which[1:]}. {_OWN_SCALE}" if which else _OWN_SCALE
    title = "Attention of the class token" if config.pool == "token" else "Attention, mean of all tokens"
    figures = [gallery(rows, title, note, bar="attention") for rows in galleries]
    if is_matrix:
        return {f"attention-{number}": figure for number, figure in enumerate(figures, start=1)}
    return {"attention": figures[0]}


def _name(layer: str, head: str, layers: list[str], heads: list[str]) -> str:
    """What tells a map from the others beside it."""
    return ", ".join(name for name, names in ((layer, layers), (head, heads)) if len(names) > 1)


def choose_maps(attention: Attention, layer: str, head: str) -> tuple[Tensor, list[str], list[str]]:
    """(B, layers, heads, h, w), and the names of those layers and heads that were asked for."""
    maps, layers = attention.maps, attention.layers
    heads = [f"head {number + 1}" for number in range(maps.shape[2])]
    num_blocks = sum(name != POOLING for name in layers)
    if layer == "mean":
        maps, layers = maps[:, :num_blocks].mean(1, keepdim=True), ["mean of the blocks"]
    elif layer != "all":
        maps, layers = maps[:, [int(layer) - 1]], [layers[int(layer) - 1]]
    if head == "mean":
        maps, heads = maps.mean(2, keepdim=True), ["mean of the heads"]
    elif head != "all":
        maps, heads = maps[:, :, [int(head) - 1]], [heads[int(head) - 1]]
    return maps, layers, heads


def draw_rollout(attention: Attention, config: ViTConfig, pixels: np.ndarray, captions: Sequence[str]) -> Figure:
    """Each image, and below it, lit by rollout: with half an identity, and without (the text of the ViT paper, D.8)."""

    def lit_by(maps: Tensor, name: str) -> list[Tile]:
        pairs = zip(pixels, maps[: len(pixels)].numpy(), strict=True)
        return [Tile(lit(own, values, config), [name]) for own, values in pairs]

    rows = [_inputs(pixels, captions), lit_by(attention.rollout, "rollout"), lit_by(attention.product, "no identity")]
    note = "Through all blocks: with half an identity in each, for the residual, and without. Bright is most."
    return gallery(_fold(rows), "Attention rollout", note)


def draw_gradcam(
    maps: Sequence[Tensor], said: Sequence[Sequence[str]], config: ViTConfig | None, pixels: np.ndarray,
    captions: Sequence[str],
) -> Figure:  # fmt: skip
    """Each image, and below it a map for each of its likeliest classes; said: the classes, as maps are."""
    rows = [_inputs(pixels, captions)]
    for of_class, names in zip(maps, said, strict=True):
        triples = zip(pixels, of_class.numpy(), names, strict=True)
        rows.append([Tile(overlay(own, values, config), [name]) for own, values, name in triples])
    note = f"What speaks for the most likely class, and for the second. {_OWN_SCALE}"
    return gallery(_fold(rows), "Grad-CAM", note, bar="weight for the class")


def order_by_mistake(right: np.ndarray, confidence: np.ndarray, most: int) -> np.ndarray:
    """int64 indices of at most `most` predictions: mistakes, the most confident first, then right ones, the least first.

    right: bool (n,). confidence: float (n,). A quarter of the places is kept for right ones, if there are as many.
    """
    wrong, good = np.flatnonzero(~right), np.flatnonzero(right)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")]
    good = good[np.argsort(confidence[good], kind="stable")]
    num_wrong = min(len(wrong), most - min(len(good), round(_SHARE_RIGHT * most)))
    return np.concatenate([wrong[:num_wrong], good[: most - num_wrong]])


def draw_predictions(
    pixels: np.ndarray, true: Sequence[str | None], predicted: Sequence[str], confidence: np.ndarray, note: str
) -> Figure:
    """The sheet: image, true class, prediction in green or red; in black where the true class is not known."""
    tiles = []
    for own, name, taken_for, share in zip(pixels, true, predicted, confidence.tolist(), strict=True):
        if name is None:
            tiles.append(Tile(own, [f"{taken_for}: {share:.0%}"]))
            continue
        is_right = name == taken_for
        lines = [name, f"{'✓' if is_right else '✗'} {taken_for}: {share:.0%}"]
        tiles.append(Tile(own, lines, _RIGHT if is_right else _WRONG))
    return gallery([tiles[i : i + _COLUMNS] for i in range(0, len(tiles), _COLUMNS)], "Predictions", note)


def _inputs(pixels: np.ndarray, captions: Sequence[str]) -> list[Tile]:
    return [Tile(own, [caption]) for own, caption in zip(pixels, captions, strict=True)]


def _fold(rows: Sequence[Sequence[Tile]]) -> list[Sequence[Tile]]:
    """Rows that are too long for a page, below each other."""
    return [part for parts in zip(*(_lines(row, _COLUMNS) for row in rows), strict=True) for part in parts]


def _lines(tiles: Sequence[Tile], most: int) -> list[Sequence[Tile]]:
    """In as few lines of at most `most` as can be, all about as long."""
    length = -(-len(tiles) // -(-len(tiles) // most))
    return [tiles[i : i + length] for i in range(0, len(tiles), length)]
