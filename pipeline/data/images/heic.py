"""Opens HEIC, by libheif. The classes of pi_heif read EXIF and profiles, too, and version 1.4.0 crashes where these are
damaged.
"""

import _pi_heif
import numpy as np
from PIL import Image

from pipeline.data.images.formats import check_boxes, type_and_colours_of_boxes
from pipeline.data.images.stored import DecodeError, StoredImage, without_alpha


def open_image(data: bytes, ext: str) -> StoredImage:
    """The primary image, as libheif turns it. Its values are read as 8 bits, also those of more."""
    check_boxes(data)
    # No threads of its own; colours to 8 bits, as RGB, rows as libheif aligns them; gray to 8 or 16 bits; any decoder;
    # with limits.
    photographs = _pi_heif.load_file(data, 0, True, False, False, True, "", False)
    primary = next((image for image in photographs if image is not None and image.primary), None)
    if primary is None:
        raise DecodeError("its primary image cannot be read")
    (width, height), mode = primary.size_mode
    samples, alpha = Image.getmodebands(mode), (Image.getmodebands(mode) - 1,) * mode.endswith("A")

    def read(number: int) -> tuple[np.ndarray, None]:
        rows: np.ndarray = np.frombuffer(primary.data, np.uint16 if mode == "I;16" else np.uint8)
        (width, height), _ = primary.size_mode  # Those of the header may be wrong.
        values = rows.reshape(height, -1)[:, : width * samples].reshape(height, width, samples)
        if mode == "I;16":
            values = np.round(values / 257)
        return without_alpha(values.astype(np.uint8), alpha), None

    kind, profile = type_and_colours_of_boxes(data)
    return StoredImage("heic", height, width, samples - len(alpha), kind, read, alpha=bool(alpha), profile=profile)
