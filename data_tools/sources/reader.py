"""Reads the image file of one sample, for every layout."""

import contextlib
import errno
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from PIL import Image

from data_tools.sources.images import to_png
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.words import counted
from pipeline.cluster.ray_tasks import LostError
from pipeline.data.loading.values import picture
from pipeline.data.storage.bucket import to_path
from pipeline.data.storage.retry import StorageError

# Value of the column `packed` for raw pixels of a square image: all red, then all green, then all blue.
PIXELS = -1
# Limit of an image file, so that a wrong size cannot fill the memory of a worker.
_MAX_BYTES = 2**30
# Flag of a zip member whose CRC-32 is in a descriptor after its data, and the bytes of the latter up to the end of the
# CRC-32.
_HAS_DESCRIPTOR, _DESCRIPTOR_BYTES = 0x8, 8
# Errors of the file itself, and of writing. All others (EIO, ESTALE, EMFILE, ...) may be temporary faults of the
# machine or storage.
_NOT_LOST = {
    None,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ENXIO,
}


class Reader:
    """Reads samples by (path, offset, size, packed), see `listing.TABLE`. Keeps the last file open."""

    def __init__(self) -> None:
        self._path = ""
        self._file: BinaryIO | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, path: str, offset: int, size: int, packed: int) -> bytes:
        """Returns the image file; raw pixels are returned as a PNG.

        Raises OSError when the file cannot be read, ValueError when it is too large or differs from what was listed,
        LostError when the machine or its storage fails.
        """
        refuse_large(max(size, packed))
        with lost_if_unreadable(path):
            if path != self._path:
                self.__exit__()
                self._path, self._file = "", None
                self._file = to_path(path).open("rb", buffering=0)
                self._path = path
            assert self._file is not None
            is_packed = packed > 0 and size > 0
            data = _zip_member(self._file, offset, packed, size) if is_packed else read_at(self._file, offset, size)
        if len(data) != size:
            raise ValueError(f"{counted(len(data), 'byte')}, but {size:,} when it was listed")
        return to_png(data) if packed == PIXELS else data


def read_thumbnail(tar: str, offset: int, size: int, side: int, pixels: Pixels = RGB8) -> np.ndarray | None:
    """The pixels of an image of a shard, (H, W, 3) uint8, reduced to at most `side`; None if it is unreadable.

    Raises StorageError and LostError when the store or the machine fails.
    """
    try:
        with Reader() as reader:
            image = Image.fromarray(picture(reader.read(tar, offset, size, packed=0), pixels))
    except StorageError:
        raise
    except (OSError, ValueError):
        return None
    image.thumbnail((side, side))
    return np.asarray(image)


def refuse_large(num_bytes: int) -> None:
    """Raises ValueError for a file that is too large for an image."""
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"{counted(num_bytes, 'byte')} is too large for an image")


@contextlib.contextmanager
def lost_if_unreadable(path: str) -> Iterator[None]:
    """Raises LostError when a read fails because of the machine or its storage, not because of the file."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_LOST:
            raise
        raise LostError(f"{path} cannot be read: {error.strerror}.") from None


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """At most `size` bytes of a file from an offset."""
    file.seek(offset)
    return file.read(size)


def _zip_member(file: BinaryIO, offset: int, packed: int, size: int) -> bytes:
    """The zip member whose local header is at `offset`; its bytes follow a name and an extra field of variable length.

    Its CRC-32 is compared: JPEG decoders go on after damaged bytes, and inflate notices few of them.
    """
    header = read_at(file, offset, 30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError("no zip member where one was listed")
    flags, method, crc, name_length, extra_length = struct.unpack("<6xHH4xI8xHH", header)
    read = read_at(file, offset + 30 + name_length + extra_length, packed + _DESCRIPTOR_BYTES)
    data = read[:packed]
    if method != 0:
        # At most one byte more than listed: enough to detect a difference, and safe from zip bombs.
        unpacking = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = unpacking.decompress(data, size + 1)
        except zlib.error as error:
            raise ValueError(f"damaged zip member ({error})") from None
        if not unpacking.eof:
            raise ValueError(f"damaged zip member (it does not end after {counted(size, 'byte')})")
    crcs = {crc}
    if flags & _HAS_DESCRIPTOR:
        # The CRC follows the data, after a signature that some writers omit.
        crcs |= {int.from_bytes(read[packed + start : packed + start + 4], "little") for start in (0, 4)}
    if len(data) == size and zlib.crc32(data) not in crcs:  # The caller compares the size.
        raise ValueError("damaged zip member (wrong CRC-32)")
    return data
