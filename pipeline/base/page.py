"""Renders the blocks of a report as Markdown or as one self-contained HTML file."""

import base64
import html
import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """rows: each has as many cells as header; columns of numbers are right-aligned, but not the first. bold: indices of bold rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PngImage:
    """name: file name of the PNG beside the Markdown. about: alternative text."""

    name: str
    about: str
    png: bytes


@dataclass(frozen=True)
class SvgImage:
    """An SVG that becomes part of the HTML. name: its file name beside the Markdown. about: alternative text.

    narrow: another arrangement of the same content, shown instead on windows of less than 640 px; "" shows the first.
    """

    name: str
    about: str
    svg: str
    narrow: str = ""


@dataclass(frozen=True)
class Code:
    """Lines to be copied as they are."""

    text: str


Block = Heading | Paragraph | Table | PngImage | SvgImage | Code

_STYLE = Path(__file__).with_suffix(".css").read_text("utf-8")
# Columns with a cell of more characters are prose; those without one of more than _SHORT_CELL are never broken on screens.
_LONG_CELL = 40
_SHORT_CELL = 14
# Tables of more columns are printed in small type.
_MANY_COLUMNS = 8
# The beginning of a number, with or without a sign.
_NUMBER = re.compile(r"[-+\u2212<~]?\d")
# Parts of a cell in which lines are not broken: "66.13 % [65.84, 66.42]" has one place to break.
_UNBROKEN = re.compile(r"\[[-+\d., ]*\]| %")


# Colours of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def png(figure: Any, dpi: int | str = "figure", caption: str = "") -> bytes:
    """A Matplotlib figure as a PNG. dpi: pixels an inch; "figure" is what the figure was made with. caption: below all of it."""
    if caption:
        _add_caption(figure, caption)
    # File names may be in a script that the font lacks; its characters are drawn as boxes.
    warnings.filterwarnings("ignore", message="Glyph .* missing from font")
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=dpi)
    return buffer.getvalue()


def _add_caption(figure: Any, caption: str) -> None:
    """Make the figure higher by the lines of the caption; all else keeps its size."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(caption, max(int((width - 0.4) / 0.058), 20))
    foot = 0.125 * (len(lines) + 1)
    below, share = foot / (height + foot), height / (height + foot)
    if (layout := figure.get_layout_engine()) is not None:
        layout.set(rect=(0, below, 1, share))
    for axes in figure.axes if layout is None else ():
        box = axes.get_position()
        axes.set_position((box.x0, below + box.y0 * share, box.width, box.height * share))
    figure.set_size_inches(width, height + foot)
    figure.text(0.2 / width, below / 2, "\n".join(lines), fontsize=7, color="0.35", va="center", parse_math=False)


def style_axes(axes: Any, grid: str = "both") -> None:
    """Give Matplotlib axes the look of all figures. grid: of the values of "x", "y" or "both"."""
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(to: Any, *lines: Any, **look: Any) -> None:
    """Give Matplotlib axes, or a figure, a legend without a frame, in which names are not read as formulas."""
    for text in to.legend(*lines, frameon=False, **look).get_texts():
        text.set_parse_math(False)


def report(title: str, blocks: Sequence[Block]) -> dict[str, bytes | str | None]:
    """The files of a report by name: as Markdown, as HTML, and the pictures."""
    pictures = {block.name: block.png for block in blocks if isinstance(block, PngImage)}
    pictures |= {block.name: block.svg.encode() for block in blocks if isinstance(block, SvgImage)}
    return {**pictures, "report.md": markdown(title, blocks), "report.html": single_file(title, blocks)}


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The report as Markdown, which refers to its pictures as files in the same folder."""
    parts = [f"# {title}"]
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"## {block.text}")
            case Paragraph():
                parts.append(block.text)
            case PngImage() | SvgImage():
                parts.append(f"![{block.about}]({block.name})")
            case Code():
                parts.append(f"```\n{block.text}\n```")
            case Table():
                rows = [
                    [f"**{cell}**" if number in block.bold and cell else cell for cell in row]
                    for number, row in enumerate(block.rows)
                ]
                columns = [[row[i] for row in block.rows] for i in range(1, len(block.header))]
                rule = ["---", *("---:" if _holds_numbers(column) else "---" for column in columns)]
                lines = [block.header, rule, *rows]
                cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
                parts.append("\n".join("| " + " | ".join(line) + " |" for line in cells))
    return "\n\n".join(parts) + "\n"


def single_file(title: str, blocks: Sequence[Block]) -> str:
    """The report as one HTML file with embedded pictures, for desktops, phones and paper."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"<h2>{html.escape(block.text)}</h2>")
            case Paragraph():
                parts.append(f"<p>{html.escape(block.text)}</p>")
            case PngImage():
                data = base64.b64encode(block.png).decode()
                parts.append(
                    f'<div class="box"><img alt="{html.escape(block.about)}" src="data:image/png;base64,{data}"></div>'
                )
            case SvgImage():
                parts.append(f'<div class="box wide{" has-narrow" if block.narrow else ""}">{block.svg}</div>')
                if block.narrow:
                    parts.append(f'<div class="box narrow">{block.narrow}</div>')
            case Code():
                parts.append(f"<pre>{html.escape(block.text)}</pre>")
            case Table():
                looks = [_look(name, [row[i] for row in block.rows]) for i, name in enumerate(block.header)]
                header = "".join(map(_html_cell, ["th"] * len(looks), block.header, looks))
                rows = "".join(
                    f"<tr{' class=bold' if number in block.bold else ''}>"
                    + "".join(map(_html_cell, ["td"] * len(looks), row, looks))
                    + "</tr>\n"
                    for number, row in enumerate(block.rows)
                )
                many = " class=many" if len(block.header) > _MANY_COLUMNS else ""
                table = f"<table{many}><thead><tr>{header}</tr></thead><tbody>\n{rows}</tbody></table>"
                parts.append(f'<div class="box" tabindex="0">{table}</div>')  # Focused, it scrolls by the arrow keys.
    # The empty icon keeps browsers from asking for favicon.ico, whose absence is an error in their console.
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _holds_numbers(cells: Sequence[str]) -> bool:
    """Whether most cells of a column begin as a number does, not counting empty ones and dashes."""
    filled = [cell for cell in cells if cell.strip(" -\u2013")]
    return 2 * sum(_NUMBER.match(cell) is not None for cell in filled) >= len(filled)


def _look(header: str, cells: Sequence[str]) -> str:
    """The class of a column in the style sheet; "" is none."""
    longest = max(map(len, cells), default=0)
    if longest > _LONG_CELL:
        return "text"
    is_short = max(longest, *map(len, header.split()), 0) <= _SHORT_CELL
    if _holds_numbers(cells):
        return "short" if is_short else ""
    return "word" if is_short else "words"


def _html_cell(tag: str, text: str, look: str) -> str:
    """look: of the column, see `_look`."""
    shown = _UNBROKEN.sub(lambda part: part[0].replace(" ", "\u00a0"), text)
    return f"<{tag}{f' class={look}' if look else ''}>{html.escape(shown)}</{tag}>"
