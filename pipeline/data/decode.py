"""Encoded image bytes -> RGB pixels. libjpeg-turbo for JPEG, Pillow for everything else."""

import io
import warnings

import numpy as np
import simplejpeg
from PIL import Image

# Photographs with broken EXIF are common; Pillow warns of each.
warnings.filterwarnings("ignore", module="PIL")

_EXIF_ORIENTATION = 0x0112
# JPEG segments that may hold EXIF come first; what lies behind is picture.
_EXIF_SEARCH_BYTES = 65536
# How to turn a picture upright, by EXIF orientation.
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow's limit against bombs, for libjpeg-turbo too: a header of a few bytes may claim 12 GB of pixels.
_MAX_PIXELS = 2 * 89_478_485


class DecodeError(ValueError):
    """These bytes are no image that can be read whole."""


def decode(data: bytes) -> np.ndarray:
    """Decode JPEG, PNG, WebP, GIF, BMP or TIFF to uint8 (H, W, 3) RGB, turned upright by its EXIF tag.

    Grayscale is repeated to three channels, 16-bit is scaled to 8, alpha is dropped, and of an animation the first frame
    counts. Raises DecodeError for anything that cannot be decoded to its last row.
    """
    if data[:2] == b"\xff\xd8" and data.find(b"Exif\0\0", 0, _EXIF_SEARCH_BYTES) < 0:
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            if height * width <= _MAX_PIXELS:
                return simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
        except ValueError:
            pass  # CMYK, or broken: Pillow reads the one and says what is wrong with the other.
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _to_rgb(image)
    except Exception as error:  # Pillow's plug-ins raise anything, struct.error and SyntaxError included.
        raise DecodeError(str(error).split("<_io")[0].strip() or type(error).__name__) from None


def _to_rgb(image: Image.Image) -> np.ndarray:
    # Pillow turns a TIFF when it loads it, and forgets the tag: asked earlier, or by exif_transpose, it would turn twice.
    image.load()
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    if image.mode.startswith("I") or image.mode == "F":
        pixels = np.asarray(image, dtype=np.float64)
        # 65535 -> 255. Of wider types only the pixels tell whether they hold 8 bits or 16.
        if image.mode.startswith("I;16") or pixels.max(initial=0) > 255:
            pixels = pixels / 257
        image = Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8))
    image = image.convert("RGB")
    return np.asarray(image.transpose(_TURN[orientation]) if orientation in _TURN else image)
