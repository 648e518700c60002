"""Reads TFRecord files: DMLab as published, and any data set as prepared by tensorflow_datasets.

Prepared files are named <name>/<version>/<name>-<split>.tfrecord-00000-of-00016. Their records are in the order of the
hash, so each key is checked against its position; in versions without keys (which are numbers), the position gives the
key. Images are read by offset, as they are except for dSprites'.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from data_tools.vtab.datasets import DataSet
from data_tools.vtab.readers import convert, labels
from data_tools.vtab.readers.examples import Example, records
from data_tools.vtab.readers.files import DatasetFiles, FileLocation, MissingError, sources_of
from data_tools.vtab.readers.original import Original, Pool
from data_tools.vtab.split import hashed_order
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.atomic import read_bytes
from pipeline.data.storage.bucket import AnyPath, file_size, to_path
from pipeline.experiment.vtab_tasks import Task

# Returns the key of a record, given the class names of the data set; None if the record has no key.
Key = Callable[[Example, list[str]], str | None]
Label = Callable[[Example], int]

# Folders of Caltech101 whose name is not in lower case, by the name of their class.
_CALTECH_FOLDERS = {
    name.lower(): name for name in ("BACKGROUND_Google", "Faces", "Faces_easy", "Leopards", "Motorbikes")
}


def dmlab(files: DatasetFiles, task: Task) -> Original:
    """dmlab-{train,validation,test}.tfrecord*: image (JPEG), filename (the key), label. Read inside the tar."""
    pools = {}
    for pool in ("train", "validation", "test"):
        samples = []
        for shard in files.beginning(f"dmlab-{pool}.tfrecord"):
            path = to_path(shard.archive) if shard.archive else files.folder / shard.name
            samples += _samples(path, shard.offset, shard.size, shard.name, _KEYS["dmlab"], [], _label)
        pools[pool] = _pool(samples, [str(key) for key, *_ in samples])
    return Original([str(number) for number in range(task.num_classes)], pools)


def read(dataset: DataSet, task: Task, versions: AnyPath) -> Original:
    """Read all records of a prepared data set. versions: its folder, which contains the versions.

    Raises MissingError if the right version is missing, UserError if it is damaged.
    """
    folder, notes = _version(dataset, versions)
    names = _label_names(folder)
    pools = {}
    for pool in dataset.counts:
        samples = []
        for path, expected in _shards(folder, dataset.tfds.partition("/")[0], pool):
            label_of = _LABELS.get(task.name, _label)
            found = _samples(path, 0, file_size(path), path.name, _KEYS[dataset.name], names, label_of)
            samples += found
            if len(found) != expected:
                raise UserError(f"{path} has {counted(len(found), 'record')}, but dataset_info.json says {expected:,}.")
        keys = [key for key, *_ in samples]
        if None in keys:
            # Notes are part of dataset.json: their text must not change.
            notes.append(f"the records of {pool!r} have no keys in this version: they are told by the records' order")
        pools[pool] = _pool(samples, _checked(keys, pool, folder))
    return Original(_class_names(task, names), pools, notes, convert.dsprites if dataset.name == "dsprites" else None)


@dataclass(frozen=True)
class _SplitInfo:
    name: str
    shardLengths: list[int | str]  # noqa: N815


@dataclass(frozen=True)
class _DatasetInfo:
    """The part of dataset_info.json that is used here. Numbers are strings, as in JSON of protocol buffers."""

    splits: list[_SplitInfo]


def _samples(
    path: AnyPath, start: int, size: int, name: str, key_of: Key, names: list[str], label_of: Label
) -> list[tuple[str | None, int, FileLocation]]:
    """(key, label, place of the image) of all records of the file at path[start : start + size]."""
    found = []
    with path.open("rb") as file:
        for number, (offset, data) in enumerate(records(file, start, start + size, f"{path.parent / name}")):
            where = f"{name}, record {number}"
            try:
                example = Example(data)
                image = example.bytes("image")
                place = FileLocation(where, str(path), offset + data.find(image), len(image))
                found.append((key_of(example, names), label_of(example), place))
            except (DecodeError, ValueError, IndexError) as error:
                raise UserError(f"{path}: {where} does not have the expected features ({error}).") from None
    return found


def _pool(samples: list[tuple[str | None, int, FileLocation]], keys: list[str]) -> Pool:
    return Pool(keys, np.array([label for _, label, _ in samples], np.int64), [place for *_, place in samples])


def _version(dataset: DataSet, folder: AnyPath) -> tuple[AnyPath, list[str]]:
    """Returns (newest version with the major number of the official task, else of a later one; notes). Raises
    MissingError.
    """
    later = [(dataset.tfds_later.major, [dataset.tfds_later.note])] if dataset.tfds_later else []
    paths: list[AnyPath] = [*folder.iterdir()] if folder.is_dir() else []
    for major, notes in [(dataset.tfds_major, list[str]()), *later]:
        pattern = re.compile(rf"{major}\.(\d+)\.(\d+)")
        found = {tuple(map(int, match.groups())): path for path in paths if (match := pattern.fullmatch(path.name))}
        if found:
            return found[max(found)], notes
    raise MissingError(f"{folder} has no version {dataset.tfds_major}.x.y. {sources_of(dataset)}")


def _shards(folder: AnyPath, name: str, pool: str) -> list[tuple[AnyPath, int]]:
    """Returns (file, number of its records) of a pool, in order."""
    where = f"{folder}/dataset_info.json"
    info = json_record.parse(read_bytes(folder / "dataset_info.json"), _DatasetInfo, where)
    try:
        counts = [int(length) for split in info.splits if split.name == pool for length in split.shardLengths]
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not counts:
        raise UserError(f"{folder} has no split {pool!r}.")
    total = len(counts)
    shards = [(folder / f"{name}-{pool}.tfrecord-{n:05d}-of-{total:05d}", count) for n, count in enumerate(counts)]
    for path, _ in shards:
        if not path.is_file():
            raise UserError(f"{path} is missing. Prepare {name} again.")
    return shards


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


def _label_names(folder: AnyPath) -> list[str]:
    path = folder / "label.labels.txt"
    return read_bytes(path).decode(errors="replace").split("\n")[:-1] if path.is_file() else []


def _class_names(task: Task, names: list[str]) -> list[str]:
    return _NAMES.get(task.name) or names or [str(number) for number in range(task.num_classes)]


def _feature(name: str) -> Key:
    return lambda example, names: example.text(name)


def _number(example: Example, names: list[str]) -> str | None:
    """Returns the number in train_00012 or 000012; None for versions without ids."""
    return str(int(example.text("id").rpartition("_")[2])) if "id" in example else None


def _caltech(example: Example, names: list[str]) -> str:
    name = names[example.integer("label")]
    return f"{_CALTECH_FOLDERS.get(name, name)}/{example.text('image/file_name')}"


def _class_and_name(example: Example, names: list[str]) -> str:
    """AnnualCrop_1.jpg -> AnnualCrop_AnnualCrop_1.jpg"""
    name = example.text("filename")
    return f"{name.rpartition('_')[0]}_{name}"


_KEYS: dict[str, Key] = {
    "caltech101": _caltech,
    "cifar100": _number,
    "dtd": _feature("file_name"),
    "flowers102": _feature("file_name"),
    "pets": _feature("file_name"),
    "sun397": _feature("file_name"),
    "svhn": _number,
    "patch_camelyon": _feature("id"),
    "eurosat": _class_and_name,
    "resisc45": _class_and_name,
    "retinopathy": _feature("name"),
    "clevr": _feature("file_name"),
    "dmlab": _feature("filename"),
    "kitti": _feature("image/file_name"),
    "dsprites": _number,
    "smallnorb": _number,
}


def _label(example: Example) -> int:
    return example.integer("label")


def _vehicles(example: Example) -> np.ndarray:
    """Returns z of each object of type Car, Van or Truck (0, 1 and 2)."""
    return example.list("objects/location")[2::3][example.list("objects/type") < len(labels.VEHICLES)]


# Tasks whose label is not the feature `label`.
_LABELS: dict[str, Label] = {
    "clevr_count": lambda example: labels.clevr_count(len(example.list("objects/color"))),
    "clevr_distance": lambda example: labels.clevr_distance(example.list("objects/pixel_coords")[2::3]),
    "kitti_distance": lambda example: labels.kitti_distance(_vehicles(example)),
    "dsprites_location": lambda example: int(labels.dsprites_location(example.list("label_x_position"))[0]),
    "dsprites_orientation": lambda example: int(labels.dsprites_orientation(example.list("label_orientation"))[0]),
    "smallnorb_azimuth": lambda example: example.integer("label_azimuth"),
    "smallnorb_elevation": lambda example: example.integer("label_elevation"),
}
_NAMES = {
    "clevr_count": labels.COUNTS,
    "clevr_distance": labels.DEPTHS,
    "kitti_distance": labels.DISTANCES,
    "dsprites_location": labels.LOCATIONS,
    "dsprites_orientation": labels.ORIENTATIONS,
    "smallnorb_azimuth": labels.AZIMUTHS,
    "smallnorb_elevation": labels.ELEVATIONS,
}
