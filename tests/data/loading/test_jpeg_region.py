"""A region decoded alone equals the region of the whole image, bit for bit; unsupported files are decoded whole."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from pipeline.data.loading import jpeg_region
from pipeline.data.loading.decode import DecodeError, decode
from pipeline.data.loading.jpeg_region import Region

Encode = Callable[..., bytes]
SUBSAMPLINGS = ["444", "422", "420", "440", "411", "gray"]
needs_library = pytest.mark.skipif(jpeg_region._LIBRARY is None, reason="the extra `fast` is not installed")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def regions(height: int, width: int, count: int, seed: int = 0) -> list[Region]:
    """Some regions of an image of this size, including its corners and the whole image."""
    draw = random.Random(seed)
    found = [(0, 0, height, width), (0, 0, 1, 1), (height - 1, width - 1, 1, 1)]
    for _ in range(count):
        h, w = draw.randint(1, height), draw.randint(1, width)
        found.append((draw.randint(0, height - h), draw.randint(0, width - w), h, w))
    return found


def check(data: bytes, count: int = 30, alone: bool | None = None) -> None:
    """decode(data, region) is that part of decode(data). alone: whether the library must (not) decode the region
    alone.
    """
    whole = decode(data)
    if alone is not None:
        part = jpeg_region.decode(data, lambda h, w: (0, 0, 1, 1))
        assert (part is not None) == (alone and jpeg_region._LIBRARY is not None)
    for region in regions(*whole.shape[:2], count):
        top, left, height, width = region
        expected = whole[top : top + height, left : left + width]
        asked = []
        found = decode(data, lambda h, w, region=region, asked=asked: asked.append((h, w)) or region)
        assert set(asked) == {whole.shape[:2]}
        assert np.array_equal(found, expected), region


def of_subsampling(subsampling: str) -> Iterator[bytes]:
    # 97: one pixel behind a block border; 8 and 40: exactly on one.
    for size in [(97, 131), (64, 40), (8, 8), (33, 5), (3, 70), (1, 1), (2, 1)]:
        pixels = np.ascontiguousarray(noise(*size)[..., :1]) if subsampling == "gray" else noise(*size)
        colours = "GRAY" if subsampling == "gray" else "RGB"
        yield simplejpeg.encode_jpeg(pixels, 90, colours, colorsubsampling=subsampling)


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_regions_of_every_subsampling(subsampling: str) -> None:
    for data in of_subsampling(subsampling):
        check(data, alone=True)


def test_columns_at_the_edges_of_a_region() -> None:
    # Every left and right edge around block borders, where upsampled chroma mixes with its neighbours.
    for subsampling in ("422", "420", "411"):
        data = simplejpeg.encode_jpeg(noise(20, 100), 90, colorsubsampling=subsampling)
        whole = decode(data)
        for left in range(0, 68):
            for right in (left + 1, left + 2, 69, 70, 71, 72, 98, 99, 100):
                found = decode(data, lambda h, w, left=left, right=right: (5, left, 9, right - left))
                assert np.array_equal(found, whole[5:14, left:right]), (subsampling, left, right)


def test_other_kinds_are_decoded_whole(encode: Encode) -> None:
    check(encode(noise(40, 50), "JPEG", progressive=True), alone=False)
    check(encode(Image.fromarray(noise(40, 50)).convert("CMYK"), "JPEG"), alone=False)
    check(encode(noise(40, 50), "JPEG") + b"something behind it", alone=False)
    for format in ("PNG", "WEBP", "GIF", "BMP"):
        check(encode(Image.fromarray(noise(40, 50)), format), count=5)


def test_restart_markers_and_a_thumbnail(encode: Encode) -> None:
    check(encode(noise(90, 70), "JPEG", restart_marker_blocks=3), alone=True)
    thumbnail = Image.Exif()
    thumbnail[0x0112] = 6
    thumbnail.get_ifd(0x8769)[0x927C] = encode(noise(16, 16), "JPEG")
    check(encode(noise(90, 70), "JPEG", exif=thumbnail), alone=True)


def test_a_cut_file_is_refused_wherever_the_region_is() -> None:
    data = simplejpeg.encode_jpeg(noise(200, 100), 90)
    for size in (len(data) // 2, len(data) - 200, len(data) - 2, len(data) - 1, 400, 10):
        with pytest.raises(DecodeError):
            decode(data[:size], lambda h, w: (0, 0, 16, 16))


@needs_library
def test_damage_is_found_down_to_the_last_row_of_the_region() -> None:
    data = simplejpeg.encode_jpeg(noise(400, 100), 90, colorsubsampling="444")
    middle = len(data) // 2
    spoilt = data[:middle] + b"\xff\xd9" * 50 + data[middle + 100 :]
    with pytest.raises(DecodeError):
        decode(spoilt)
    for bottom in (260, 400):
        with pytest.raises(DecodeError):
            decode(spoilt, lambda h, w, bottom=bottom: (bottom - 10, 0, 10, 100))
    # Damage below the region is not detected, because it is not decoded.
    assert np.array_equal(decode(spoilt, lambda h, w: (0, 0, 150, 100)), decode(data)[:150])


def test_a_bomb_is_refused_before_it_is_decoded(encode: Encode) -> None:
    data = encode(noise(64, 64), "JPEG")
    sof = data.index(b"\xff\xc0")
    bomb = data[: sof + 5] + b"\xff\xdc\xff\xdc" + data[sof + 9 :]
    with pytest.raises(DecodeError, match="pixels are more than"):
        decode(bomb, lambda h, w: (0, 0, 1, 1))
