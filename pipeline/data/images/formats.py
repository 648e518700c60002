"""Recognises and opens image files by their first bytes, and reads the boxes of HEIC and AVIF (ISO 14496-12)."""

import importlib
import re
import struct

from pipeline.base.words import counted
from pipeline.data.images.stored import DecodeError, StoredImage, has_other_colours, reason

# How a file begins that Git LFS has not fetched yet, as after `git clone` of a data set without git-lfs.
LFS_POINTER = b"version https://git-lfs"
LFS_REASON = "a pointer of Git LFS instead of the file; run git lfs pull"
CODESTREAM = b"\xffO\xffQ"  # Where a JPEG 2000 codestream begins: SOC, then SIZ.
JPEG = b"\xff\xd8\xff"
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
    b"P1": "pbm",
    b"P2": "pgm",
    b"P3": "ppm",
    b"P4": "pbm",
    b"P5": "pgm",
    b"P6": "ppm",
    b"\0\0\0\x0cjP  \r\n\x87\n": "jp2",
    CODESTREAM: "j2k",
    b"\0\0\0\x0cJXL \r\n\x87\n": "jxl",
    b"\xff\x0a": "jxl",
    b"\x93NUMPY": "npy",
    b"PK\3\4": "npz",
}
# Format -> module of this folder that opens it; codecs.py opens all others.
_MODULES = {"dcm": "dicom", "tiff": "tiff", "npy": "arrays", "npz": "arrays", "heic": "heic"}
# Files of boxes name what reads them: letters with which these brands begin, and brands of images of any codec.
_BRANDS, _ANY_IMAGE = {b"hei": "heic", b"hev": "heic", b"avi": "avif"}, (b"mif1", b"msf1")
# Colour primaries (ISO 23091-2) of sRGB, and unspecified.
_SRGB_PRIMARIES = (1, 2)


def open_image(data: bytes) -> StoredImage | None:
    """Read the header of an image that may have any channels and type; None for 8-bit photographs that Pillow reads.
    Raises DecodeError.
    """
    ext = format_of(data)
    # The library of a kind of files is imported when its first file is read.
    module = importlib.import_module(f"pipeline.data.images.{_MODULES.get(ext, 'codecs')}")
    try:
        return module.open_image(data, ext)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # As in `StoredImage.page`.
        raise DecodeError(reason(error)) from None


def format_of(data: bytes) -> str:
    """The extension of an image file by its content. Raises DecodeError."""
    if data.startswith(JPEG):  # First, and before the table below: most images are.
        return "jpg"
    # A DICOM's preamble of 128 bytes may look like a TIFF; old files have none, and begin with group 8.
    is_old_dicom = data[:3] in (b"\x08\0\x05", b"\x08\0\x08", b"\0\x08\0") and data[4:6].isupper()
    if is_old_dicom or data[128:132] == b"DICM":
        return "dcm"
    for magic, ext in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[4:8] == b"ftyp" and (ext := _brand(data)):
        return ext
    if data.startswith(LFS_POINTER):
        raise DecodeError(LFS_REASON)
    raise DecodeError(f"no image: begins with {data[:12]!r}" if data else "empty file")


def _brand(data: bytes) -> str:
    """heic or avif: by the first brand of a file of boxes that names a codec. "" for others, such as videos."""
    brands = [data[at : at + 4] for at in (8, *range(16, min(int.from_bytes(data[:4], "big"), 1024), 4))]
    ext = next((_BRANDS[brand[:3]] for brand in brands if brand[:3] in _BRANDS), "")
    return ext or ("heic" if any(brand in _ANY_IMAGE for brand in brands) else "")


def check_boxes(data: bytes) -> None:
    """Raise DecodeError for a HEIC or AVIF without its end: libheif leaves those tiles of a photograph green that are
    missing.
    """
    at, end = 0, len(data)
    while at + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, at)
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        stop = at + size if size else end
        if name in (b"ftyp", b"meta", b"mdat") and stop > end:
            raise DecodeError(f"cut off: {counted(end, 'byte')}, where its header names {stop:,}")
        if stop < at + 8:
            return  # Phones append what is not in boxes.
        at = stop


def type_and_colours_of_boxes(data: bytes) -> tuple[str, bool]:
    """(type that holds its values, whether colours are not sRGB's) of a HEIC or AVIF, by the boxes `pixi` and `colr` of
    its items.
    """
    end = data.find(b"mdat")
    boxes = [place.end() for place in re.finditer(b"pixi", data[:end])]
    bits = max((max(data[at + 5 : at + 5 + data[at + 4]], default=8) for at in boxes), default=8)
    kind = "uint8" if bits <= 8 else "uint16"
    if (at := data.find(b"colrprof", 0, end)) >= 0:  # Counts before numbers.
        return kind, has_other_colours(data[at + 8 : end])
    at = data.find(b"colrnclx", 0, end)
    return kind, at >= 0 and int.from_bytes(data[at + 8 : at + 10], "big") not in _SRGB_PRIMARIES
