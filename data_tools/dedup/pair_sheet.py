"""Draws a sheet of image pairs for visual inspection: each test image, and below it its copy."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from data_tools.sources import Reader
from data_tools.sources.listing import printable
from pipeline.base.gallery import Tile, folded, gallery
from pipeline.base.page import png
from pipeline.base.words import shorten
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.loading.decode import DecodeError, decode

_SIDE = 224  # More pixels of an image are not drawn.


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

    def tile(self) -> Tile:
        image = Image.fromarray(self.pixels)
        image.thumbnail((_SIDE, _SIDE))
        return Tile(np.asarray(image), textwrap.wrap(shorten(printable(self.caption), 51), 17))


def draw_pairs(pairs: Sequence[tuple[CaptionedImage, CaptionedImage]]) -> bytes:
    """Returns a PNG of the pairs, each with its two captions."""
    tests, copies = ([image.tile() for image in images] for images in zip(*pairs, strict=True))
    return png(gallery(folded([tests, copies]), "Test images, and below each its copy"), dpi=100)
