"""Readers of source data sets stored as image files, with labels in names, lists or annotations.

Each takes the files of the data set and the task, and returns the task's `Original`.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from data_tools.vtab.datasets import UNREADABLE
from data_tools.vtab.readers import convert, labels
from data_tools.vtab.readers.arrays import mat
from data_tools.vtab.readers.files import DatasetFiles, FileLocation
from data_tools.vtab.readers.original import Original, Pool
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.experiment.vtab_tasks import Task

_CALTECH_TRAIN = "train.txt"
_CALTECH_PER_CLASS, _CALTECH_SEED = 30, 1234
_KITTI_SEED, _KITTI_PERCENT = 123, 10
_SUN_LISTS = {"train": "sun397_tfds_tr.txt", "validation": "sun397_tfds_va.txt", "test": "sun397_tfds_te.txt"}


def caltech101(files: DatasetFiles, task: Task) -> Original:
    """101_ObjectCategories/<class>/image_0001.jpg; classes are the names of folders in lower case."""
    places = {key: place for key, place in files.below("101_ObjectCategories").items() if key.endswith(".jpg")}
    by_folder: dict[str, list[str]] = defaultdict(list)
    for key in places:
        by_folder[key.partition("/")[0]].append(key)
    classes = sorted(folder.lower() for folder in by_folder)
    notes = []
    if files.find(_CALTECH_TRAIN):
        train = set(files.text(_CALTECH_TRAIN).split())
        if missing := train - places.keys():
            raise UserError(f"{files.folder}: {_CALTECH_TRAIN} names {min(missing)}, which is missing.")
    else:
        train = _caltech_by_sorted_names(by_folder)
        notes.append(
            # Notes are part of dataset.json: their text must not change.
            "the 30 training images of each class are drawn from sorted names: the official draw is from the order in "
            f"which a disk listed them, so these are others ({_CALTECH_TRAIN} may name the official ones)"
        )
    pools = {"train": [key for key in places if key in train], "test": [key for key in places if key not in train]}
    return Original(classes, {name: _pool(keys, places, _folder_class(classes)) for name, keys in pools.items()}, notes)


def _caltech_by_sorted_names(by_folder: dict[str, list[str]]) -> set[str]:
    """A random draw as in tensorflow_datasets, from sorted names of images. (Its own draw includes tmp, which is
    not an image.)
    """
    state = np.random.RandomState(_CALTECH_SEED)
    train: set[str] = set()
    for folder in sorted(by_folder):
        if len(by_folder[folder]) < _CALTECH_PER_CLASS:
            raise UserError(
                f"caltech101: class {folder} has only {counted(len(by_folder[folder]), 'image')} of 30 to train on."
            )
        train |= set(state.choice(sorted(by_folder[folder]), _CALTECH_PER_CLASS, replace=False).tolist())
    return train


def dtd(files: DatasetFiles, task: Task) -> Original:
    """dtd/images/<class>/<name>.jpg, and the lists of the first of ten folds."""
    places = files.below("dtd/images")
    classes = sorted({key.partition("/")[0] for key in places if key.endswith(".jpg")})
    lists = {"train": "train1", "validation": "val1", "test": "test1"}
    pools = {name: files.text(f"dtd/labels/{part}.txt").split() for name, part in lists.items()}
    return Original(classes, {name: _pool(keys, places, _folder_class(classes)) for name, keys in pools.items()})


def flowers102(files: DatasetFiles, task: Task) -> Original:
    """jpg/image_00001.jpg; ids of each split in setid.mat, labels of all images, from 1, in imagelabels.mat."""
    places = files.below("jpg")
    of_image = mat(files.plain("imagelabels.mat"), "labels").ravel()
    pools = {}
    for name, part in {"train": "trnid", "validation": "valid", "test": "tstid"}.items():
        numbers = mat(files.plain("setid.mat"), part).ravel().tolist()
        label_of = {f"image_{number:05d}.jpg": int(of_image[number - 1]) - 1 for number in numbers}
        pools[name] = _pool(list(label_of), places, label_of.__getitem__)
    return Original([str(number) for number in range(task.num_classes)], pools)


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
        pools[pool] = _pool(list(label_of), places, label_of.__getitem__)
    return Original([names.get(label, str(label)) for label in range(task.num_classes)], pools)


def sun397(files: DatasetFiles, task: Task) -> Original:
    """SUN397/<letter>/<class>/.../sun_*.jpg, split by tensorflow_datasets' three lists of /<letter>/<class>/..."""
    places = {f"/{name}": place for name, place in files.below("SUN397").items()}
    pools = {name: files.text(file).split() for name, file in _SUN_LISTS.items()}
    classes = sorted({key.rpartition("/")[0] for keys in pools.values() for key in keys})
    label_of = {name: label for label, name in enumerate(classes)}
    pools["train"] = [key for key in pools["train"] if key != UNREADABLE]
    return Original(
        classes,
        {name: _pool(keys, places, lambda key: label_of[key.rpartition("/")[0]]) for name, keys in pools.items()},
        convert=convert.sun397,
    )


def eurosat(files: DatasetFiles, task: Task) -> Original:
    """2750/<Class>/<Class>_<number>.jpg (EuroSAT_RGB/... in the newer archive), all in one pool."""
    return _class_folders(files.below("2750", "EuroSAT_RGB"))


def resisc45(files: DatasetFiles, task: Task) -> Original:
    """NWPU-RESISC45/<class>/<class>_<number>.jpg, all in one pool."""
    return _class_folders(files.below("NWPU-RESISC45"))


def _class_folders(found: dict[str, FileLocation]) -> Original:
    """Keys are <class>_<file name>."""
    images = {name: place for name, place in found.items() if name.endswith(".jpg") and name.count("/") == 1}
    classes = sorted({name.partition("/")[0] for name in images})
    places = {name.replace("/", "_", 1): place for name, place in images.items()}
    label_of = {name.replace("/", "_", 1): classes.index(name.partition("/")[0]) for name in images}
    return Original(classes, {"train": _pool(list(places), places, label_of.__getitem__)})


def retinopathy(files: DatasetFiles, task: Task) -> Original:
    """train/<name>.jpeg and test/<name>.jpeg; levels in two tables. The public part of the test set is the validation
    set.
    """
    rows = {"train": _table(files, "trainLabels.csv"), "test": _table(files, "retinopathy_solution.csv")}
    pools = {}
    for pool, folder, usage in (
        ("train", "train", None),
        ("validation", "test", "Public"),
        ("test", "test", "Private"),
    ):
        level_of = {row["image"]: int(row["level"]) for row in rows[folder] if usage is None or row["Usage"] == usage}
        places = {
            name.removesuffix(".jpeg"): place for name, place in files.below(folder).items() if name.endswith(".jpeg")
        }
        pools[pool] = _pool(list(level_of), places, level_of.__getitem__)
    return Original([str(level) for level in range(task.num_classes)], pools, convert=convert.retinopathy)


def clevr(files: DatasetFiles, task: Task) -> Original:
    """CLEVR_v1.0/images/{train,val}/<name>.png, and the objects of each in
    CLEVR_v1.0/scenes/CLEVR_<part>_scenes.json.
    """
    is_count = task.name == "clevr_count"
    pools = {}
    for pool, part in {"train": "train", "validation": "val"}.items():
        label_of = {}
        for scene in json.loads(files.text(f"scenes/CLEVR_{part}_scenes.json"), object_hook=_needed)["scenes"]:
            objects = scene["objects"]
            label_of[scene["image_filename"]] = (
                labels.clevr_count(len(objects))
                if is_count
                else labels.clevr_distance(thing["pixel_coords"][2] for thing in objects)
            )
        pools[pool] = _pool(list(label_of), files.below(f"images/{part}"), label_of.__getitem__)
    return Original(labels.COUNTS if is_count else labels.DEPTHS, pools)


def _needed(part: dict[str, Any]) -> dict[str, Any]:
    """The used fields of a scene or an object: all fields would take gigabytes."""
    return {name: part[name] for name in ("scenes", "objects", "image_filename", "pixel_coords") if name in part}


def kitti(files: DatasetFiles, task: Task) -> Original:
    """training/image_2/<number>.png and training/label_2/<number>.txt, split by video, according to mapping/ of the
    devkit.
    """
    places = {name: place for name, place in files.below("training/image_2").items() if name.endswith(".png")}
    annotations = files.below("training/label_2")
    numbers = _kitti_numbers(files.text("mapping/train_rand.txt"), files.text("mapping/train_mapping.txt"))
    pools = {}
    for pool, members in numbers.items():
        keys = [f"{number:06d}.png" for number in members]
        texts = files.read(_all(annotations, [key.replace(".png", ".txt") for key in keys]))
        label_of = {key: _kitti_label(text.decode()) for key, text in zip(keys, texts, strict=True)}
        pools[pool] = _pool(keys, places, label_of.__getitem__)
    return Original(labels.DISTANCES, pools)


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


def _kitti_label(annotation: str) -> int:
    """Label of an image. Its lines: type, truncated, occluded, alpha, box (4), size (3), x, y, z, rotation."""
    objects = [line.split(" ") for line in annotation.splitlines()]
    return labels.kitti_distance(float(values[13]) for values in objects if values[0] in labels.VEHICLES)


def _table(files: DatasetFiles, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files.text(name))))


def _folder_class(classes: list[str]) -> Callable[[str], int]:
    label_of = {name: label for label, name in enumerate(classes)}
    return lambda key: label_of[key.partition("/")[0].lower()]


def _pool(keys: list[str], places: dict[str, FileLocation], label: Callable[[str], int]) -> Pool:
    found = _all(places, keys)
    return Pool(keys, np.array([label(key) for key in keys], np.int64), found)


def _all(places: dict[str, FileLocation], names: list[str]) -> list[FileLocation]:
    if missing := [name for name in names if name not in places]:
        raise UserError(
            f"{len(missing):,} of {counted(len(names), 'image')} are missing, such as {missing[0]}. Is a part of an"
            " archive missing?"
        )
    return [places[name] for name in names]
