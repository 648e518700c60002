"""A gallery: images in rows with lines of text over them, drawn with Matplotlib."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pipeline.base.page import add_legend
from pipeline.base.words import shorten

DPI = 150  # of the PNGs
MAX_IMAGES = 8  # in a row
SMALL, TEXT, TITLE = 7, 8, 10  # points
MAP = matplotlib.colormaps["viridis"]
GREY = "0.35"
_PLACE, _LINE = 1.3, 0.14  # inches: of a tile with a gap, and of a line of text
LINE_CHARACTERS = 17  # of a line over a tile


@dataclass(frozen=True)
class Tile:
    """An image with lines of text over it; long ones are wrapped. pixels: (height, width, 3). colour: of text and
    frame.
    """

    pixels: np.ndarray
    lines: Sequence[str] = ()
    colour: str = ""

    @property
    def wrapped(self) -> list[str]:
        """Lines that are as wide as a tile; the middle of a text that is too long for two of them is cut."""
        short = (shorten(line, 2 * LINE_CHARACTERS) for line in self.lines)
        return [part for line in short for part in textwrap.wrap(line, LINE_CHARACTERS) or [""]]


def gallery(
    rows: Sequence[Sequence[Tile | None]],
    title: str,
    note: str = "",
    legend: Sequence[tuple[str, Any]] = (),
) -> Figure:
    """Tiles in rows; None leaves a place empty.

    legend: (name, colour) of each square at the foot of the page.
    """
    columns = max(*map(len, rows), 3, math.ceil(0.088 * len(title) / _PLACE))
    width = columns * _PLACE
    note = textwrap.fill(note, int(width / 0.063))
    num_lines = sum(max((len(tile.wrapped) for tile in row if tile), default=0) for row in rows)
    foot = note.count("\n") + 4 + 2 * len(legend) / columns
    figure = Figure(figsize=(width, len(rows) * _PLACE + (num_lines + foot) * _LINE), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE, weight="bold", parse_math=False)
    places = figure.subplots(len(rows), columns, squeeze=False)
    for row, axes in zip(rows, places, strict=True):
        for axis, tile in itertools.zip_longest(axes, row):
            if tile is None:
                axis.set_axis_off()
                continue
            axis.imshow(tile.pixels)
            text, colour = "\n".join(tile.wrapped), tile.colour or "black"
            axis.set_title(text, fontsize=TEXT, color=colour, pad=3, parse_math=False)
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_color(tile.colour or "0.6")
            axis.spines[:].set_linewidth(2.0 if tile.colour else 0.5)
    if legend:
        squares = [Patch(color=colour, label=shorten(name, LINE_CHARACTERS - 4)) for name, colour in legend]
        look = {"loc": "outside lower left", "alignment": "left", "ncols": columns - 1, "fontsize": TEXT}
        add_legend(figure, handles=squares, title=note, title_fontsize=TEXT, **look)
    else:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=TEXT, color=GREY, parse_math=False)
    return figure


def folded(rows: Sequence[Sequence[Tile]]) -> list[Sequence[Tile]]:
    """Wrap rows of equal length that are too long for the page: the first part of each row, then the second, ..."""
    return [part for parts in zip(*(lines_of(row, MAX_IMAGES) for row in rows), strict=True) for part in parts]


def sheet(tiles: Sequence[Tile], title: str, note: str) -> Figure:
    """Images in rows."""
    rows = [tiles[first : first + MAX_IMAGES] for first in range(0, len(tiles), MAX_IMAGES)]
    return gallery(rows, title, note)


def lines_of(tiles: Sequence[Tile], most: int) -> list[Sequence[Tile]]:
    """The fewest lines of at most `most` tiles, all of about the same length."""
    length = -(-len(tiles) // -(-len(tiles) // most))
    return [tiles[i : i + length] for i in range(0, len(tiles), length)]
