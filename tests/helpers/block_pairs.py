"""Images made of blocks of colours, with masks that say which block is which, and short settings of a segmentation."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from given_images import images as images_given
from PIL import Image

from pipeline.settings import schema
from pipeline.settings.commands.segment import SegmentConfig

Write = Callable[..., tuple[Path, Path]]
SIDE, NUM_CLASSES = 8, 3
COLOURS = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250]], np.uint8)


def write_block_pairs(folder: Path, number: int, size: tuple[int, int] = (24, 32)) -> tuple[Path, Path]:
    """(folder of images, folder of masks): blocks of 8 px in COLOURS, whose mask is the number of the colour, or 255 in
    the first block.
    """
    images, masks = folder / "images", folder / "masks"
    rng = np.random.default_rng([number, *folder.name.encode()])
    for i in range(number):
        blocks = rng.integers(0, NUM_CLASSES, (size[0] // SIDE, size[1] // SIDE))
        classes = np.kron(blocks, np.ones((SIDE, SIDE), np.int64)).astype(np.uint8)
        pixels = COLOURS[classes]
        classes[:SIDE, :SIDE] = 255
        for place, array in ((images / f"part.{i % 2}", pixels), (masks / f"part.{i % 2}", classes)):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(place / f"{i}.png")
    return images, masks


def settings(images: object = "i", masks: object = "m", *more: str) -> SegmentConfig:
    short = ["steps=30", "train_batch=4", "device=cpu", "lr=0.05"]
    return schema.load(SegmentConfig, None, ["weights=w", images_given(images), f"masks={masks}", *short, *more])
