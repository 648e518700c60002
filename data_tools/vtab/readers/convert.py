"""Conversion of images for the data sets whose images tensorflow_datasets or VTAB, and so the official benchmark,
converts.

OpenCV is used as there for SUN397 and retinopathy. JPEG decoders and encoders of different builds differ by about one
grey level, and the results differ from the official copies by as much.
"""

import cv2
import numpy as np

from pipeline.data.loading.decode import decode, exif_orientation

_SUN_PIXELS = 120_000
_SUN_QUALITY = 95  # OpenCV's default, with which sun397/tfds:4 was written; its description says 72.
_RADIUS = 300
_KEPT_RADIUS = int(_RADIUS * 0.9)
_GRAY = 128
_RETINOPATHY_QUALITY = 72


def sun397(data: bytes) -> bytes:
    """Resize to at most 120,000 pixels, as JPEG (sun397/tfds). Raises DecodeError."""
    # The official copy's OpenCV did not read GIFs. TensorFlow's RGB pixels were then encoded as BGR: red and blue are
    # swapped.
    pixels = decode(data) if data.startswith(b"GIF8") else _decode(data)
    height, width = pixels.shape[:2]
    if height * width > _SUN_PIXELS:
        factor = np.sqrt(_SUN_PIXELS / (height * width))
        pixels = cv2.resize(pixels, None, fx=factor, fy=factor)
    return _encode(pixels, _SUN_QUALITY)


def retinopathy(data: bytes) -> bytes:
    """Scale the eye to a radius of 300 pixels, and subtract its local average (btgraham-300, by the winner of the
    competition).

    In the middle row, pixels brighter than a tenth of the row's mean belong to the eye. Raises DecodeError.
    """
    pixels = _decode(data)
    row = pixels[pixels.shape[0] // 2].sum(axis=1)
    radius = (row > row.mean() / 10).sum() / 2
    if radius < 1:
        radius = pixels.shape[0] / 2
    scale = _RADIUS / radius
    pixels = cv2.resize(pixels, None, fx=scale, fy=scale)
    average = cv2.GaussianBlur(pixels, (0, 0), _RADIUS / 30)
    pixels = cv2.addWeighted(pixels, 4, average, -4, _GRAY)
    height, width = pixels.shape[:2]
    centre = (width // 2, height // 2)
    disc = np.zeros((height, width), np.uint8)
    cv2.circle(disc, centre, _KEPT_RADIUS, 1, thickness=-1)
    pixels[disc == 0] = _GRAY
    rows = slice(max(centre[1] - _KEPT_RADIUS, 0), centre[1] + _KEPT_RADIUS)
    columns = slice(max(centre[0] - _KEPT_RADIUS, 0), centre[0] + _KEPT_RADIUS)
    return _encode(pixels[rows, columns], _RETINOPATHY_QUALITY)


def as_stored(data: bytes) -> bytes:
    """The file; in a JPEG that its EXIF would turn, the EXIF is hidden: TensorFlow, and so VTAB, ignores it. Raises
    DecodeError.
    """
    return data.replace(b"Exif\0\0", bytes(6)) if exif_orientation(data) != 1 else data


def _decode(data: bytes) -> np.ndarray:
    """Decode to (H, W, 3) uint8, BGR."""
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH) if data else None
    if pixels is None or pixels.dtype != np.uint8:
        pixels = decode(data)[..., ::-1]
    return pixels


def _encode(pixels: np.ndarray, quality: int) -> bytes:
    return cv2.imencode(".jpg", np.ascontiguousarray(pixels), [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
