"""Reads TFRecord files of tf.train.Example without TensorFlow: records, checksums, features.

A file is a sequence of records: length (u64), masked CRC-32C of the length, data, masked CRC-32C of the data, all
little-endian. An Example is a protocol buffer: a map from names to lists of bytes, floats or int64s.
"""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google_crc32c import value as crc32c

from pipeline.base.errors import UserError

_MASK_DELTA = 0xA282EAD8
# tensorflow/core/example/{example,feature}.proto
_PROTO = """
    name: "example.proto" package: "tf" syntax: "proto3"
    message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
    message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
    message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
    message_type {
        name: "Feature" oneof_decl { name: "kind" }
        field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tf.BytesList" oneof_index: 0 }
        field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tf.FloatList" oneof_index: 0 }
        field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tf.Int64List" oneof_index: 0 }
    }
    message_type {
        name: "Features"
        field {
            name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED type_name: ".tf.Features.FeatureEntry"
        }
        nested_type {
            name: "FeatureEntry" options { map_entry: true }
            field { name: "key" number: 1 type: TYPE_STRING }
            field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tf.Feature" }
        }
    }
    message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tf.Features" } }
"""
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
_EXAMPLE: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("tf.Example"))


class Example:
    """The features of one record, `data`."""

    def __init__(self, data: bytes) -> None:
        """Raises google.protobuf.message.DecodeError if data is not an Example."""
        self.data = data
        self._features = _EXAMPLE.FromString(data).features.feature

    def __contains__(self, name: str) -> bool:
        return name in self._features

    def bytes(self, name: str) -> bytes:
        """Returns the only bytes value of a feature. Raises ValueError if there is not one."""
        (value,) = self._features[name].bytes_list.value
        return value

    def text(self, name: str) -> str:
        """Returns the only bytes value of a feature, as text."""
        return self.bytes(name).decode()

    def integer(self, name: str) -> int:
        """Returns the only int64 of a feature. Raises ValueError if there is not one."""
        (value,) = self._features[name].int64_list.value
        return value

    def list(self, name: str) -> np.ndarray:
        """Returns all numbers of a feature, float32 or int64; none if it is missing, which stands for an empty
        sequence.
        """
        feature = self._features[name]
        floats = feature.float_list.value
        return np.array(floats, np.float32) if floats else np.array(feature.int64_list.value, np.int64)


def records(file: BinaryIO, start: int, end: int, where: str) -> Iterator[tuple[int, bytes]]:
    """Yields (offset of the data in the file, data) of every record of the TFRecord file at file[start:end].

    Raises UserError for a truncated record or a wrong checksum. where: name of the file in errors.
    """
    file.seek(start)
    while file.tell() < end:
        header = file.read(12)
        offset, length = file.tell(), int.from_bytes(header[:8], "little")
        is_whole = header[8:] == _masked_crc(header[:8]) and offset + length + 4 <= end
        data = file.read(length) if is_whole else b""
        if not is_whole or file.read(4) != _masked_crc(data):
            raise UserError(
                f"{where} is damaged in the record at byte {offset - 12 - start:,}. Make or fetch it again."
            )
        yield offset, data
        file.seek(offset + length + 4)


def _masked_crc(data: bytes) -> bytes:
    """The CRC as TFRecord masks it: rotated by 15 bits plus a constant, because CRCs of data that contain CRCs are
    weak.
    """
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF)
