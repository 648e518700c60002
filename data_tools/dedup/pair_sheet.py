"""Draws a sheet of image pairs for visual inspection: the test image on the left, the copy on the right."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_tools.sources import Reader
from data_tools.sources.listing import printable
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.loading.decode import DecodeError, decode

_COLUMNS, _SIDE, _GAP, _LINE = 6, 112, 12, 14


@dataclass(frozen=True)
class CaptionedImage:
    """An image with its caption. pixels: (H, W, 3) uint8."""

    pixels: np.ndarray
    caption: str

    @classmethod
    def read(cls, dataset: Dataset, row: dict[str, Any], caption: str) -> "CaptionedImage":
        """Read an image of a data set; a grey one in place of a file that no decoder reads. row: shard, offset and size, from the manifest."""
        with Reader() as reader:
            path = dataset.shard_path(dataset.shards()[row["shard"]].name)
            data = reader.read(str(path), row["offset"], row["size"], packed=0)
        try:
            return cls(decode(data), caption)
        except DecodeError:  # Equal files are copies, also damaged ones.
            return cls(np.full((_SIDE, _SIDE, 3), 128, np.uint8), caption)


def draw_pairs(pairs: Sequence[tuple[CaptionedImage, CaptionedImage]]) -> bytes:
    """Returns a PNG of the pairs, row by row, each with its two captions below."""
    cell_width, cell_height = 2 * _SIDE + _GAP, _SIDE + 2 * _LINE + _GAP
    num_columns = min(_COLUMNS, len(pairs))
    num_rows = -(-len(pairs) // num_columns)
    sheet = Image.new("RGB", (num_columns * cell_width, num_rows * cell_height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(10)
    for number, pair in enumerate(pairs):
        x, y = number % num_columns * cell_width, number // num_columns * cell_height
        for side, picture in enumerate(pair):
            image = Image.fromarray(picture.pixels)
            scale = _SIDE / max(image.size)
            image = image.resize((max(round(image.width * scale), 1), max(round(image.height * scale), 1)))
            sheet.paste(image, (x + side * _SIDE + (_SIDE - image.width) // 2, y + (_SIDE - image.height) // 2))
        for line, picture in enumerate(reversed(pair)):
            draw.text(
                (x + 2, y + _SIDE + line * _LINE), _shortened(printable(picture.caption), draw, font), "black", font
            )
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _shortened(text: str, draw: ImageDraw.ImageDraw, font: Any) -> str:
    """Shorten in the middle, because keys differ at their end."""
    kept = len(text)
    shown = text
    while draw.textlength(shown, font) > 2 * _SIDE:
        kept -= 1
        shown = f"{text[: kept // 3]}…{text[len(text) - (kept - kept // 3) :]}"
    return shown
