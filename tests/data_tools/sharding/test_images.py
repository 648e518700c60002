"""Images made anew are what their filter says."""

import io

import cv2
import numpy as np
import pytest
import simplejpeg
from heic_files import HEIC
from PIL import Image

from data_tools.sources.images import png, shrink
from pipeline.data.loading.decode import decode


def test_smaller_copies() -> None:
    # Grey noise: JPEG of this quality keeps it to within one level.
    grey = np.random.default_rng(0).integers(0, 256, (150, 220, 1), np.uint8)
    pixels = decode(simplejpeg.encode_jpeg(np.repeat(grey, 3, axis=2), 100))
    data, width, height = shrink(simplejpeg.encode_jpeg(pixels, 100), 100, 100)
    assert (width, height) == (147, 100)
    area = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    assert np.abs(decode(data).astype(int) - area).mean() < 1


def test_a_smaller_copy_of_a_heic_is_an_upright_jpeg() -> None:
    data, width, height = shrink(HEIC["turned"], 8, 100)
    assert data.startswith(b"\xff\xd8\xff")
    assert (width, height) == (8, 16)
    assert np.abs(decode(data)[4, 2].astype(int) - (250, 20, 20)).max() < 9


# The last needs more than one of the blocks that a PNG's bytes are stored in.
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (7, 5, 3), (96, 96, 3), (300, 250, 3)])
def test_pixels_as_png(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    image = Image.open(io.BytesIO(png(pixels)))
    assert image.mode == ("RGB" if len(shape) == 3 else "L")
    assert np.array_equal(np.asarray(image), pixels)
