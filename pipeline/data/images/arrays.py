"""Opens .npy, and .npz with one array: (H, W), (H, W, C) or (C, H, W), whose channels are the shortest axis."""

import io
import math
import re
import zipfile
from typing import Literal

import numpy as np

from pipeline.data.images.stored import DecodeError, StoredImage

# Fields of the header of an .npy, which is the text of a dictionary of Python.
_FIELDS = (
    r"""['"]descr['"]\s*:\s*['"]([^'"]+)['"]""",
    r"""['"]fortran_order['"]\s*:\s*(True|False)""",
    r"""['"]shape['"]\s*:\s*\(([\d\s,]*)\)""",
)


def open_image(data: bytes, ext: str) -> StoredImage:
    """Raises DecodeError for several arrays, Python objects, and arrays of other shapes."""
    if ext == "npz":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            if len(names) != 1:
                raise DecodeError(
                    f"an .npz of {len(names)} arrays ({', '.join(names[:5])}): store the image alone, as .npy"
                )
            data = archive.read(names[0])
    begin, stored, shape, order = _header(data)
    if len(shape) not in (2, 3):
        raise DecodeError(f"an array of shape {shape}; (H, W), (H, W, C) or (C, H, W) is needed")
    is_first = len(shape) == 3 and shape[0] < min(shape[1:])
    height, width = shape[1:] if is_first else shape[:2]
    channels = 1 if len(shape) == 2 else shape[0] if is_first else shape[2]

    def read(number: int) -> tuple[np.ndarray, None]:
        values = np.frombuffer(data, stored, math.prod(shape), begin).reshape(shape, order=order)
        values = np.moveaxis(values, 0, 2) if is_first else values.reshape(height, width, channels)
        return np.array(values, stored.newbyteorder("="), order="C"), None

    return StoredImage(ext, height, width, channels, stored.name, read)


def _header(data: bytes) -> tuple[int, np.dtype, tuple[int, ...], Literal["C", "F"]]:
    """(offset of the values, their type, shape, order) of an .npy. Raises DecodeError.

    numpy reads the header by ast.literal_eval, which fails now and then in several threads of Python 3.11
    (python/cpython#106905).
    """
    size_of_length = 2 if data[6:7] == b"\1" else 4
    begin = 8 + size_of_length + int.from_bytes(data[8 : 8 + size_of_length], "little")
    header = data[8 + size_of_length : begin].decode("latin-1")
    matches = [re.search(pattern, header) for pattern in _FIELDS]
    if not all(matches):
        raise DecodeError("an .npy without one type, order and shape in its header")
    kind, fortran, shape = (match[1] for match in matches if match)
    sides = tuple(int(side) for side in shape.split(",") if side.strip())
    return begin, np.dtype(kind), sides, "F" if fortran == "True" else "C"
