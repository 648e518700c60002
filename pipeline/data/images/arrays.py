"""Opens .npy, and .npz with one array: (H, W), (H, W, C) or (C, H, W), whose channels are the shortest axis."""

import io
import zipfile

import numpy as np

from pipeline.data.images.stored import DecodeError, StoredImage


def open_arrays(data: bytes) -> StoredImage:
    """Raises DecodeError for several arrays, Python objects, and arrays of other shapes."""
    if data.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = [name for name in archive.namelist() if name.endswith(".npy")]
            if len(names) != 1:
                raise DecodeError(
                    f"an .npz of {len(names)} arrays ({', '.join(names[:5])}): npz_array=NAME chooses one"
                )
            return _open_array(archive.read(names[0]), "npz")
    return _open_array(data, "npy")


def chosen_array(data: bytes, name: str) -> bytes:
    """The array of this name of an .npz, as an .npy; any other file, and without a name, is returned as it is. Raises DecodeError."""
    if not (name and data.startswith(b"PK")):
        return data
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.read(f"{name}.npy")
    except (KeyError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise DecodeError(f"no array {name!r} in an .npz ({error})") from None


def _open_array(data: bytes, ext: str) -> StoredImage:
    file = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if len(shape) not in (2, 3):
        raise DecodeError(f"an array of shape {shape}; (H, W), (H, W, C) or (C, H, W) is needed")
    is_first = len(shape) == 3 and shape[0] < min(shape[1:])
    height, width = shape[1:] if is_first else shape[:2]
    channels = 1 if len(shape) == 2 else shape[0] if is_first else shape[2]

    def read(number: int) -> tuple[np.ndarray, None]:
        values = np.load(io.BytesIO(data), allow_pickle=False)
        values = np.moveaxis(values, 0, 2) if is_first else values.reshape(height, width, channels)
        return np.ascontiguousarray(values.astype(dtype.newbyteorder("="), copy=False)), None

    return StoredImage(ext, height, width, channels, dtype.name, read)
