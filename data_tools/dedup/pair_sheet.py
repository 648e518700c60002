"""Draws a sheet of image pairs for visual inspection: each test image, or kept image, and below it its copy."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image

from data_tools.sources.reader import read_thumbnail
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.gallery import LINE_CHARACTERS, Tile, folded, gallery
from pipeline.base.page import png
from pipeline.base.words import printable, shorten

_SIDE = 224  # More pixels of an image are not drawn.
_GREY = np.full((_SIDE, _SIDE, 3), 128, np.uint8)


def read_tile(tar: str, offset: int, size: int, caption: str, pixels: Pixels = RGB8) -> Tile:
    """An image of a shard with its caption; a grey one in place of an unreadable one: equal files are copies, also
    damaged ones.
    """
    image = read_thumbnail(tar, offset, size, _SIDE, pixels)
    return captioned(_GREY if image is None else image, caption)


def captioned(pixels: np.ndarray, caption: str) -> Tile:
    """An image with its caption, reduced to the size in which it is drawn. pixels: (H, W, 3) uint8."""
    image = Image.fromarray(pixels)
    image.thumbnail((_SIDE, _SIDE))
    # Lines end behind a slash where they can.
    folders = shorten(printable(caption), 3 * LINE_CHARACTERS).replace("/", "/ ")
    return Tile(np.asarray(image), [line.replace("/ ", "/") for line in textwrap.wrap(folders, LINE_CHARACTERS)])


def draw_pairs(pairs: Sequence[tuple[Tile, Tile]], originals: str = "Test images") -> bytes:
    """Returns a PNG of the pairs, each with its two captions."""
    title = f"{originals}, and below each its copy, with the distance"
    return png(gallery(folded([*zip(*pairs, strict=True)]), title), dpi=100)
