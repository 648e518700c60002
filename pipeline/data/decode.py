"""Encoded image bytes -> RGB pixels. libjpeg-turbo for JPEG, Pillow for everything else.

Sharding and training ask the same functions what an image is, so what the one lets pass the other can read.
"""

import io
import re
import warnings

import numpy as np
import simplejpeg
from PIL import Image

# Photographs with broken EXIF are common; Pillow warns of each.
warnings.filterwarnings("ignore", module="PIL")

_MAGIC = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
_EXIF_ORIENTATION = 0x0112
# JPEG segments that may hold EXIF come first; what lies behind is picture.
_EXIF_SEARCH_BYTES = 65536
# Pillow's limit against bombs, for libjpeg-turbo too: a header of a few bytes may claim 12 GB of pixels.
_MAX_PIXELS = 2 * 89_478_485
# Where libjpeg fills in what it could not read. Its other complaints (extraneous bytes, odd markers, CMYK) are Pillow's
# to judge.
_SPOILT = ("premature end", "bad huffman code")


class DecodeError(ValueError):
    """These bytes are no image that can be read whole."""


def decode(data: bytes) -> np.ndarray:
    """Decode JPEG, PNG, WebP, GIF, BMP or TIFF to uint8 (H, W, 3) RGB, turned upright by its EXIF tag.

    Grayscale is repeated to three channels, 16-bit is scaled to 8, alpha is dropped, and of an animation the first
    frame counts. Raises DecodeError for anything that cannot be decoded to its last row.
    """
    if _format(data) == "jpg":
        orientation = 1
        if data.find(b"Exif\0\0", 0, _EXIF_SEARCH_BYTES) >= 0:
            orientation = _ask_pillow(data, lambda image: image.getexif().get(_EXIF_ORIENTATION, 1))
        pixels = _decode_jpeg(data)
        if pixels is not None:
            return _upright(pixels, orientation)
    return _ask_pillow(data, _to_rgb)


def inspect(data: bytes, whole: bool) -> tuple[str, int, int]:
    """(file extension by content, width, height) of an image as it is stored, before any EXIF rotation.

    whole: decode all of it, so that a cut or damaged file is found; else only the header is read. Raises DecodeError.
    """
    ext = _format(data)
    width, height = _ask_pillow(data, lambda image: image.size)
    if whole:
        decode(data)
    return ext, width, height


def _format(data: bytes) -> str:
    for magic, ext in _MAGIC.items():
        if data.startswith(magic):
            return ext
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise DecodeError(f"no image: begins with {data[:12]!r}" if data else "empty file")


def _decode_jpeg(data: bytes) -> np.ndarray | None:
    """Pixels by libjpeg-turbo, or None when it does not know this kind of JPEG."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        if height * width > _MAX_PIXELS:
            raise DecodeError(f"{width} x {height} pixels are more than {_MAX_PIXELS:,}")
        return simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    except DecodeError:
        raise
    except ValueError as error:
        if any(words in str(error).lower() for words in _SPOILT):
            raise DecodeError(_reason(error)) from None
        return None


def _ask_pillow(data: bytes, question):  # type: ignore[no-untyped-def]
    """What `question` says of the opened image; every failure of Pillow's is a DecodeError."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DecodeError(f"{image.width} x {image.height} pixels are more than {_MAX_PIXELS:,}")
            return question(image)
    except DecodeError:
        raise
    except Exception as error:  # Pillow's plug-ins raise anything, struct.error and SyntaxError included.
        raise DecodeError(_reason(error)) from None


def _to_rgb(image: Image.Image) -> np.ndarray:
    # Pillow turns a TIFF when it loads it, and forgets the tag: asked earlier, it would be turned twice.
    image.load()
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    if image.mode.startswith("I") or image.mode == "F":
        pixels = np.asarray(image, dtype=np.float64)
        # 65535 -> 255. Of wider types only the pixels tell whether they hold 8 bits or 16.
        if image.mode.startswith("I;16") or pixels.max(initial=0) > 255:
            pixels = pixels / 257
        image = Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8))
    return _upright(np.asarray(image.convert("RGB")), orientation)


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """(H, W, 3) or (W, H, 3), turned as EXIF says: 2-4 mirror or turn by 180 degrees, 5-8 swap the sides as well."""
    if not 1 < orientation < 9:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _reason(error: Exception) -> str:
    """One line, without the memory addresses that would make two runs differ."""
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return re.sub(r" at 0x[0-9a-f]+", "", line)
