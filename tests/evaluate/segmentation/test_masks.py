"""Masks: what their pixels mean, in every kind of file, and what is refused."""

import io

import numpy as np
import pytest
from PIL import Image

from pipeline.base.errors import UserError
from pipeline.data.loading.decode import DecodeError
from pipeline.evaluate.segmentation.pairs import (
    NO_CLASS,
    decode_mask,
    find_classes,
    parse_value,
    value_text,
)

NUMBERS = np.array([[0, 1, 2], [200, 1, 255]], np.uint8)


def stored(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def with_palette() -> Image.Image:
    image = Image.fromarray(NUMBERS).convert("P")
    image.putdata(NUMBERS.ravel().tolist())
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    return image


@pytest.mark.parametrize(
    "data",
    [
        stored(Image.fromarray(NUMBERS)),
        stored(Image.fromarray(NUMBERS), "TIFF"),
        stored(Image.fromarray(NUMBERS.astype(np.uint16))),
        stored(Image.fromarray(NUMBERS.astype(np.int32)), "TIFF"),
        stored(with_palette()),
        stored(with_palette(), transparency=0),
        stored(Image.merge("LA", (Image.fromarray(NUMBERS), Image.fromarray(NUMBERS // 2)))),
    ],
)
def test_a_mask_of_numbers_is_read_as_it_is(data: bytes) -> None:
    found = decode_mask(data)
    assert found.dtype == np.int32
    assert found.tolist() == NUMBERS.tolist()


def test_numbers_of_more_than_8_bits_and_two_colours_of_one_bit() -> None:
    wide = np.array([[0, 1000], [40_000, 65_535]], np.uint16)
    assert decode_mask(stored(Image.fromarray(wide))).tolist() == wide.tolist()
    assert decode_mask(stored(Image.fromarray(np.array([[True, False]])))).tolist() == [[1, 0]]


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_colour_is_a_value(mode: str) -> None:
    colours = np.array([[[255, 128, 0], [0, 0, 7]]], np.uint8)
    found = decode_mask(stored(Image.fromarray(colours).convert(mode)))
    assert [value_text(value) for value in found[0].tolist()] == ["#ff8000", "#000007"]
    assert [parse_value("#ff8000"), parse_value("#000007")] == found[0].tolist()
    classes = find_classes(found[0].tolist(), [])
    assert classes.colours().tolist() == [[0, 0, 7], [255, 128, 0]]
    assert parse_value("7") != parse_value("#000007"), "a number is no colour"


def test_what_is_no_mask_is_refused() -> None:
    with pytest.raises(DecodeError, match="JPEG may not keep the values of a mask: give PNG files"):
        decode_mask(stored(Image.fromarray(NUMBERS), "JPEG"))
    with pytest.raises(DecodeError, match="numbers or colours, not Pillow's mode F"):
        decode_mask(stored(Image.fromarray(NUMBERS.astype(np.float32)), "TIFF"))
    with pytest.raises(DecodeError, match="values from -1 to 5"):
        decode_mask(stored(Image.fromarray(np.array([[-1, 5]], np.int32)), "TIFF"))
    with pytest.raises(DecodeError):
        decode_mask(b"no image")


def test_classes_are_the_values_that_occur() -> None:
    classes = find_classes({0, 3, 7, 255}, ["255", "0"])
    assert (classes.values.tolist(), classes.names) == ([3, 7], ["3", "7"])
    numbers = classes.numbers(np.array([[0, 3, 7], [255, 8, 2]], np.int32))
    assert numbers.dtype == np.int16
    assert numbers.tolist() == [[NO_CLASS, 0, 1], [NO_CLASS, NO_CLASS, NO_CLASS]]
    assert len({tuple(colour) for colour in find_classes(range(150), []).colours().tolist()}) == 150


def test_too_few_and_too_many_classes() -> None:
    with pytest.raises(UserError, match=r"values 0, 255, and ignore = 255 leaves 1 .*set ignore=\[\]"):
        find_classes({0, 255}, ["255"])
    assert len(find_classes({0, 255}, []).values) == 2
    with pytest.raises(
        UserError, match="1,001 different values: these are photographs, or masks whose borders were smoothed"
    ):
        find_classes(range(1001), [])
    assert find_classes({0, parse_value("#0000ff"), parse_value("#00ff00")}, ["0"]).names == [
        "#0000ff",
        "#00ff00",
    ]
