"""Renders reports as Markdown and as one self-contained HTML file, by jinja2 templates; and the look of all figures.

A report is a template that calls the macros of templates/html.j2 and markdown.j2, or a list of blocks.
"""

import base64
import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class PngImage:
    """name: file name of the PNG beside the Markdown. about: alternative text."""

    name: str
    about: str
    png: bytes


@dataclass(frozen=True)
class Table:
    """rows: each has as many cells as header; columns of numbers are right-aligned, but not the first, which may have
    pictures. bold: indices of bold rows.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str | PngImage]]
    bold: frozenset[int] = frozenset()

    @property
    def numeric(self) -> list[bool]:
        """Whether most cells of each column begin like a number, not counting empty ones and dashes."""
        texts = [[cell if isinstance(cell, str) else "" for cell in row] for row in self.rows]
        filled = [[row[i] for row in texts if row[i].strip(" -\u2013")] for i in range(len(self.header))]
        return [2 * sum(map(bool, map(_NUMBER.match, cells))) >= len(cells) for cells in filled]


@dataclass(frozen=True)
class Code:
    """Lines to be copied as they are."""

    text: str


Block = Heading | Paragraph | Table | PngImage | Code

_TEMPLATES = Path(__file__).parent / "templates"
# The beginning of a number, with or without a sign.
_NUMBER = re.compile(r"[-+\u2212<~]?\d")
# Colours of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_FILTERS = {
    "base64": lambda content: base64.b64encode(content).decode(),
    "cell": lambda text: text.replace("|", "\\|").replace("\n", " "),
    "count": lambda number: f"{number:,}",
    "words": lambda text: type(text)(" ".join(text.split())),  # Escaped text stays escaped.
}


def png(figure: Any, dpi: int | str = "figure", caption: str = "") -> bytes:
    """A Matplotlib figure as a PNG. dpi: pixels an inch; "figure" is what the figure was made with. caption: below all
    of it.
    """
    if caption:
        width = figure.get_size_inches()[0]
        text = textwrap.fill(caption, max(int((width - 0.4) / 0.058), 20))
        figure.text(0.2 / width, 0, text, fontsize=7, color="0.35", va="top", parse_math=False)
    # File names may be in a script that the font lacks; its characters are drawn as boxes.
    warnings.filterwarnings("ignore", message="Glyph .* missing from font")
    # "tight": all that is drawn, so the caption, too, which is below the figure.
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=dpi, bbox_inches="tight" if caption else None)
    return buffer.getvalue()


def style_axes(axes: Any, grid: str = "both") -> None:
    """Give Matplotlib axes the look of all figures. grid: of the values of "x", "y" or "both"."""
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(to: Any, *lines: Any, **look: Any) -> None:
    """Give Matplotlib axes, or a figure, a legend without a frame, in which names are not read as formulas."""
    for text in to.legend(*lines, frameon=False, **look).get_texts():
        text.set_parse_math(False)


def render(
    template: Path, title: str, pictures: Sequence[PngImage] = (), parts: Path = _TEMPLATES, **values: Any
) -> dict[str, bytes | str | None]:
    """The files of a report by name: the pictures, and the template as Markdown and as HTML, for desktops, phones and
    paper. parts: folder of templates that it includes.
    """
    values |= {"title": title, "pictures": pictures}
    return {
        **{picture.name: picture.png for picture in pictures},
        "report.md": _fill(template, "markdown.j2", values, parts),
        "report.html": _fill(template, "html.j2", values, parts),
    }


def _fill(template: Path, macros: str, values: dict[str, Any], parts: Path = _TEMPLATES) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, parts, _TEMPLATES]),
        autoescape=macros == "html.j2",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    environment.globals |= {"zip": zip, "Table": Table, "style": (_TEMPLATES / "page.css").read_text("utf-8")}
    text = environment.get_template(template.name).render(format=macros, **values)
    return re.sub(r"\n{3,}", "\n\n", text)


def report(title: str, blocks: Sequence[Block]) -> dict[str, bytes | str | None]:
    """Like `render`, for blocks."""
    pictures = [block for block in blocks if isinstance(block, PngImage)]
    cells = [cell for block in blocks if isinstance(block, Table) for row in block.rows for cell in row]
    pictures += [cell for cell in cells if isinstance(cell, PngImage)]
    return render(_TEMPLATES / "blocks.j2", title, pictures, blocks=blocks)


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The report.md of blocks."""
    return _fill(_TEMPLATES / "blocks.j2", "markdown.j2", {"title": title, "blocks": blocks})
