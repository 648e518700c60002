"""Reads TFRecord files of tf.train.Example without TensorFlow: DMLab as published, and any data set as prepared by
tensorflow_datasets.

A file is a sequence of records: length (u64), masked CRC-32C of the length, data, masked CRC-32C of the data, all
little-endian. An Example is a protocol buffer: a map from names to lists of bytes, floats or int64s.

Prepared files are named <name>/<version>/<name>-<split>.tfrecord-00000-of-00016. Their records are in the order of the
hash, so each key is checked against its position; in versions without keys (which are numbers), the position gives the
key. Images are read by offset, as they are except for dSprites'.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google_crc32c import value as crc32c

from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.readers import convert
from data_tools.vtab.readers.files import DatasetFiles, FileLocation, Original, Pool, sources_of
from data_tools.vtab.readers.labels import RULES, VEHICLES
from data_tools.vtab.split import hashed_order
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath, file_size, to_path
from pipeline.experiment.vtab_tasks import Task

# Features of which a record has one: the name that is its key, or is in it.
_NAMES = ("file_name", "image/file_name", "filename", "name", "id")
# Data sets whose keys are numbers, which the feature id has with other text: train_00012 or 000012.
_NUMBERED = ("cifar100", "svhn", "dsprites", "smallnorb")
# Folders of Caltech101 whose name is not in lower case, by the name of their class.
_CALTECH_FOLDERS = {
    name.lower(): name for name in ("BACKGROUND_Google", "Faces", "Faces_easy", "Leopards", "Motorbikes")
}
# Tasks whose label is not the feature `label`.
_LABELS = {
    "dsprites_location": "label_x_position",
    "dsprites_orientation": "label_orientation",
    "smallnorb_azimuth": "label_azimuth",
    "smallnorb_elevation": "label_elevation",
}


def dmlab(files: DatasetFiles, task: Task) -> Original:
    """dmlab-{train,validation,test}.tfrecord*: image (JPEG), filename (the key), label. Read inside the tar."""
    pools = {}
    for pool in ("train", "validation", "test"):
        samples = []
        for shard in sorted(files.matching(f"dmlab-{pool}.tfrecord*")):
            path = to_path(shard.archive) if shard.archive else files.folder / shard.name
            samples += _samples(path, shard.offset, shard.size, shard.name, task, [])
        pools[pool] = _pool(samples, [str(key) for key, *_ in samples])
    return Original(pools)


def read(task: Task, versions: AnyPath) -> Original:
    """Read all records of a prepared data set. versions: its folder, which contains the versions.

    Raises UserError if the right version is missing or damaged.
    """
    dataset = DATASETS[task.dataset]
    folder, notes = _version(task, versions)
    names = folder / "label.labels.txt"
    classes = names.read_bytes().decode(errors="replace").split("\n")[:-1] if names.is_file() else []
    pools = {}
    for pool in dataset.counts:
        samples = []
        for path, expected in _shards(folder, dataset.tfds.partition("/")[0], pool):
            found = _samples(path, 0, file_size(path), path.name, task, classes)
            samples += found
            if len(found) != expected:
                raise UserError(f"{path} has {counted(len(found), 'record')}, but dataset_info.json says {expected:,}.")
        keys = [key for key, *_ in samples]
        if None in keys:
            # Notes are part of dataset.json: their text must not change.
            notes.append(f"the records of {pool!r} have no keys in this version: they are told by the records' order")
        pools[pool] = _pool(samples, _checked(keys, pool, folder))
    return Original(pools, classes, notes, convert.dsprites if task.dataset == "dsprites" else None)


def _version(task: Task, folder: AnyPath) -> tuple[AnyPath, list[str]]:
    """Returns (newest version with the major number of the official task, else of a later one; notes). Raises
    UserError.
    """
    dataset = DATASETS[task.dataset]
    for major, note in dataset.tfds_versions.items():
        found = [path for path in folder.iterdir() if re.fullmatch(rf"{major}\.\d+\.\d+", path.name)]
        if found:
            return max(found, key=lambda path: [*map(int, path.name.split("."))]), [note] * bool(note)
    raise UserError(f"{folder} has no version {min(dataset.tfds_versions)}.x.y. {sources_of(dataset)}")


def _shards(folder: AnyPath, name: str, pool: str) -> list[tuple[AnyPath, int]]:
    """Returns (file, number of its records) of a pool, in order."""
    path = folder / "dataset_info.json"
    # Numbers are strings, as in JSON of protocol buffers.
    splits = json_record.parse(path.read_bytes(), dict[str, Any], str(path))["splits"]
    counts = [int(length) for split in splits if split["name"] == pool for length in split["shardLengths"]]
    files = [folder / f"{name}-{pool}.tfrecord-{n:05d}-of-{len(counts):05d}" for n in range(len(counts))]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]} is missing. Prepare {name} again.")
    return [*zip(files, counts, strict=True)]


def _checked(keys: list[str | None], pool: str, folder: AnyPath) -> list[str]:
    """Returns the keys of a pool's records; records without keys get numbers in the order of the hash. Raises
    UserError.
    """
    known = [str(number) for number in range(len(keys))] if None in keys else [str(key) for key in keys]
    order = hashed_order(pool, known)
    if None in keys:
        return [known[row] for row in order.tolist()]
    if wrong := np.flatnonzero(order != np.arange(len(keys))).tolist():
        raise UserError(
            f"{folder}: the records of {pool!r} are not in the order of the hash of their keys; record {wrong[0]:,} is "
            f"{known[wrong[0]]!r}. Prepare it again, with the default shuffling."
        )
    return known


def _pool(samples: list[tuple[str | None, int, FileLocation]], keys: list[str]) -> Pool:
    return Pool(keys, np.array([label for _, label, _ in samples], np.int64), [place for *_, place in samples])


# ---------------------------------------------------------------------- records
def _samples(
    path: AnyPath, start: int, size: int, name: str, task: Task, classes: list[str]
) -> list[tuple[str | None, int, FileLocation]]:
    """(key, label, place of the image) of all records of the file at path[start : start + size]."""
    found = []
    with path.open("rb") as file:
        for number, (offset, data) in enumerate(records(file, start, start + size, f"{path.parent / name}")):
            example = features(data)
            (image,) = example["image"]
            place = FileLocation(f"{name}, record {number}", str(path), offset + data.find(image), len(image))
            found.append((_key(example, task.dataset, classes), _label(example, task), place))
    return found


def _key(example: Mapping[str, Sequence[Any]], dataset: str, classes: list[str]) -> str | None:
    """Returns the key of a record; None if it has none."""
    names = [example[feature][0].decode() for feature in _NAMES if feature in example]
    if dataset in _NUMBERED:
        return str(int(names[0].rpartition("_")[2])) if names else None
    (name,) = names
    if dataset == "caltech101":
        folder = classes[example["label"][0]]
        return f"{_CALTECH_FOLDERS.get(folder, folder)}/{name}"
    # AnnualCrop_1.jpg -> AnnualCrop_AnnualCrop_1.jpg
    return f"{name.rpartition('_')[0]}_{name}" if dataset in ("eurosat", "resisc45") else name


def _label(example: Mapping[str, Sequence[Any]], task: Task) -> int:
    value: Any
    if task.dataset == "clevr":
        value = example["objects/pixel_coords"][2::3]
    elif task.dataset == "kitti":  # z of each object of type Car, Van or Truck (0, 1 and 2). There may be no object.
        objects = zip(example.get("objects/location", ())[2::3], example.get("objects/type", ()), strict=True)
        value = [z for z, kind in objects if kind < len(VEHICLES)]
    else:
        (value,) = example[_LABELS.get(task.name, "label")]
    return int(RULES[task.name](value)) if task.name in RULES else value


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
