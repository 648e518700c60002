"""Reads TFRecord files of tf.train.Example, as which DMLab is published, without TensorFlow.

A file is a sequence of records: length (u64), masked CRC-32C of the length, data, masked CRC-32C of the data, all
little-endian. An Example is a protocol buffer: a map from names to lists of bytes, floats or int64s.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

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


def features(data: bytes) -> dict[str, Sequence[Any]]:
    """Returns the values of each feature of a record that has any. Raises google.protobuf.message.DecodeError if data
    is not an Example.
    """
    found = _EXAMPLE.FromString(data).features.feature.items()
    return {name: getattr(feature, kind).value for name, feature in found if (kind := feature.WhichOneof("kind"))}


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
            raise UserError(f"{where} is damaged in the record at byte {offset - 12 - start:,}. Fetch it again.")
        yield offset, data
        file.seek(offset + length + 4)


def _masked_crc(data: bytes) -> bytes:
    """The CRC as TFRecord masks it: rotated by 15 bits plus a constant, because CRCs of data that contain CRCs are
    weak.
    """
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF)
