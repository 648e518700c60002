"""Decoding: every format that raw data sets contain, and bytes that are not an image."""

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from pipeline.data.loading.decode import DecodeError, check_end, decode, decode_with_orientation, inspect

Encode = Callable[..., bytes]
# Three blocks of a colour that JPEG keeps within a few levels, so that all orientations can be distinguished.
CORNERS = np.zeros((16, 32, 3), np.uint8)
CORNERS[:, :16], CORNERS[:8, 16:], CORNERS[8:, 16:] = (250, 20, 20), (20, 250, 20), (20, 20, 250)
# How a viewer transforms stored pixels (EXIF 2.3, tag 0x0112), in plain numpy.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)


def check(found: np.ndarray, expected: np.ndarray, within: int = 0) -> None:
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= within


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def test_jpeg_is_what_pillow_says(encode: Encode, noise: np.ndarray) -> None:
    for subsampling in (0, 1, 2):
        data = encode(noise, "JPEG", quality=90, subsampling=subsampling)
        check(decode(data), np.asarray(Image.open(io.BytesIO(data))), within=1)
    data = encode(noise, "JPEG", progressive=True)
    check(decode(data), np.asarray(Image.open(io.BytesIO(data))), within=1)


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})])
def test_lossless_formats(format: str, options: dict[str, object], encode: Encode, noise: np.ndarray) -> None:
    check(decode(encode(noise, format, **options)), noise)


def test_the_bytes_count_and_not_the_name(encode: Encode, noise: np.ndarray) -> None:
    # A PNG renamed to .jpg: decode() does not use the name.
    check(decode(encode(noise, "PNG")), noise)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_grayscale_has_three_equal_channels(format: str, encode: Encode, noise: np.ndarray) -> None:
    data = encode(noise[..., 0], format)
    grey = np.asarray(Image.open(io.BytesIO(data)))
    check(decode(data), np.repeat(grey[..., None], 3, axis=2), within=1 if format == "JPEG" else 0)


def test_cmyk(encode: Encode) -> None:
    cyan, half_black = np.full((8, 8, 4), (255, 0, 0, 0), np.uint8), np.full((8, 8, 4), (0, 0, 0, 128), np.uint8)
    for pixels, colour in ((cyan, (0, 255, 255)), (half_black, (127, 127, 127))):
        data = encode(Image.fromarray(pixels, "CMYK"), "JPEG", quality=95)
        check(decode(data), np.broadcast_to(np.uint8(colour), (8, 8, 3)), within=2)


def test_sixteen_bits_become_eight(encode: Encode) -> None:
    deep = np.array([[0, 128, 257], [32768, 65278, 65535]], np.uint16)
    eight = np.uint8([[0, 0, 1], [128, 254, 255]])
    for format in ("PNG", "TIFF"):
        check(decode(encode(deep, format)), np.repeat(eight[..., None], 3, axis=2))


def test_a_dark_sixteen_bit_image_stays_dark(encode: Encode) -> None:
    # 16-bit even if no value is above 255.
    check(decode(encode(np.full((3, 3), 200, np.uint16), "PNG")), np.full((3, 3, 3), 1, np.uint8))


def tiff(values: np.ndarray, bits: int, photometric: int) -> bytes:
    """A TIFF of one channel as scanners and microscopes write it: Pillow writes neither 12 bits nor white as zero."""
    height, width = values.shape
    if bits == 12:
        number = int("".join(f"{value:012b}" for value in values.flat), 2)
        data = number.to_bytes(values.size * 12 // 8, "big")
    else:
        data = values.astype("<u2").tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_twelve_bits_become_eight() -> None:
    # Read as 16 bits, white would be 16 of 255.
    deep = np.array([[0, 16], [2056, 4079], [4094, 4095]])
    check(decode(tiff(deep, 12, 1)), np.repeat(np.uint8([[0, 1], [128, 254], [255, 255]])[..., None], 3, axis=2))


def test_white_is_zero_in_a_sixteen_bit_tiff() -> None:
    deep = np.array([[0, 257, 65535]])
    check(decode(tiff(deep, 16, 0)), np.repeat(np.uint8([[255, 254, 0]])[..., None], 3, axis=2))
    check(decode(tiff(deep, 16, 1)), np.repeat(np.uint8([[0, 1, 255]])[..., None], 3, axis=2))


def test_alpha_is_dropped(encode: Encode, noise: np.ndarray) -> None:
    check(decode(encode(np.dstack([noise, np.full(noise.shape[:2], 7, np.uint8)]), "PNG")), noise)
    check(decode(encode(noise[..., :2].copy(), "PNG")), np.repeat(noise[..., :1], 3, axis=2))  # grey + alpha


def test_palette_with_transparency(encode: Encode) -> None:
    image = Image.fromarray(np.uint8([[0, 1], [2, 0]]), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    expected = np.uint8([[[10, 20, 30], [40, 50, 60]], [[70, 80, 90], [10, 20, 30]]])
    check(decode(encode(image, "PNG", transparency=1)), expected)
    check(decode(encode(image, "PNG", transparency=bytes([0, 128, 255]))), expected)


def test_black_and_white(encode: Encode) -> None:
    bits = np.array([[True, False], [False, True]])
    check(decode(encode(Image.fromarray(bits), "PNG")), np.repeat(np.uint8(bits * 255)[..., None], 3, axis=2))


def test_first_frame_of_an_animation(encode: Encode) -> None:
    frames = [Image.new("RGB", (5, 4), colour) for colour in ("red", "blue", "white")]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
        check(decode(data), np.full((4, 5, 3), (255, 0, 0), np.uint8))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP"])
def test_one_pixel(format: str, encode: Encode) -> None:
    check(decode(encode(np.full((1, 1, 3), 200, np.uint8), format)), np.full((1, 1, 3), 200, np.uint8), within=2)


@pytest.mark.parametrize("orientation", list(UPRIGHT))
def test_pictures_are_turned_upright(orientation: int, encode: Encode) -> None:
    data = encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(orientation))
    check(decode(data), UPRIGHT[orientation](CORNERS), within=6)
    assert decode_with_orientation(data)[1] == orientation
    # Pillow stores the tag of each of these formats elsewhere.
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        found = decode(encode(CORNERS, format, exif=exif(orientation), **options))
        check(found, UPRIGHT[orientation](CORNERS))
    deep = encode(CORNERS[..., 0].astype(np.uint16) * 257, "PNG", exif=exif(orientation))
    check(decode(deep), UPRIGHT[orientation](np.repeat(CORNERS[..., :1], 3, axis=2)))


def test_exif_is_found_wherever_it_stands(encode: Encode) -> None:
    data = encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(3), icc_profile=b"x" * 3000, comment=b"y" * 50)
    assert data.index(b"Exif") > 0
    segment = b"\xff\xec\x00\x06ab\xff\xda"  # An application's segment that contains what looks like a start of scan.
    for file in (data, data[:2] + segment + data[2:], data[:2] + b"\xff" + data[2:]):
        check(decode(file), UPRIGHT[3](CORNERS), within=6)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_do_not_exist_change_nothing(orientation: int, encode: Encode) -> None:
    check(decode(encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(orientation))), CORNERS, within=6)


def test_exif_that_makes_no_sense_costs_nothing(encode: Encode) -> None:
    whole = encode(CORNERS, "JPEG", quality=95, subsampling=0)
    size = struct.pack(">H", len(b"Exif\0\0junk") + 2)
    not_tiff = whole[:2] + b"\xff\xe1" + size + b"Exif\0\0junk" + whole[2:]
    assert whole.index(b"JFIF") > 0
    density = whole.replace(
        b"JFIF\0\1\1\0", b"JFIF\0\1\1\1", 1
    )  # Pillow reads EXIF when it opens those without a resolution.
    assert density != whole
    files = [not_tiff, not_tiff[:2] + density[2:20] + not_tiff[2:16] + density[20:]]
    # The number as BYTE, ASCII and UNDEFINED instead of SHORT.
    short = encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(6))
    for kind in (1, 2, 7):
        entry = struct.pack("<HH", 0x0112, 3) if b"II*\0" in short else struct.pack(">HH", 0x0112, 3)
        assert entry in short
        files.append(short.replace(entry, entry[:2] + struct.pack("<H" if b"II*\0" in short else ">H", kind)))
    for file in files:
        check(decode(file), CORNERS, within=6)
        check(decode(file, lambda height, width: (0, 0, height, width)), CORNERS, within=6)
        assert inspect(file, decode_all=True)[0] == "jpg"


def test_exif_behind_long_segments_is_found(encode: Encode) -> None:
    data = encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(3))
    long = b"\xff\xe2" + struct.pack(">H", 65000) + b"x" * 64998
    check(decode(data[:2] + long + long + data[2:]), UPRIGHT[3](CORNERS), within=6)


def test_pixels_of_no_known_range_are_refused(encode: Encode) -> None:
    for values in (CORNERS[..., 0] / np.float32(255), CORNERS[..., 0].astype(np.float32)):
        with pytest.raises(DecodeError, match="floating-point"):
            decode(encode(Image.fromarray(values), "TIFF"))
    for values in (np.int32([[0, 65536]]), np.int32([[-1, 9]])):
        with pytest.raises(DecodeError, match="range is unknown"):
            decode(encode(Image.fromarray(values), "TIFF"))


def broken(encode: Encode) -> dict[str, bytes]:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    jpeg, png = encode(pixels, "JPEG"), encode(pixels, "PNG")
    # A frame header that claims 65500 x 65500 pixels, which are 12 GB.
    sof = jpeg.index(b"\xff\xc0")
    return {
        "nothing": b"",
        "text": b"this is no picture, but a page that says 404\n" * 20,
        "zeros": bytes(1000),
        "start of a JPEG": b"\xff\xd8",
        "half a JPEG": jpeg[: len(jpeg) // 2],
        "JPEG without its last rows": jpeg[:-200],
        "half a JPEG with EXIF": encode(pixels, "JPEG", exif=exif(6))[:2000],
        "half a PNG": png[: len(png) // 2],
        "a PNG with a flipped bit": png[:500] + bytes([png[500] ^ 1]) + png[501:],
        "a bomb": jpeg[: sof + 5] + struct.pack(">HH", 65500, 65500) + jpeg[sof + 9 :],
    }


@pytest.mark.parametrize("name", list(broken(lambda *_, **__: b"\xff\xc0" * 3000)))
def test_what_is_no_whole_image_is_refused(name: str, encode: Encode) -> None:
    with pytest.raises(DecodeError) as error:
        decode(broken(encode)[name])
    assert str(error.value)
    assert "\n" not in str(error.value)
    assert " at 0x" not in str(error.value)


@pytest.mark.parametrize(("format", "ext"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["plain", "progressive"])
def test_a_cut_file_has_no_end(format: str, ext: str, options: dict, encode: Encode) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(pixels, format, **options)
    for whole in (data, data + bytes(100), data + data):
        check_end(whole, ext)
    for cut in (1, 3, 20, len(data) // 2, len(data) - 12):
        with pytest.raises(DecodeError, match="cut off: it has no end"):
            check_end(data[:-cut], ext)
    for other in ("GIF", "BMP", "TIFF"):
        check_end(encode(pixels, other), other.lower())


def test_the_end_of_a_thumbnail_is_not_that_of_the_picture(encode: Encode) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    thumbnail = encode(pixels[:8, :8], "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 8) + b"Exif\0\0" + thumbnail
    data = encode(pixels, "JPEG")
    data = data[:2] + segment + data[2:]
    check_end(data, "jpg")
    for cut in (2, 500, len(data) - len(segment) - 30):
        assert b"\xff\xd9" in data[:-cut]
        with pytest.raises(DecodeError, match="no end marker"):
            check_end(data[:-cut], "jpg")


def test_a_file_that_git_lfs_has_not_fetched_is_named_as_such() -> None:
    with pytest.raises(DecodeError, match="a pointer of Git LFS instead of the file; run git lfs pull"):
        decode(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"hevc", b"mif1", b"avif", b"avis"])
def test_a_phone_s_heic_is_named_as_such_whatever_its_extension(brand: bytes) -> None:
    with pytest.raises(DecodeError, match="this format is not read; convert it to JPEG or PNG"):
        decode(b"\0\0\0\x24ftyp" + brand + bytes(20))
