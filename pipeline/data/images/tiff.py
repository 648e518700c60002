"""Opens TIFF of every kind (BigTIFF, OME-TIFF, GeoTIFF, ImageJ), by tifffile and imagecodecs. Of a pyramid, the largest
level is read.
"""

import io
import logging
from functools import cache
from math import prod

import numpy as np
import tifffile

from pipeline.data.images.stored import (
    DESCRIPTION,
    DecodeError,
    StoredImage,
    described_channels,
    has_other_colours,
    upright,
    without_alpha,
)

# Its warnings about odd tags would name no file; what matters raises.
logging.getLogger("tifffile").setLevel(logging.CRITICAL)
_ORIENTATION, _PROFILE, _GDAL_NODATA = 274, 34675, 42113
_WHITE_IS_ZERO = 0
_READ = (_WHITE_IS_ZERO, 1, 2, 6)  # Also black is zero, RGB, and YCbCr, which becomes RGB.
_ALPHA = (1, 2)  # ExtraSamples: premultiplied or not; 0 is another band.
_UNNAMED = "QI"  # Axes of pages of which the file does not say what they are.


def open_image(data: bytes, ext: str) -> StoredImage:
    """Raises DecodeError for colours of a palette or of print, and for images of several sizes or types."""
    file = tifffile.TiffFile(io.BytesIO(data))
    series = [one for one in file.series if not one.keyframe.is_reduced]
    if len(series) != 1:
        shown = "; ".join(f"{one.axes} {one.shape} {one.dtype}" for one in series[:4])
        raise DecodeError(f"a TIFF of {len(series)} images of different size or type ({shown})")
    (largest,) = series
    first, axes = largest.keyframe, largest.axes
    if largest.dtype is None or first.photometric not in _READ:
        raise DecodeError(f"a TIFF with pixels of kind {first.photometric!r}, which is not read")
    end = max(map(sum, zip(first.dataoffsets, first.databytecounts, strict=True)), default=0)
    if end > len(data):
        raise DecodeError(f"cut off: a TIFF of {len(data):,} bytes, of which a strip or tile ends at {end:,}")
    sizes = dict(zip(axes, largest.shape, strict=True))
    others = [place for place, axis in enumerate(axes) if axis not in "YXS"]  # Two of them may be unnamed.
    num_pages, samples = prod(largest.shape[place] for place in others), sizes.get("S", 1)
    alpha = tuple(samples - len(first.extrasamples) + n for n, kind in enumerate(first.extrasamples) if kind in _ALPHA)
    orientation = int(first.tags.valueof(_ORIENTATION) or 1)
    height, width = (sizes["X"], sizes["Y"]) if orientation >= 5 else (sizes["Y"], sizes["X"])

    @cache
    def all_pages() -> np.ndarray:
        """(pages, H, W, S), of a file whose one header describes all pages, as ImageJ's."""
        order = [*others, *(axes.index(axis) for axis in "YXS" if axis in sizes)]
        return largest.asarray().transpose(order).reshape(num_pages, sizes["Y"], sizes["X"], samples)

    def read(number: int) -> tuple[np.ndarray, None]:
        if len(largest.pages) == num_pages:
            values = largest.pages[number].asarray()
            values = np.moveaxis(values, 0, 2) if first.axes == "SYX" else values
        else:
            values = all_pages()[number]
        values = without_alpha(values.reshape(sizes["Y"], sizes["X"], samples), alpha)
        if first.photometric == _WHITE_IS_ZERO:
            values = _inverted(values, first.bitspersample)
        return np.ascontiguousarray(upright(values, orientation)), None

    names, lacking = described_channels(first.tags.valueof(DESCRIPTION))
    return StoredImage(
        "tiff",
        height,
        width,
        samples - len(alpha),
        largest.dtype.name,
        read,
        pages=num_pages,
        axes="".join(axes[place] for place in others if axes[place] not in _UNNAMED),
        nodata=_nodata(first),
        alpha=bool(alpha),
        profile=has_other_colours(first.tags.valueof(_PROFILE)),
        channel_names=names,
        lacking=lacking,
    )


def _inverted(values: np.ndarray, bits: int) -> np.ndarray:
    """Values of which 0 is white, so that 0 is black."""
    if values.dtype.kind == "b":
        return ~values
    if values.dtype.kind != "u":
        raise DecodeError("a TIFF whose white is zero, of signed or floating-point values, which is not read")
    return values.dtype.type(2**bits - 1) - values


def _nodata(page: tifffile.TiffPage) -> float | None:
    """The value of missing pixels, which GDAL writes as text."""
    try:
        return float(str(page.tags.valueof(_GDAL_NODATA)).strip("\0 "))
    except ValueError:
        return None
