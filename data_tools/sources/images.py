"""Encodes images: reduced copies for data sets of a lower resolution, PNGs of raw pixels."""

import math
import struct
import zlib

import cv2
import numpy as np
import simplejpeg

from pipeline.data.loading.decode import decode

# Most bytes in one stored (uncompressed) deflate block.
_STORED_BLOCK = 2**16 - 1


def shrink(data: bytes, short: int, quality: int) -> tuple[bytes, int, int]:
    """The image with its short side resized to `short`: (JPEG bytes, width, height), upright, RGB.

    Raises DecodeError when it cannot be decoded.
    """
    pixels = decode(data)
    height, width = pixels.shape[:2]
    scale = short / min(width, height)
    size = (max(round(width * scale), short), max(round(height * scale), short))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    return simplejpeg.encode_jpeg(small, quality=quality, colorsubsampling="420"), *size


def to_png(planes: bytes) -> bytes:
    """A PNG of the 8-bit pixels of a square image, in planes (all red, then all green, then all blue)."""
    side = math.isqrt(len(planes) // 3)
    return png(np.frombuffer(planes, np.uint8).reshape(3, side, side).transpose(1, 2, 0))


def png(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 pixels: (H, W) gray or (H, W, 3) RGB.

    Not compressed: zlib output differs between builds, and shard bytes must not depend on the machine.
    """
    height, width = pixels.shape[:2]
    # Each row begins with its filter type: 0 means unfiltered.
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    stored = b"\x78\x01"
    for start in range(0, len(rows), _STORED_BLOCK):
        block = rows[start : start + _STORED_BLOCK]
        is_last = start + _STORED_BLOCK >= len(rows)
        stored += struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF) + block
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    data = stored + struct.pack(">I", zlib.adler32(rows))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
