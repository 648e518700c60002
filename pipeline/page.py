"""Renders the blocks of a report as Markdown or as one self-contained HTML file."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    """rows: each has as many cells as header; all columns but the first are right-aligned. bold: indices of bold rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """name: file name of the PNG beside the Markdown. about: alternative text."""

    name: str
    about: str
    png: bytes


Block = Heading | Paragraph | Table | Picture

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
th { border-bottom: 2px solid #888; }
tr.bold td { font-weight: 600; background: #f4f6f8; }
img { max-width: 100%; }
"""


def png(figure: Any) -> bytes:
    """A Matplotlib figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The report as Markdown, which refers to its pictures as files in the same folder."""
    parts = [f"# {title}"]
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"## {block.text}")
            case Paragraph():
                parts.append(block.text)
            case Picture():
                parts.append(f"![{block.about}]({block.name})")
            case Table():
                rows = [
                    [f"**{cell}**" if number in block.bold and cell else cell for cell in row]
                    for number, row in enumerate(block.rows)
                ]
                lines = [block.header, ["---"] + ["---:"] * (len(block.header) - 1), *rows]
                parts.append("\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def single_file(title: str, blocks: Sequence[Block]) -> str:
    """The report as one HTML file with embedded pictures."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for block in blocks:
        match block:
            case Heading():
                parts.append(f"<h2>{html.escape(block.text)}</h2>")
            case Paragraph():
                parts.append(f"<p>{html.escape(block.text)}</p>")
            case Picture():
                data = base64.b64encode(block.png).decode()
                parts.append(f'<img alt="{html.escape(block.about)}" src="data:image/png;base64,{data}">')
            case Table():
                header = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.header)
                rows = "".join(
                    f"<tr{' class=bold' if number in block.bold else ''}>"
                    + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
                    + "</tr>\n"
                    for number, row in enumerate(block.rows)
                )
                parts.append(f"<table><thead><tr>{header}</tr></thead><tbody>\n{rows}</tbody></table>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
