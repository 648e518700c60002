"""Opens 16-bit PNG and PGM, JPEG 2000 and JPEG XL."""

import io
import re
import struct

import imagecodecs
import numpy as np
from PIL import Image

from pipeline.data.images.formats import CODESTREAM
from pipeline.data.images.stored import DecodeError, StoredImage, has_other_colours, upright, without_alpha

_PNG_CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # Colour type -> samples of a pixel; 4 and 6 have alpha.
_ORIENTATION = 0x0112
# Width, height and largest value of a PGM or PPM; comments stand between them.
_PNM = re.compile(rb"P([56])(?:\s+|#[^\n]*\n)+(\d+)(?:\s+|#[^\n]*\n)+(\d+)(?:\s+|#[^\n]*\n)+(\d+)\s")


def _png(data: bytes) -> StoredImage | None:
    width, height, bits, colour = struct.unpack_from(">IIBB", data, 16)
    if bits != 16:
        return None
    samples = _PNG_CHANNELS[colour]
    alpha = (samples - 1,) if colour >= 4 else ()
    info = Image.open(io.BytesIO(data)).info  # What precedes the pixels. Pillow would make 8 bits of colours' 16.
    exif = Image.Exif()
    exif.load(info.get("exif", b""))
    orientation = exif.get(_ORIENTATION, 1)

    def read(number: int) -> tuple[np.ndarray, None]:
        values = imagecodecs.png_decode(data).reshape(height, width, -1)[..., :samples]
        return upright(without_alpha(values, alpha), orientation), None

    sides = (width, height) if orientation >= 5 else (height, width)
    profile = has_other_colours(info.get("icc_profile"))
    return StoredImage("png", *sides, samples - len(alpha), "uint16", read, alpha=bool(alpha), profile=profile)


def _pnm(data: bytes) -> StoredImage | None:
    """PGM and PPM of more than 8 bits: big-endian, of two bytes a value."""
    header = _PNM.match(data)
    if not header or int(header[4]) < 256:
        return None
    channels, width, height = 1 if header[1] == b"5" else 3, int(header[2]), int(header[3])

    def read(number: int) -> tuple[np.ndarray, None]:
        values = np.frombuffer(data, ">u2", height * width * channels, header.end())
        return values.astype(np.uint16).reshape(height, width, channels), None

    return StoredImage("pgm" if channels == 1 else "ppm", height, width, channels, "uint16", read)


def _jpeg2000(data: bytes) -> StoredImage:
    at = data.find(CODESTREAM)
    if at < 0:
        raise DecodeError("JPEG 2000 without a codestream")
    x1, y1, x0, y0, samples = struct.unpack_from(">4I16xH", data, at + 8)
    depths = {*data[at + 42 : at + 42 + 3 * samples : 3]}
    if len(depths) != 1:
        raise DecodeError(f"JPEG 2000 with {samples} channels of different types")
    depth = depths.pop()
    bits, is_signed = (depth & 127) + 1, depth > 127
    kind = f"{'' if is_signed else 'u'}int{8 if bits <= 8 else 16 if bits <= 16 else 32}"
    # The box `cdef` says which channel is opacity: number, kind (1 or 2), the channels that it belongs to.
    box = data.find(b"cdef", 0, at) + 6
    entries = struct.iter_unpack(">HHH", data[box : box + 6 * samples] if box > 6 else b"")
    alpha = tuple(number for number, kind, _ in entries if kind in (1, 2))

    def read(number: int) -> tuple[np.ndarray, None]:
        values = imagecodecs.jpeg2k_decode(data)
        return without_alpha(values.reshape(*values.shape[:2], -1), alpha), None

    return StoredImage("jp2" if at else "j2k", y1 - y0, x1 - x0, samples - len(alpha), kind, read, alpha=bool(alpha))


def _jpeg_xl(data: bytes) -> StoredImage:
    """Decodes it, since no library here reads its header alone. A second or fourth channel is alpha, as JPEG XL numbers
    it.
    """
    values = imagecodecs.jpegxl_decode(data)
    if values.ndim > 3:
        raise DecodeError(f"JPEG XL with {len(values)} frames")
    values = values.reshape(*values.shape[:2], -1)
    samples = values.shape[2]
    alpha = (samples - 1,) if samples in (2, 4) else ()
    values = without_alpha(values, alpha)
    height, width, channels = values.shape
    return StoredImage(
        "jxl", height, width, channels, values.dtype.name, lambda number: (values, None), alpha=bool(alpha)
    )


def open_image(data: bytes, ext: str) -> StoredImage | None:
    openers = {"png": _png, "pgm": _pnm, "ppm": _pnm, "jp2": _jpeg2000, "j2k": _jpeg2000, "jxl": _jpeg_xl}
    return openers[ext](data) if ext in openers else None
