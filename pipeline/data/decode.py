"""Encoded image bytes -> RGB pixels. libjpeg-turbo for JPEG, Pillow for everything else."""

import io
import warnings

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

# Photographs with broken EXIF are common; Pillow warns of each.
warnings.filterwarnings("ignore", module="PIL")

_EXIF_ORIENTATION = 0x0112
# JPEG segments that may hold EXIF come first; what lies behind is picture.
_EXIF_SEARCH_BYTES = 65536


class DecodeError(ValueError):
    """These bytes are no image that can be read whole."""


def decode(data: bytes) -> np.ndarray:
    """Decode JPEG, PNG, WebP, GIF, BMP or TIFF to uint8 (H, W, 3) RGB, turned upright by its EXIF tag.

    Grayscale is repeated to three channels, 16-bit is scaled to 8, alpha is dropped, and of an animation the first frame
    counts. Raises DecodeError for anything that cannot be decoded to its last row.
    """
    if data[:2] == b"\xff\xd8" and data.find(b"Exif\0\0", 0, _EXIF_SEARCH_BYTES) < 0:
        try:
            return simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
        except ValueError:
            pass  # CMYK, or broken: Pillow reads the one and says what is wrong with the other.
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _to_rgb(image)
    except Exception as error:  # Pillow's plug-ins raise anything, struct.error and SyntaxError included.
        raise DecodeError(str(error).split("<_io")[0].strip() or type(error).__name__) from None


def _to_rgb(image: Image.Image) -> np.ndarray:
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    if image.mode.startswith("I") or image.mode == "F":
        pixels = np.asarray(image, dtype=np.float64)
        if pixels.max(initial=0) > 255:
            pixels = pixels / 257  # 65535 -> 255
        image = Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8))
        if orientation != 1:
            image.getexif()[_EXIF_ORIENTATION] = orientation
    image = image.convert("RGB")
    return np.asarray(ImageOps.exif_transpose(image) if orientation != 1 else image)
