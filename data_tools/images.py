"""Smaller copies of images, for data sets that are kept at a lower resolution."""

import cv2
import numpy as np
import simplejpeg

from pipeline.data.decode import decode


def shrink(data: bytes, short: int, quality: int) -> tuple[bytes, int, int]:
    """The image with its short side resized to `short`: (JPEG bytes, width, height), upright, RGB.

    Raises DecodeError when it cannot be decoded.
    """
    pixels = decode(data)
    height, width = pixels.shape[:2]
    scale = short / min(width, height)
    size = (max(round(width * scale), short), max(round(height * scale), short))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return simplejpeg.encode_jpeg(np.ascontiguousarray(small), quality=quality, colorsubsampling="420"), *size
