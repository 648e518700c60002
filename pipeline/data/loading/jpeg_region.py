"""Decodes a region of a JPEG: pixels above and beside it are not computed, and bytes below it are not read.

This needs libjpeg-turbo 3. It is called through ctypes in the shared library of the `turbojpeg` wheel (the extra
`fast`; the wheel's Python module, whose licence is unknown, is not imported). Without the library, and for unsupported
kinds of JPEG, `decode` returns None and the caller decodes the whole image; the pixels are the same, bit for bit.
"""

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from importlib import metadata

import numpy as np

# (top, left, height, width) in pixels, inside the image.
Region = tuple[int, int, int, int]

# Constants of turbojpeg.h, libjpeg-turbo 3.
_INIT_DECOMPRESS, _RGB = 1, 0
_STOP_ON_WARNING, _SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _COLOURS = 0, 4, 5, 6, 7, 8
_PROGRESSIVE, _ARITHMETIC, _LOSSLESS = 12, 14, 15
_YCBCR, _GREY = 1, 2
# Width in pixels of the blocks (MCUs) of each subsampling: 4:4:4, 4:2:2, 4:2:0, grey, 4:4:0, 4:1:1, 4:4:1.
_BLOCK_WIDTHS = (8, 16, 16, 8, 8, 32, 8)
_END_OF_IMAGE = b"\xff\xd9"


Library = tuple[ctypes.PyDLL, ctypes.CDLL]


class _Box(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ("x", "y", "width", "height")]


def _open_library() -> Library | None:
    """Open the library twice: PyDLL keeps the GIL for calls of microseconds, CDLL releases it for the long one."""
    try:
        names = [file for file in metadata.files("turbojpeg") or () if file.name.startswith("libturbojpeg")]
        path = str(names[0].locate())
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        short.tj3Init.restype = c_void_p
    except (metadata.PackageNotFoundError, IndexError, OSError, AttributeError):
        return None
    return short, long


_LIBRARY = _open_library()


class _Handle:
    """A decompressor; each thread has its own."""

    def __init__(self, short: ctypes.PyDLL) -> None:
        self.short = short
        self.pointer = c_void_p(short.tj3Init(_INIT_DECOMPRESS))
        if not self.pointer:
            raise MemoryError("tj3Init")
        short.tj3Set(self.pointer, _STOP_ON_WARNING, 1)

    def __del__(self) -> None:
        self.short.tj3Destroy(self.pointer)

    def get(self, name: int) -> int:
        return self.short.tj3Get(self.pointer, name)


_handles = threading.local()


def decode(data: bytes, choose: Callable[[int, int], Region]) -> np.ndarray | None:
    """Decode a region to uint8 (height, width, 3) RGB, a view of a slightly larger array. Returns None if not possible.

    choose: (height, width) of the image as stored -> the region to decode.
    Not possible: without the library; progressive, arithmetic, lossless and CMYK JPEG; unusual subsampling; a file that
    does not end with the end-of-image marker (truncated, or followed by other bytes); a libjpeg error or warning before
    the region's last row. Damage below the region is not detected.
    """
    if _LIBRARY is None or not data.endswith(_END_OF_IMAGE):
        return None
    short, long = _LIBRARY
    handle = getattr(_handles, "handle", None)
    if handle is None:
        handle = _handles.handle = _Handle(short)
    file = data, c_size_t(len(data))  # Other numbers are of C's type int, which ctypes makes of Python's.
    if short.tj3DecompressHeader(handle.pointer, *file) or not _is_plain(handle):
        return None
    image_height, image_width = handle.get(_HEIGHT), handle.get(_WIDTH)
    top, left, height, width = choose(image_height, image_width)
    # The library's region starts at a block border. Chroma is upsampled from its neighbours on both sides, which are
    # missing at the region's edges, so decode one more column on the left and two (one of chroma) on the right.
    block = _BLOCK_WIDTHS[handle.get(_SUBSAMPLING)]
    first = max(left - 1, 0) // block * block
    last = min(left + width + 2, image_width)
    if short.tj3SetCroppingRegion(handle.pointer, _Box(first, top, last - first, height)):
        return None
    pixels = np.empty((height, last - first, 3), np.uint8)
    no_gap = 0  # Between rows.
    if long.tj3Decompress8(handle.pointer, *file, pixels.ctypes, no_gap, _RGB):
        return None
    return pixels[:, left - first : left - first + width]


def _is_plain(handle: _Handle) -> bool:
    return (
        handle.get(_COLOURS) in (_YCBCR, _GREY)
        and 0 <= handle.get(_SUBSAMPLING) < len(_BLOCK_WIDTHS)
        and handle.get(_PRECISION) == 8
        and not any(map(handle.get, (_PROGRESSIVE, _ARITHMETIC, _LOSSLESS)))
    )
