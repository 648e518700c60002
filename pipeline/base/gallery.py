"""A gallery: images in rows with lines of text over them, drawn with Matplotlib."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pipeline.base.errors import UserError
from pipeline.base.words import counted, shorten

DPI = 150  # of the PNGs
MAX_IMAGES = 8  # in a row
SMALL, TEXT, TITLE = 7, 8, 10  # points
MAP = matplotlib.colormaps["viridis"]
GREY = "0.35"
_MAX_PIXELS = 2**16  # Matplotlib's limit of each side.
_TILE, _GAP, _LINE, _MARGIN, _MIN_WIDTH = 1.2, 0.08, 0.16, 0.2, 3.2  # inches
LINE_CHARACTERS, _MAX_LINES = 17, 2  # of a line over a tile, and into how many it is wrapped


@dataclass(frozen=True)
class Tile:
    """An image with lines of text over it; long ones are wrapped. pixels: (height, width, 3). colour: of text and
    frame.
    """

    pixels: np.ndarray
    lines: Sequence[str] = ()
    colour: str = ""


def gallery(
    rows: Sequence[Sequence[Tile | None]],
    title: str,
    note: str = "",
    bar: str = "",
    legend: Sequence[tuple[str, Any]] = (),
) -> Figure:
    """Tiles in rows; None leaves a place empty. bar: label of a colour bar from 0 to the largest value; empty for none.

    legend: (name, colour) of each square at the foot of the page.
    Raises UserError for more rows than a picture can have.
    """
    rows = [
        [tile and replace(tile, lines=[part for line in tile.lines for part in _wrapped(line)]) for tile in row]
        for row in rows
    ]
    num_lines = [max((len(tile.lines) for tile in row if tile), default=0) for row in rows]
    heights = [lines * _LINE + _TILE + _GAP for lines in num_lines]
    inside = max(max(map(len, rows)) * (_TILE + _GAP) - _GAP, 0.088 * len(title), _MIN_WIDTH)
    notes = textwrap.wrap(note, int(inside / 0.063))
    in_line = max(1, int((inside + _GAP) / (_TILE + _GAP)))
    above = 0.3 + (len(notes) + 0.4) * _LINE
    below = (0.65 if bar else 0.0) + -(-len(legend) // in_line) * 1.5 * _LINE
    width, height = inside + 2 * _MARGIN, sum(heights) + above + below + 2 * _MARGIN
    if height * DPI >= _MAX_PIXELS:
        fitting = int(len(rows) * _MAX_PIXELS / (height * DPI))
        raise UserError(
            f"{title}: {counted(len(rows), 'row')}, but a picture holds some {fitting:,}. Draw fewer images"
            " (num_drawn)."
        )
    figure = Figure(figsize=(width, height))
    # One canvas for all tiles, in inches: separate axes would take 30 ms a tile.
    canvas = figure.add_axes((0, 0, 1, 1))
    canvas.set_axis_off()
    top = height - _MARGIN
    canvas.text(_MARGIN, top, title, fontsize=TITLE, va="top", weight="bold", parse_math=False)
    for number, line in enumerate(notes):
        down = top - 0.24 - number * _LINE
        canvas.text(_MARGIN, down, line, fontsize=TEXT, va="top", color=GREY, parse_math=False)
    top -= above
    for row, lines, row_height in zip(rows, num_lines, heights, strict=True):
        for column, tile in enumerate(row):
            if tile is not None:
                _draw_tile(canvas, _MARGIN + column * (_TILE + _GAP), top - lines * _LINE - _TILE, tile)
        top -= row_height
    canvas.set(xlim=(0, width), ylim=(0, height), aspect="auto")
    for number, (name, colour) in enumerate(legend):
        down, column = divmod(number, in_line)
        left, middle = _MARGIN + column * (_TILE + _GAP), _MARGIN + below - (down + 1) * 1.5 * _LINE + _LINE / 2
        canvas.add_patch(Rectangle((left, middle - _LINE / 2), _LINE, _LINE, facecolor=colour))
        text = shorten(name, LINE_CHARACTERS - 4)
        canvas.text(left + 1.5 * _LINE, middle, text, fontsize=TEXT, va="center", parse_math=False)
    if bar:
        place = (_MARGIN / width, (_MARGIN + 0.38) / height, 2.5 / width, 0.1 / height)
        scale = ScalarMappable(Normalize(0, 1), MAP)
        colours = figure.colorbar(scale, figure.add_axes(place), orientation="horizontal")
        colours.set_ticks([0, 1], labels=["0", "largest"])
        colours.ax.tick_params(labelsize=SMALL)
        colours.set_label(bar, fontsize=TEXT)
    return figure


def _draw_tile(canvas: Axes, left: float, bottom: float, tile: Tile) -> None:
    height, width = (_TILE / 2 * side / max(tile.pixels.shape[:2]) for side in tile.pixels.shape[:2])
    x, y = left + _TILE / 2, bottom + _TILE / 2
    canvas.imshow(tile.pixels, extent=(x - width, x + width, y - height, y + height))
    edge, line_width = (tile.colour, 2.0) if tile.colour else ("0.6", 0.5)
    canvas.add_patch(Rectangle((left, bottom), _TILE, _TILE, fill=False, edgecolor=edge, linewidth=line_width))
    for number, line in enumerate(reversed(tile.lines)):
        place = left + _TILE / 2, bottom + _TILE + 0.045 + number * _LINE
        canvas.text(*place, line, fontsize=TEXT, color=tile.colour or "black", ha="center", parse_math=False)


def _wrapped(line: str) -> list[str]:
    """Lines that are as wide as a tile, after spaces where they can; the middle of a text that is too long for them is
    cut.
    """
    for most in range(_MAX_LINES * LINE_CHARACTERS, 0, -1):
        parts = textwrap.wrap(shorten(line, most), LINE_CHARACTERS) or [""]
        if len(parts) <= _MAX_LINES:
            break
    return parts


def folded(rows: Sequence[Sequence[Tile]]) -> list[Sequence[Tile]]:
    """Wrap rows of equal length that are too long for the page: the first part of each row, then the second, ..."""
    return [part for parts in zip(*(lines_of(row, MAX_IMAGES) for row in rows), strict=True) for part in parts]


def lines_of(tiles: Sequence[Tile], most: int) -> list[Sequence[Tile]]:
    """The fewest lines of at most `most` tiles, all of about the same length."""
    length = -(-len(tiles) // -(-len(tiles) // most))
    return [tiles[i : i + length] for i in range(0, len(tiles), length)]
