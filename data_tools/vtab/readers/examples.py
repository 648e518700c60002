"""Reads TFRecord files of tf.train.Example without TensorFlow: records, checksums, features.

A file is a sequence of records: length (u64), masked CRC-32C of the length, data, masked CRC-32C of the data, all
little-endian. An Example is a protocol buffer: a map from names to lists of bytes, floats or int64s.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from google_crc32c import value as crc32c

from pipeline.base.errors import UserError

_MASK_DELTA = 0xA282EAD8
# Wire types of protocol buffers.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Field numbers of Feature: exactly one is set, and gives the type of the list.
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class Example:
    """The features of one record.

    data: the record. spans: name -> (start, end) in data of each bytes value, so that images can be read by offset.
    numbers: name -> float32 or int64.
    """

    def __init__(self, data: bytes) -> None:
        """Raises ValueError if data is not an Example."""
        self.data = data
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.numbers: dict[str, np.ndarray] = {}
        try:
            for number, start, end in _fields(data, 0, len(data)):
                if number == 1:
                    for entry, first, last in _fields(data, start, end):
                        if entry == 1:
                            self._add(first, last)
        except (IndexError, struct.error):
            raise ValueError("its protocol buffer is cut off") from None

    def span(self, name: str) -> tuple[int, int]:
        """Returns (start, end) of the only bytes value of a feature. Raises KeyError."""
        (span,) = self.spans[name]
        return span

    def text(self, name: str) -> str:
        """Returns the only bytes value of a feature, as text. Raises KeyError."""
        start, end = self.span(name)
        return self.data[start:end].decode()

    def integer(self, name: str) -> int:
        """Returns the only int64 of a feature. Raises KeyError."""
        (value,) = self.numbers[name].tolist()
        return value

    def list(self, name: str) -> np.ndarray:
        """Returns all numbers of a feature; none if it is missing, which stands for an empty sequence."""
        return self.numbers.get(name, np.zeros(0, np.int64))

    def _add(self, start: int, end: int) -> None:
        """Add an entry of the map: key (field 1) and Feature (field 2)."""
        name, feature = "", (0, 0)
        for number, first, last in _fields(self.data, start, end):
            if number == 1:
                name = self.data[first:last].decode()
            elif number == 2:
                feature = (first, last)
        for kind, first, last in _fields(self.data, *feature):
            values = [(begin, end) for _, begin, end in _fields(self.data, first, last)]
            if kind == _BYTES_LIST:
                self.spans[name] = values
            elif kind == _FLOAT_LIST:
                parts = [self.data[begin:end] for begin, end in values]
                self.numbers[name] = np.frombuffer(b"".join(parts), "<f4")
            elif kind == _INT64_LIST:
                self.numbers[name] = np.array([number for place in values for number in _integers(self.data, *place)])


def records(file: BinaryIO, start: int, end: int, where: str) -> Iterator[tuple[int, bytes]]:
    """Yields (offset of the data in the file, data) of every record of the TFRecord file at file[start:end].

    Raises UserError for a truncated record or a wrong checksum. where: name of the file in errors.
    """
    position = start
    while position < end:
        file.seek(position)
        header = file.read(min(12, end - position))
        length = int.from_bytes(header[:8], "little")
        if len(header) < 12 or struct.unpack("<I", header[8:])[0] != _masked(crc32c(header[:8])):
            raise UserError(
                f"{where} is damaged: at byte {position - start:,} no record begins. Make or fetch it again."
            )
        if position + length + 16 > end:
            raise UserError(f"{where} is cut off, within the record at byte {position - start:,}. Fetch it again.")
        data = file.read(length)
        if struct.unpack("<I", file.read(4))[0] != _masked(crc32c(data)):
            raise UserError(f"{where} is damaged: the record at byte {position - start:,} has another checksum.")
        yield position + 12, data
        position += length + 16


def _masked(crc: int) -> int:
    """Mask a CRC as TFRecord does: rotated by 15 bits plus a constant, because CRCs of data that contain CRCs are weak."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, start, end) of each field of the message at data[start:end].

    start and end delimit the value: bytes without their length prefix, varints with all their bytes.
    """
    while start < end:
        tag, start = _varint(data, start)
        number, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            size, start = _varint(data, start)
            after = start + size
        elif kind == _VARINT:
            after = _varint(data, start)[1]
        elif kind in (_FIXED64, _FIXED32):
            after = start + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"its protocol buffer has a field of kind {kind}")
        if after > end:
            raise ValueError("its protocol buffer is cut off")
        yield number, start, after
        start = after


def _integers(data: bytes, position: int, end: int) -> Iterator[int]:
    """Yields the int64s of a field, packed or single."""
    while position < end:
        value, position = _varint(data, position)
        yield value - 2**64 if value >= 2**63 else value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns (value, position after it)."""
    value, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
