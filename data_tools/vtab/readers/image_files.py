"""Readers of source data sets stored as image files, with labels in names, lists or annotations.

Each takes the files of the data set and the task, and returns the task's `Original`.
"""

import csv
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data_tools.vtab.datasets import UNREADABLE
from data_tools.vtab.readers import convert
from data_tools.vtab.readers.arrays import vector
from data_tools.vtab.readers.files import DatasetFiles, FileLocation, Original, Pool
from data_tools.vtab.readers.labels import RULES, VEHICLES
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.experiment.vtab_tasks import Task

_CALTECH_TRAIN = "train.txt"
_CALTECH_PER_CLASS, _CALTECH_SEED = 30, 1234
_KITTI_SEED, _KITTI_PERCENT = 123, 10


def caltech101(files: DatasetFiles, task: Task) -> Original:
    """101_ObjectCategories/<class>/image_0001.jpg; classes are the names of folders in lower case."""
    places = {key: place for key, place in files.below("101_ObjectCategories").items() if key.endswith(".jpg")}
    notes = []
    if files.find(_CALTECH_TRAIN):
        train = set(files.text(_CALTECH_TRAIN).split())
    else:
        train = _caltech_by_sorted_names(places)
        notes.append(
            # Notes are part of dataset.json: their text must not change.
            "the 30 training images of each class are drawn from sorted names: the official draw is from the order in "
            f"which a disk listed them, so these are others ({_CALTECH_TRAIN} may name the official ones)"
        )
    pools = {"train": sorted(train), "test": sorted(places.keys() - train)}
    return replace(_by_class(pools, places, lambda key: _folder(key).lower()), notes=notes)


def _caltech_by_sorted_names(keys: Iterable[str]) -> set[str]:
    """A random draw as in tensorflow_datasets, from sorted names of images. (Its own draw includes tmp, which is
    not an image.)
    """
    state = np.random.RandomState(_CALTECH_SEED)
    train: set[str] = set()
    for _, of_class in itertools.groupby(sorted(keys, key=lambda key: key.split("/")), _folder):
        train |= set(state.choice([*of_class], _CALTECH_PER_CLASS, replace=False).tolist())
    return train


def dtd(files: DatasetFiles, task: Task) -> Original:
    """dtd/images/<class>/<name>.jpg, and the lists of the first of ten folds."""
    lists = {"train": "train1", "validation": "val1", "test": "test1"}
    pools = {pool: files.text(f"dtd/labels/{part}.txt").split() for pool, part in lists.items()}
    return _by_class(pools, files.below("dtd/images"), _folder)


def flowers102(files: DatasetFiles, task: Task) -> Original:
    """jpg/image_00001.jpg; ids of each split in setid.mat, labels of all images, from 1, in imagelabels.mat."""
    places = files.below("jpg")
    of_image = vector(files.plain("imagelabels.mat"), "labels")
    pools = {}
    for pool, part in {"train": "trnid", "validation": "valid", "test": "tstid"}.items():
        numbers = vector(files.plain("setid.mat"), part).tolist()
        label_of = {f"image_{number:05d}.jpg": int(of_image[number - 1]) - 1 for number in numbers}
        pools[pool] = _pool(label_of, places)
    return Original(pools)


def pets(files: DatasetFiles, task: Task) -> Original:
    """images/<name>.jpg; lists of `name class species breed`, classes from 1. Class names are taken from the images'
    names.
    """
    places = files.below("images")
    names: dict[int, str] = {}
    pools = {}
    for pool, part in {"train": "trainval", "test": "test"}.items():
        label_of = {}
        for line in files.text(f"annotations/{part}.txt").splitlines():
            if line.strip() and not line.startswith("#"):
                name, number, *_ = line.split()
                label_of[f"{name}.jpg"] = int(number) - 1
                names[int(number) - 1] = name.rpartition("_")[0]
        pools[pool] = _pool(label_of, places)
    return Original(pools, [names.get(label, str(label)) for label in range(task.num_classes)])


def sun397(files: DatasetFiles, task: Task) -> Original:
    """SUN397/<letter>/<class>/.../sun_*.jpg, split by tensorflow_datasets' three lists of /<letter>/<class>/..."""
    places = {f"/{name}": place for name, place in files.below("SUN397").items()}
    lists = {"train": "tr", "validation": "va", "test": "te"}
    pools = {pool: files.text(f"sun397_tfds_{part}.txt").split() for pool, part in lists.items()}
    return replace(_by_class(pools, places, lambda key: key.rpartition("/")[0]), convert=convert.sun397)


def eurosat(files: DatasetFiles, task: Task) -> Original:
    """EuroSAT_RGB/<Class>/<Class>_<number>.jpg, all in one pool."""
    return _class_folders(files.below("EuroSAT_RGB"))


def resisc45(files: DatasetFiles, task: Task) -> Original:
    """NWPU-RESISC45/<class>/<class>_<number>.jpg, all in one pool."""
    return _class_folders(files.below("NWPU-RESISC45"))


def _class_folders(places: Mapping[str, FileLocation]) -> Original:
    """Keys are <class>_<file name>."""
    names = [name for name in places if name.endswith(".jpg") and name.count("/") == 1]
    name_of = {name.replace("/", "_", 1): name for name in names}
    of_key = {key: places[name] for key, name in name_of.items()}
    return _by_class({"train": [*name_of]}, of_key, lambda key: _folder(name_of[key]))


def retinopathy(files: DatasetFiles, task: Task) -> Original:
    """train/<name>.jpeg and test/<name>.jpeg; levels in two tables. The public part of the test set is the validation
    set.
    """
    pools = {}
    for pool, table, folder, usage in (
        ("train", "trainLabels.csv", "train", None),
        ("validation", "retinopathy_solution.csv", "test", "Public"),
        ("test", "retinopathy_solution.csv", "test", "Private"),
    ):
        rows = csv.DictReader(io.StringIO(files.text(table)))
        level_of = {row["image"]: int(row["level"]) for row in rows if usage is None or row["Usage"] == usage}
        pools[pool] = _pool(level_of, {name.removesuffix(".jpeg"): at for name, at in files.below(folder).items()})
    return Original(pools, convert=convert.retinopathy)


def clevr(files: DatasetFiles, task: Task) -> Original:
    """CLEVR_v1.0/images/{train,val}/<name>.png, and the objects of each in
    CLEVR_v1.0/scenes/CLEVR_<part>_scenes.json.
    """
    pools = {}
    for pool, part in {"train": "train", "validation": "val"}.items():
        scenes = json.loads(files.text(f"scenes/CLEVR_{part}_scenes.json"), object_hook=_needed)["scenes"]
        depths = {scene["image_filename"]: [thing["pixel_coords"][2] for thing in scene["objects"]] for scene in scenes}
        label_of = {name: RULES[task.name](of_objects) for name, of_objects in depths.items()}
        pools[pool] = _pool(label_of, files.below(f"images/{part}"))
    return Original(pools)


def _needed(part: dict[str, Any]) -> dict[str, Any]:
    """The used fields of a scene or an object: all fields would take gigabytes."""
    return {name: part[name] for name in ("scenes", "objects", "image_filename", "pixel_coords") if name in part}


def kitti(files: DatasetFiles, task: Task) -> Original:
    """training/image_2/<number>.png and training/label_2/<number>.txt, split by video, according to mapping/ of the
    devkit.

    Fields of an annotation's lines: type, truncated, occluded, alpha, box (4), size (3), x, y, z, rotation.
    """
    annotations = files.below("training/label_2")
    numbers = _kitti_numbers(files.text("mapping/train_rand.txt"), files.text("mapping/train_mapping.txt"))
    pools = {}
    for pool, members in numbers.items():
        label_of = {}
        texts = files.read([annotations[f"{number:06d}.txt"] for number in members])
        for number, text in zip(members, texts, strict=True):
            objects = [line.split(" ") for line in text.decode().splitlines()]
            distances = [float(values[13]) for values in objects if values[0] in VEHICLES]
            label_of[f"{number:06d}.png"] = RULES[task.name](distances)
        pools[pool] = _pool(label_of, files.below("training/image_2"))
    return Original(pools)


def _kitti_numbers(order: str, mapping: str) -> dict[str, list[int]]:
    """Returns the image numbers of each pool; each video is in one pool only.

    order: line numbers of the mapping, from 1. mapping: lines 'date video frame'.
    """
    lines = mapping.splitlines()
    videos: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(order.split(",")):
        videos[lines[int(line) - 1].split(" ")[1]].append(number)
    num_videos = max(1, _KITTI_PERCENT * len(videos) // 100)
    state = np.random.RandomState(_KITTI_SEED)
    test = set(state.choice(sorted(videos), num_videos, replace=False).tolist())
    validation = set(state.choice(sorted(videos.keys() - test), num_videos, replace=False).tolist())
    pools: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for video, members in videos.items():
        pools["test" if video in test else "validation" if video in validation else "train"] += members
    return pools


def _folder(key: str) -> str:
    return key.partition("/")[0]


def _by_class(
    pools: Mapping[str, Sequence[str]], places: Mapping[str, FileLocation], class_of: Callable[[str], str]
) -> Original:
    """pools: keys of each. class_of: class name of a key; the sorted names are the labels."""
    classes = sorted({class_of(key) for keys in pools.values() for key in keys})
    number = {name: label for label, name in enumerate(classes)}
    found = {pool: {key: number[class_of(key)] for key in keys if key != UNREADABLE} for pool, keys in pools.items()}
    return Original({pool: _pool(label_of, places) for pool, label_of in found.items()}, classes)


def _pool(label_of: Mapping[str, int], places: Mapping[str, FileLocation]) -> Pool:
    if missing := [key for key in label_of if key not in places]:
        raise UserError(
            f"{len(missing):,} of {counted(len(label_of), 'image')} are missing, such as {missing[0]}. Is a part of an"
            " archive missing?"
        )
    return Pool([*label_of], np.array([*label_of.values()], np.int64), [places[key] for key in label_of])
