"""Decoding: every format that raw data sets contain, and bytes that are not an image."""

import io
import struct
import zlib
from collections.abc import Callable

import imagecodecs
import numpy as np
import pytest
import tifffile
from heic_files import HEIC
from PIL import Image

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.data.images.stored import LEFT_OUT
from pipeline.data.loading.decode import DecodeError, check_end, decode, exif_orientation, inspect
from pipeline.data.loading.decode import left_out as of_header

Encode = Callable[..., bytes]
# Three blocks of a colour that JPEG keeps within a few levels, so that all orientations can be distinguished.
CORNERS = np.zeros((16, 32, 3), np.uint8)
CORNERS[:, :16], CORNERS[:8, 16:], CORNERS[8:, 16:] = (250, 20, 20), (20, 250, 20), (20, 20, 250)
BEST_AVIF = {"quality": 100, "subsampling": "4:4:4"}
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
    assert found.dtype == expected.dtype
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


@pytest.mark.parametrize(
    ("format", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("PPM", {}), ("JPEG2000", {})],
)
def test_lossless_formats(format: str, options: dict[str, object], encode: Encode, noise: np.ndarray) -> None:
    check(decode(encode(noise, format, **options)), noise)


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


def test_more_than_eight_bits_are_refused_and_no_value_is_scaled(encode: Encode) -> None:
    deep = np.array([[0, 128, 257], [32768, 65278, 65535]], np.uint16)
    for format in ("PNG", "TIFF", "PPM", "JPEG2000"):
        data = encode(deep, format)
        with pytest.raises(DecodeError, match="uint16"):
            decode(data)
        check(decode(data, pixels=Pixels.full_range(("x-ray",), "uint16")), deep[..., None])


def test_headers(encode: Encode, noise: np.ndarray) -> None:
    rgba, file = np.dstack([noise, noise[..., 0]]), io.BytesIO()
    tifffile.imwrite(file, np.zeros((12, 20, 5), np.uint16), photometric="minisblack", planarconfig="contig")
    twice = encode(Image.fromarray(noise), "GIF", save_all=True, append_images=[Image.fromarray(255 - noise)])
    deep, bands = (Pixels.full_range(tuple(names), "uint16") for names in ("abc", "abcde"))
    files = [
        (encode(rgba, "PNG"), RGB8, ("png", 20, 12, 3, True, 1, "uint8")),
        (twice, RGB8, ("gif", 20, 12, 3, False, 2, "uint8")),
        (encode(noise[..., 0], "TIFF", tiffinfo={0x0112: 6}), RGB8, ("tiff", 12, 20, 1, False, 1, "uint8")),
        (encode(rgba, "TIFF"), RGB8, ("tiff", 20, 12, 3, True, 1, "uint8")),
        (encode(Image.fromarray(rgba, "CMYK"), "TIFF"), RGB8, ("tiff", 20, 12, 3, False, 1, "uint8")),
        (file.getvalue(), bands, ("tiff", 20, 12, 5, False, 1, "uint16")),
        (imagecodecs.jpegxl_encode(noise), RGB8, ("jxl", 20, 12, 3, False, 1, "uint8")),
        (imagecodecs.jpegxl_encode(rgba.astype("u2")), deep, ("jxl", 20, 12, 3, True, 1, "uint16")),
    ]
    for data, pixels, expected in files:
        decode(data, pixels=pixels)
        found = inspect(data)
        fields = (found.ext, found.width, found.height, found.channels, found.alpha, found.pages, found.type)
        assert fields == expected


def sides(data: bytes, decode_all: bool = True) -> tuple[str, int, int]:
    if decode_all:
        decode(data)
    found = inspect(data)
    return found.ext, found.width, found.height


def test_a_pgm_is_scaled_by_the_white_of_its_header() -> None:
    eight = np.repeat(np.uint8([[0, 51, 255]])[..., None], 3, axis=2)
    file = b"P2 3 1 5 0 1 5"
    check(decode(file), eight)
    assert sides(file, decode_all=True) == ("pgm", 3, 1)
    check(decode(b"P1 3 1 1 0 1"), np.repeat(np.uint8([[0, 255, 0]])[..., None], 3, axis=2))


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
    data = encode(frames[0], "AVIF", save_all=True, append_images=frames[1:], **BEST_AVIF)
    check(decode(data), np.full((4, 5, 3), (255, 0, 0), np.uint8), within=3)
    check(decode(HEIC["two"]), 255 - CORNERS, within=3)  # The second one is marked as the primary one.


@pytest.mark.parametrize("orientation", list(UPRIGHT))
def test_pictures_are_turned_upright(orientation: int, encode: Encode) -> None:
    data = encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(orientation))
    check(decode(data), UPRIGHT[orientation](CORNERS), within=6)
    assert exif_orientation(data) == orientation
    # Pillow stores the tag of each of these formats elsewhere.
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        found = decode(encode(CORNERS, format, exif=exif(orientation), **options))
        check(found, UPRIGHT[orientation](CORNERS))
    deep = CORNERS[..., :1].astype(np.uint16) * 257
    for format in ("PNG", "TIFF"):
        found = decode(encode(deep[..., 0], format, exif=exif(orientation)), pixels=Pixels.full_range(("x",), "uint16"))
        check(found, UPRIGHT[orientation](deep))
    # Pillow writes it as EXIF, and as irot and imir.
    data = encode(CORNERS, "AVIF", exif=exif(orientation), **BEST_AVIF)
    check(decode(data), UPRIGHT[orientation](CORNERS), within=6)
    assert sides(data, decode_all=False) == ("avif", 32, 16)


def test_only_irot_and_imir_turn_an_avif(encode: Encode) -> None:
    """Software that turns the pixels leaves the photograph's metadata: viewers do not look there."""
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    check(decode(encode(CORNERS, "AVIF", xmp=xmp, **BEST_AVIF)), CORNERS, within=6)


def test_heic() -> None:
    upright = UPRIGHT[6](CORNERS)
    assert b"irot" in HEIC["turned"]
    assert b"Exif" in HEIC["turned"]
    check(decode(HEIC["turned"]), upright, within=3)  # Once, although irot and EXIF say so.
    assert sides(HEIC["turned"], decode_all=True) == ("heic", 16, 32)
    assert exif_orientation(HEIC["turned"]) == 1
    check(decode(HEIC["turned"], lambda height, width: (20, 3, 9, 8)), upright[20:29, 3:11], within=3)
    check(decode(HEIC["ten bits"]), CORNERS, within=3)
    check(decode(HEIC["ten bits, grey"]), np.repeat(CORNERS[..., :1], 3, axis=2), within=3)
    tiles = np.empty((96, 100, 3), np.uint8)
    tiles[:64, :64], tiles[:64, 64:], tiles[64:, :64], tiles[64:, 64:] = (
        (250, 20, 20),
        (20, 250, 20),
        (20, 20, 250),
        200,
    )
    check(decode(HEIC["tiles"]), tiles, within=3)


def test_a_damaged_heic_is_an_image_or_refused() -> None:
    """Names in its description that are not UTF-8 crashed the interpreter, by the classes of pi_heif 1.4.0."""
    kind = HEIC["turned"].index(b"\0\0Exif\0")
    check(decode(HEIC["turned"][: kind + 3] + b"\xe9" + HEIC["turned"][kind + 4 :]), UPRIGHT[6](CORNERS), within=3)
    random = np.random.default_rng(0)
    refused = 0
    for data in HEIC.values():
        for _ in range(100):
            mutated = bytearray(data)
            for place in random.integers(len(data), size=3):
                mutated[place] = random.integers(256)
            try:
                assert decode(bytes(mutated)).ndim == 3
            except DecodeError:
                refused += 1
    assert 100 < refused < 500


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", ["tiles", "turned", "avif", "jp2", "pgm"])
def test_a_file_cut_anywhere_is_refused(name: str, share: float, encode: Encode) -> None:
    """libheif leaves green, without an error, the tiles that are missing."""
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    formats = {"avif": "AVIF", "jp2": "JPEG2000"}
    plain = " ".join(map(str, ["P2", 64, 64, 255, *pixels[..., 0].flat])).encode()
    data = HEIC[name] if name in HEIC else plain if name == "pgm" else encode(pixels, formats[name])
    with pytest.raises(DecodeError):
        decode(data[: int(len(data) * share)])
    if name == "pgm":
        return
    ext = inspect(data).ext
    for whole in (data, data + bytes(100), data + b"SEFH" + b"\xff" * 99, data + data):
        check_end(whole, ext)
        if ext != "jp2" or whole is data:  # OpenJPEG refuses bytes after its last box.
            decode(whole)
    with pytest.raises(DecodeError, match="cut off"):
        check_end(data[: int(len(data) * share)], ext)


def test_the_size_in_a_heic_is_bounded_before_it_is_decoded() -> None:
    """A photograph in tiles has its size in its header alone."""
    grid = struct.pack(">BBHH", 1, 1, 100, 96)
    assert grid in HEIC["tiles"]
    for width, height in ((60000, 60000), (14000, 14000)):
        header = struct.pack(">II", 100, 96), struct.pack(">II", width, height)
        bomb = HEIC["tiles"].replace(grid, struct.pack(">BBHH", 1, 1, width, height)).replace(*header)
        with pytest.raises(DecodeError, match=r"more than 178,956,970|exceeds the maximum image size"):
            inspect(bomb)


def test_exif_is_found_wherever_it_stands(encode: Encode) -> None:
    data = encode(CORNERS, "JPEG", quality=95, subsampling=0, exif=exif(3), icc_profile=b"x" * 3000, comment=b"y" * 50)
    assert data.index(b"Exif") > 0
    segment = b"\xff\xec\x00\x06ab\xff\xda"  # An application's segment that contains what looks like a start of scan.
    for file in (data, data[:2] + segment + data[2:], data[:2] + b"\xff" + data[2:]):
        check(decode(file), UPRIGHT[3](CORNERS), within=6)


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
    for file in files:
        check(decode(file), CORNERS, within=6)
        check(decode(file, lambda height, width: (0, 0, height, width)), CORNERS, within=6)
        assert inspect(file).ext == "jpg"


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


def brands(main: bytes, *others: bytes) -> bytes:
    """The first box of a file."""
    return struct.pack(">I", 16 + 4 * len(others)) + b"ftyp" + main + bytes(4) + b"".join(others)


def test_a_phone_s_heic_is_read_whatever_its_main_brand(encode: Encode) -> None:
    assert HEIC["tiles"].startswith(brands(b"heic", b"mif1", b"heic"))
    for names in ((b"heix", b"mif1", b"heix"), (b"mif1", b"miaf", b"heic"), (b"mif1", b"miaf", b"mif1")):
        assert sides(brands(*names) + HEIC["tiles"][24:], decode_all=True) == ("heic", 100, 96)
    avif = encode(CORNERS, "AVIF")
    assert avif[8:12] == b"avif"
    first = int.from_bytes(avif[:4], "big")
    renamed = avif[:8] + b"mif1" + avif[12:16] + b"avif" + avif[20:]
    assert first > 20
    assert sides(renamed, decode_all=True) == ("avif", 32, 16)


def left_out(data: bytes, pixels: Pixels | None) -> list[str]:
    return sorted(of_header(inspect(data), pixels), key=list(LEFT_OUT).index)


def profile(space: bytes, primaries: dict[bytes, tuple[float, ...]]) -> bytes:
    """An ICC profile of these primaries, and of no more than is needed to tell its colours."""
    tags, content = b"", b""
    for name, numbers in primaries.items():
        tags += name + struct.pack(">2I", 132 + 12 * len(primaries) + len(content), 20)
        content += b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * number) for number in numbers))
    body = space.rjust(16, b"\0").ljust(124, b"\0") + struct.pack(">I", len(primaries)) + tags + content
    return struct.pack(">I", 4 + len(body)) + body


# As the profiles of these names have them (adapted to D50).
DISPLAY_P3 = {b"rXYZ": (0.5151, 0.2412, -0.0011), b"gXYZ": (0.2919, 0.6922, 0.0419), b"bXYZ": (0.1572, 0.0666, 0.7841)}
SRGB = {b"rXYZ": (0.4361, 0.2225, 0.0139), b"gXYZ": (0.3851, 0.7169, 0.0971), b"bXYZ": (0.1431, 0.0606, 0.7141)}


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_profiles_other_than_srgb_are_left_out(encode: Encode, noise: np.ndarray, format: str) -> None:
    for space, primaries, expected in (
        (b"RGB ", DISPLAY_P3, ["profile"]),
        (b"RGB ", SRGB, []),
        (b"CMYK", {}, ["profile"]),
        (b"GRAY", {}, []),
    ):
        icc = profile(space, primaries)
        assert left_out(encode(noise, format, icc_profile=icc), RGB8) == expected
        assert left_out(encode(noise, format, icc_profile=icc[:140]), RGB8) == ["profile"] * (space != b"GRAY"), "cut"
        if format == "JPEG":
            ink = Image.fromarray(noise).convert("CMYK")
            assert left_out(encode(ink, format, icc_profile=icc, exif=exif(6)), RGB8) == expected
        if format == "TIFF":
            file = io.BytesIO()
            tifffile.imwrite(file, noise.astype(np.uint16), photometric="rgb", iccprofile=icc)
            assert left_out(file.getvalue(), None) == expected
        if format == "PNG":
            # Pixels may have any bytes, such as the names of chunks.
            pixels = np.frombuffer(b"\0\0\0\x09iCCPeXIf" * 500, ">u2").astype(np.uint16).reshape(50, 60)
            png = imagecodecs.png_encode(pixels, level=0, filter=0)
            assert b"iCCPeXIf" in png
            for compressed, found in ((zlib.compress(icc), expected), (b"damaged", [])):
                content = b"iCCPx\0\0" + compressed
                chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
                assert left_out(png[:33] + chunk + png[33:], None) == found


def test_bits_bands_alpha_and_frames_are_left_out(encode: Encode, noise: np.ndarray) -> None:
    assert left_out(HEIC["ten bits"], RGB8) == left_out(HEIC["ten bits, grey"], RGB8) == ["bits"]
    assert left_out(HEIC["tiles"], RGB8) == left_out(HEIC["turned"], RGB8) == []
    for bits in (8, 10, 12):
        values = noise if bits == 8 else noise.astype(np.uint16) << (bits - 8)
        assert left_out(imagecodecs.avif_encode(values, bitspersample=bits), RGB8) == ["bits"] * (bits > 8)
    file = io.BytesIO()
    np.save(file, np.zeros((20, 30, 5), np.uint16))
    five = Pixels(tuple("abcde"), "uint16", (), (), (), ())
    assert [left_out(file.getvalue(), pixels) for pixels in (RGB8, five, None)] == [["bits", "bands"], [], []]
    transparent = Image.fromarray(noise)
    transparent.putalpha(3)
    for format in ("PNG", "WEBP", "AVIF", "TIFF"):
        assert left_out(encode(transparent, format), RGB8) == ["alpha"]
    frames = encode(Image.fromarray(noise), "GIF", save_all=True, append_images=[Image.fromarray(255 - noise)])
    assert left_out(frames, RGB8) == ["pages"]
