"""Decodes image files to pixels (H, W, C): libjpeg-turbo for JPEG, Pillow for other 8-bit photographs, and
`pipeline/data/images` for HEIC and images of other types and channels.

Sharding and training use the same functions, so training can read every image that sharding accepted.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import simplejpeg
from PIL import Image

from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.data.images.formats import CODESTREAM, JPEG, check_boxes, format_of, open_image, type_and_colours_of_boxes
from pipeline.data.images.stored import (
    DESCRIPTION,
    MAX_PIXELS,
    MIRRORED,
    UPSIDE_DOWN,
    DecodeError,
    Page,
    StoredImage,
    described_channels,
    has_other_colours,
    reason,
    upright,
)
from pipeline.data.loading import jpeg_region
from pipeline.data.loading.jpeg_region import Region

# Photographs with broken EXIF are common, and Pillow warns about each.
warnings.filterwarnings("ignore", module="PIL")


# Suffixes of files that are treated as images; the format is then determined from the first bytes.
EXTENSIONS = {
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".heic",
    ".heif",
    ".hif",
    ".avif",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".jp2",
    ".j2k",
    ".jpx",
    ".jxl",
    ".npy",
    ".npz",
    ".dcm",
}
# Suffixes of array files, which are not always images.
ARRAYS = {".npy", ".npz"}
# Folders that macOS, Synology's NAS, Linux and Windows add: thumbnails and rescued or deleted files, not samples.
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"}
_EXIF_ORIENTATION = 0x0112
_EXIF, _PROFILE, _START_OF_SCAN = b"Exif\0\0", b"ICC_PROFILE\0", b"\xda"
# JPEG: end-of-image marker. PNG: name and checksum of the last chunk.
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"
# Number of bytes searched for EXIF when the segments of a JPEG are malformed.
_EXIF_SEARCH_BYTES = 65536
_STRIP_PIXELS = 2**20
# Formats that Pillow alone reads, beside 8-bit PNG and PNM.
_PNG_16_BITS = b"\x10"  # Byte 24 of a PNG.
_PHOTOGRAPHS = ("jpg", "gif", "bmp", "webp", "avif")
# Photometric interpretation of a TIFF -> samples of a pixel without extra ones: gray, RGB, palette, CMYK, YCbCr, Lab.
_TIFF_COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
# Modes in which Pillow reads a TIFF of print colours or a palette, which pipeline/data/images does not read.
_COLOURS_OF_PILLOW = ("P", "PA", "CMYK", "LAB", "YCbCr")
# libjpeg errors after which pixels are missing. After others (extraneous bytes, unknown markers, CMYK) Pillow decides.
_SPOILT = ("premature end", "bad huffman code")


def is_image(name: str) -> bool:
    """Whether a file has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name, or one that it lies in, is hidden, or in a folder that a system adds
    (SYSTEM_FOLDERS).
    """
    parts = (part for part in name.split("/") if part not in (".", ".."))
    return any(part.startswith(".") or part in SYSTEM_FOLDERS for part in parts)


def is_visible_image(name: str) -> bool:
    """Whether a file below a folder, or in an archive, is an image that is not hidden; by its name."""
    return is_image(name) and not is_hidden(name)


def _whole_image(height: int, width: int) -> Region:
    return 0, 0, height, width


def decode(data: bytes, choose: Callable[[int, int], Region] = _whole_image, pixels: Pixels = RGB8) -> np.ndarray:
    """Decode an image of one of the EXTENSIONS to (H, W, C) of `pixels.type`, turned upright by its EXIF tag (HEIC and
    AVIF: by irot and imir).

    Values are those of the file. As 8-bit RGB, gray is repeated to three channels; of a photograph, alpha is dropped,
    and the first frame of an animation or the primary image of a HEIC is used. Raises DecodeError for anything that
    cannot be decoded to its last row, and for channels or values that `pixels` cannot hold.

    choose: (height, width) of the upright image -> the region to return, (top, left, height, width). Its pixels are
    those of the whole image, but most JPEGs are decoded only there (see `jpeg_region`), so damage below the region may
    go unnoticed.
    """
    ext = format_of(data)
    if ext == "jpg" and pixels.is_rgb8:
        orientation = exif_orientation(data)
        stored = partial(_stored_region, choose, orientation)
        part = None if choose is _whole_image else jpeg_region.decode(data, stored)
        if part is None:
            part = _decode_jpeg(data, stored)
        if part is not None:
            return upright(part, orientation)
    values = _whole(data, ext, pixels) if pixels.is_rgb8 else stored_image(data).values(pixels)
    top, left, height, width = choose(*values.shape[:2])
    return values[top : top + height, left : left + width]


def _whole(data: bytes, ext: str, pixels: Pixels) -> np.ndarray:
    """uint8 (H, W, 3), upright, of any 8-bit image. pixels: 8-bit RGB of some mean. Raises DecodeError for others."""
    if ext == "tiff":  # First by Pillow, which reads those of 8 bits in half the time.
        with contextlib.suppress(DecodeError):
            return upright(*with_pillow(data, _tiff_to_rgb8))
    stored = _stored(data, ext)
    if stored is None:
        return upright(*with_pillow(data, to_rgb8))
    if ext == "heic":
        stored = replace(stored, type="uint8")  # Read so whatever its bits, which `left_out` names.
    is_8_bit = stored.type in ("uint8", "bool") and stored.channels in (1, 3)
    if stored.lacking:
        return stored.values(pixels)
    if not is_8_bit:
        raise DecodeError(f"{stored.describe()}, where 8-bit gray or RGB is needed")
    values, _ = stored.page(0)
    values = values * np.uint8(255) if stored.type == "bool" else values
    return np.repeat(values, 3, axis=2) if stored.channels == 1 else values


def _stored(data: bytes, ext: str) -> StoredImage | None:
    """The header of an image of one of the formats in pipeline/data/images; None for others, and TIFFs of colours that
    only Pillow reads.
    """
    if ext in _PHOTOGRAPHS or (ext == "png" and data[24:25] != _PNG_16_BITS):
        return None
    try:
        return open_image(data)
    except DecodeError:
        if ext == "tiff" and with_pillow(data, lambda image: image.mode) in _COLOURS_OF_PILLOW:
            return None
        raise


def stored_image(data: bytes) -> StoredImage:
    """Read the header of an image of any format. Raises DecodeError."""
    header = inspect(data)
    if header.read is not _unread:
        return header
    height, width = header.height, header.width
    if with_pillow(data, _orientation) >= 5:
        height, width = width, height

    def read(number: int) -> Page:
        return decode(data)[..., : header.channels], None

    return replace(header, height=height, width=width, read=read)


def left_out(image: StoredImage, pixels: Pixels | None) -> set[str]:
    """Names of `stored.LEFT_OUT` for what a data set of these pixels drops. pixels: None for those of page 1."""
    of_rgb8 = pixels is not None and pixels.is_rgb8
    uses_pages = pixels is not None and not of_rgb8 and image.channels * image.pages == pixels.num_channels
    facts = {
        "alpha": image.alpha,
        "pages": image.pages > 1 and not uses_pages,
        "bits": of_rgb8 and image.type not in ("uint8", "bool"),
        "bands": of_rgb8 and image.channels > 3,
        "channels": bool(image.lacking),
        "profile": image.profile,
    }
    return {what for what, is_so in facts.items() if is_so}


def _jpeg_profile(data: bytes) -> bytes:
    """The first part of a JPEG's colour profile, up to 64 KB; empty without one."""
    end = _start_of_scan(data)
    begin = data.find(_PROFILE, 0, end) + len(_PROFILE) + 2  # The numbers of the part and of all follow.
    return (
        data[begin : min(begin + int.from_bytes(data[begin : begin + 4], "big"), end)]
        if begin > len(_PROFILE) + 1
        else b""
    )


def _header(image: Image.Image, data: bytes, ext: str) -> StoredImage:
    """Header of a photograph that Pillow has opened, with its sides before EXIF rotation."""
    kind, profile = "uint8", has_other_colours(image.info.get("icc_profile"))
    if ext == "avif":
        kind, profile = type_and_colours_of_boxes(data)
    return StoredImage(
        ext,
        image.height,
        image.width,
        1 if image.mode in ("1", "L", "LA") else 3,
        kind,
        _unread,
        pages=1 if image.format == "MPO" else getattr(image, "n_frames", 1),
        alpha=image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info,
        profile=profile,
    )


def _unread(number: int) -> Page:
    raise AssertionError("only the header was read")


def exif_orientation(data: bytes) -> int:
    """EXIF orientation of a JPEG, 1 to 8; 1 of other formats. Raises DecodeError."""
    return with_pillow(data, _orientation) if data.startswith(JPEG) and _may_have_exif(data) else 1


def inspect(data: bytes) -> StoredImage:
    """The header of an image of any kind. Of photographs, its sides are those before EXIF rotation (HEIC: after its
    own). Raises DecodeError; of truncated and damaged files `decode` does, or `check_end`.
    """
    ext = format_of(data)
    if ext == "jpg" and (header := _jpeg_header(data)):
        profile = has_other_colours(_jpeg_profile(data))
        return StoredImage(ext, *header, "uint8", _unread, profile=profile)
    return _stored(data, ext) or with_pillow(data, lambda image: _header(image, data, ext))


def check_end(data: bytes, ext: str) -> None:
    """Detect a truncated file without decoding it: by the end marker of JPEG, PNG and JPEG 2000, or the lengths in
    WebP, HEIC and AVIF.

    Bytes after the end marker (padding, a second image) are ignored. GIF, BMP, TIFF and PPM are not checked. Raises
    DecodeError.
    """
    if ext == "jpg":
        # Segments before the scan do not count: EXIF may hold a complete thumbnail.
        is_complete = data.rfind(_JPEG_END, _start_of_scan(data)) >= 0
    elif ext == "png":
        is_complete = data.rfind(_PNG_END) >= 0
    elif ext in ("jp2", "j2k"):
        is_complete = data.rfind(_JPEG_END, data.find(CODESTREAM)) >= 0
    elif ext in ("heic", "avif"):
        check_boxes(data)
        is_complete = True
    else:
        is_complete = ext != "webp" or len(data) >= 8 + int.from_bytes(data[4:8], "little")
    if not is_complete:
        raise DecodeError("cut off: it has no end" if ext == "webp" else "cut off: it has no end marker")


def _may_have_exif(data: bytes) -> bool:
    """False only for a JPEG that has no EXIF before its scan, or in its first bytes if its segments are malformed."""
    end = _start_of_scan(data)
    is_well_formed = data[end : end + 2] == b"\xff" + _START_OF_SCAN
    return data.find(_EXIF, 0, end if is_well_formed else _EXIF_SEARCH_BYTES) >= 0


def _start_of_scan(data: bytes) -> int:
    """Offset of the first scan of a JPEG, or of the first malformed segment; the number of bytes if the file ends
    before.
    """
    at = 2
    try:
        # Indices instead of slices: sharding by copy calls this for every image, and slices take twice as long.
        while data[at] == 0xFF and data[at + 1] != _START_OF_SCAN[0]:
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    except IndexError:
        return len(data)
    return at


def _jpeg_header(data: bytes) -> tuple[int, int, int] | None:
    """(height, width, channels) by libjpeg-turbo, in a tenth of Pillow's time; None if it cannot read the header."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _refuse_bomb(height, width)
    return height, width, 1 if colours == "Gray" else 3


def _decode_jpeg(data: bytes, choose: Callable[[int, int], Region]) -> np.ndarray | None:
    """Decode the whole JPEG by libjpeg-turbo and return a region as `jpeg_region.decode` does; None if it does not
    support this kind.
    """
    header = _jpeg_header(data)
    if header is None:
        return None
    top, left, height, width = choose(*header[:2])
    try:
        pixels = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    except ValueError as error:
        if any(words in str(error).lower() for words in _SPOILT):
            raise DecodeError(reason(error)) from None
        return None
    return pixels[top : top + height, left : left + width]


def _refuse_bomb(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError(f"{width} x {height} pixels are more than {MAX_PIXELS:,}")


def with_pillow(data: bytes, question):  # type: ignore[no-untyped-def]
    """Returns question(opened image). Raises DecodeError for every failure of Pillow."""
    try:
        with _open_by_pillow(data) as image:
            _refuse_bomb(image.height, image.width)
            return question(image)
    except DecodeError:
        raise
    except Exception as error:  # Pillow's plug-ins raise any type, including struct.error and SyntaxError.
        raise DecodeError(reason(error)) from None


def _open_by_pillow(data: bytes) -> Image.Image:
    if data[4:8] != b"ftyp" or format_of(data) != "avif":
        return Image.open(io.BytesIO(data))
    from PIL import AvifImagePlugin

    check_boxes(data)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # Images are decoded beside each other already.
    return AvifImagePlugin.AvifImageFile(io.BytesIO(data))


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if it is absent or invalid, since the pixels are usable anyway.

    For an AVIF, Pillow sets the tag to what irot and imir say.
    """
    if image.format == "AVIF":
        image.info.pop("xmp", None)  # Pillow would read an orientation there that does not count.
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # As above.
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _tiff_to_rgb8(image: Image.Image) -> tuple[np.ndarray, int]:
    """`to_rgb8` of a TIFF that is an 8-bit photograph by its tags. Raises DecodeError for others, of which Pillow would
    drop bits or bands.
    """
    tags = image.tag_v2  # type: ignore[attr-defined]
    bits, formats, extra = (np.atleast_1d(tags.get(tag, default)) for tag, default in ((258, 1), (339, 1), (338, ())))
    names, _ = described_channels(tags.get(DESCRIPTION))
    has_all_colours = tags.get(277, 1) - len(extra) == _TIFF_COLOURS.get(tags.get(262))
    if names or bits.max() > 8 or (formats != 1).any() or (extra == 0).any() or not has_all_colours:
        raise DecodeError("a TIFF that is not an 8-bit photograph")
    return to_rgb8(image)


def to_rgb8(image: Image.Image) -> tuple[np.ndarray, int]:
    """(pixels as stored, EXIF orientation)."""
    # Pillow rotates a TIFF on loading and drops the tag, so read the orientation after loading.
    image.load()
    orientation = _orientation(image)
    if image.mode == "F" or image.mode.startswith("I"):
        raise DecodeError(f"{image.format} with more than 8 bits a value, where 8-bit gray or RGB is needed")
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    # In strips, since converting a large image at once would take up to 26 bytes a pixel.
    rows = max(_STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        strip = image if bottom - top == image.height else image.crop((0, top, image.width, bottom))
        pixels[top:bottom] = np.asarray(strip.convert("RGB"))
    return pixels, orientation


def _stored_region(choose: Callable[[int, int], Region], orientation: int, height: int, width: int) -> Region:
    """Map the region chosen in the upright image to the stored image: the inverse of `upright`."""
    _refuse_bomb(height, width)
    is_transposed = orientation >= 5
    if is_transposed:
        height, width = width, height
    top, left, part_height, part_width = choose(height, width)
    if orientation in MIRRORED:
        left = width - left - part_width
    if orientation in UPSIDE_DOWN:
        top = height - top - part_height
    return (left, top, part_width, part_height) if is_transposed else (top, left, part_height, part_width)
