"""What an image file is, by its bytes: format, size, whether it can be decoded whole; and smaller copies of it."""

import io
import re
import warnings

import cv2
import numpy as np
import simplejpeg
from PIL import Image, ImageOps

# Pillow's limit against bombs: a file of a few kilobytes may claim gigabytes of pixels.
MAX_PIXELS = 2 * 89_478_485
_MAGIC = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
# Where libjpeg fills in what it could not read. Its other warnings (extraneous bytes, odd markers) spoil no pixels that
# Pillow would not refuse as well.
_SPOILT = ("premature end", "bad huffman code")

# ImageNet holds photographs with broken EXIF; Pillow warns of each.
warnings.filterwarnings("ignore", module="PIL")


class BadImageError(Exception):
    """Why bytes are no image, or not a whole one."""


def examine(data: bytes, whole: bool) -> tuple[str, int, int]:
    """(extension, width, height) of an image as it is stored, before any EXIF rotation.

    whole: decode all of it, so that a cut or damaged file is found; else only the header is read.
    Raises BadImageError.
    """
    ext = _format(data)
    if ext == "jpg":
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            _check_size(width, height)
            if whole:
                simplejpeg.decode_jpeg(data, "GRAY" if colours == "Gray" else "RGB")
            return ext, width, height
        except ValueError as error:
            reason = str(error)
            if any(words in reason.lower() for words in _SPOILT):
                raise BadImageError(reason) from None
            # CMYK, odd subsampling, harmless warnings: let Pillow judge.
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(*image.size)
            if whole:
                image.load()
            return ext, image.width, image.height
    except BadImageError:
        raise
    except Exception as error:  # Pillow's plug-ins raise anything, SyntaxError and struct.error included
        raise BadImageError(_reason(error)) from None


def shrink(data: bytes, short: int, quality: int) -> tuple[bytes, int, int]:
    """The image with its short side resized to `short`: (JPEG bytes, width, height), upright, RGB.

    Raises BadImageError when it cannot be decoded.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16"):
                # Pillow clips 16-bit grey to 255 when it converts.
                upright = Image.fromarray((np.asarray(upright) // 256).astype(np.uint8))
            pixels = np.asarray(upright.convert("RGB"))
    except Exception as error:
        raise BadImageError(_reason(error)) from None
    height, width = pixels.shape[:2]
    scale = short / min(width, height)
    size = (max(round(width * scale), short), max(round(height * scale), short))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return simplejpeg.encode_jpeg(np.ascontiguousarray(small), quality=quality, colorsubsampling="420"), *size


def _format(data: bytes) -> str:
    for magic, ext in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise BadImageError(f"no image: begins with {data[:12]!r}" if data else "empty file")


def _reason(error: Exception) -> str:
    """One line, without the memory addresses that would make two runs differ."""
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r" at 0x[0-9a-f]+", "", line)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width} x {height} pixels are more than {MAX_PIXELS:,}")
