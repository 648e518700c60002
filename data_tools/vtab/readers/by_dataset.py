"""A reader for each of the 16 source data sets, which bears its name.

Each takes the files of the data set and the task, and returns the task's `Original`. Of images stored as pixel arrays
(binary records, MATLAB, HDF5, small NORB's matrices), only requested ones are read, so that memory does not grow with
the data set.
"""

import csv
import io
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import h5py
import numpy as np
from scipy.io import loadmat

from data_tools.sources.layouts.archive import damage_named
from data_tools.sources.reader import PIXELS
from data_tools.vtab.datasets import UNREADABLE
from data_tools.vtab.readers import convert, labels
from data_tools.vtab.readers.files import DatasetFiles, FileLocation, Original, Pixels, Pool
from data_tools.vtab.readers.tfrecords import features, records
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.experiment.vtab_tasks import Task

_CALTECH_TRAIN = "train.txt"
_CALTECH_PER_CLASS, _CALTECH_SEED = 30, 1234
_KITTI_SEED, _KITTI_PERCENT = 123, 10
_CIFAR_PIXELS = 3 * 32 * 32
_CIFAR_RECORD = 2 + _CIFAR_PIXELS  # Coarse label, fine label, red, green, blue.
_DSPRITES_COLUMNS = {"dsprites_orientation": 3, "dsprites_location": 4}  # Of latents/classes.
_NORB_TYPES = {507333717: "<u1", 507333716: "<i4"}
_NORB_COLUMNS = {"smallnorb_elevation": 1, "smallnorb_azimuth": 2}  # Of info.
_BLOCK_BYTES = 2**27


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
        level_of = {row["image"]: int(row["level"]) for row in rows if row.get("Usage") == usage}
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
        rule = getattr(labels, task.name)
        label_of = {name: rule(of_objects) for name, of_objects in depths.items()}
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
            distances = [float(values[13]) for values in objects if values[0] in labels.VEHICLES]
            label_of[f"{number:06d}.png"] = labels.kitti_distance(distances)
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


def dmlab(files: DatasetFiles, task: Task) -> Original:
    """dmlab-{train,validation,test}.tfrecord*: image (JPEG), filename (the key), label. Read inside the tar."""
    pools = {}
    for pool in ("train", "validation", "test"):
        label_of, places = {}, {}
        for shard in sorted(files.matching(f"dmlab-{pool}.tfrecord*")):
            path = to_path(shard.archive) if shard.archive else files.folder / shard.name
            with path.open("rb") as file:
                found = records(file, shard.offset, shard.offset + shard.size, f"{path.parent / shard.name}")
                for number, (offset, data) in enumerate(found):
                    (image,), (key,), (label,) = map(features(data).__getitem__, ("image", "filename", "label"))
                    name, place = f"{shard.name}, record {number}", (offset + data.find(image), len(image))
                    label_of[key.decode()] = label
                    places[key.decode()] = FileLocation(name, str(path), *place)
        pools[pool] = _pool(label_of, places)
    return Original(pools)


def cifar100(files: DatasetFiles, task: Task) -> Original:
    """cifar-100-binary/{train,test}.bin; keys are record numbers."""
    pools = {}
    for pool in ("train", "test"):
        place = files.place(f"{pool}.bin")
        records = np.frombuffer(files.read([place])[0], np.uint8).reshape(-1, _CIFAR_RECORD)
        starts = range(place.offset + 2, place.offset + place.size, _CIFAR_RECORD)
        images = [FileLocation(place.name, place.archive, start, _CIFAR_PIXELS, PIXELS) for start in starts]
        pools[pool] = _numbered(records[:, 1], images)
    return Original(pools, files.text("fine_label_names.txt").split())


def svhn(files: DatasetFiles, task: Task) -> Original:
    """{train,test}_32x32.mat: X (32, 32, 3, n), y (n, 1) from 1 to 10, where 10 is the digit 0; keys are image
    numbers.
    """
    pools = {}
    for pool in ("train", "test"):
        path = files.plain(f"{pool}_32x32.mat")
        pools[pool] = _numbered(vector(path, "y") % 10, partial(_images, path, _mat, "X", None))
    return Original(pools)


def patch_camelyon(files: DatasetFiles, task: Task) -> Original:
    """camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5.gz: x (n, 96, 96, 3), y (n, 1, 1, 1); keys are
    <part>_<number>.
    """
    pools = {}
    for pool, part in {"train": "train", "validation": "valid", "test": "test"}.items():
        stem = f"camelyonpatch_level_2_split_{part}"
        images, tumour = files.plain(f"{stem}_x.h5"), files.plain(f"{stem}_y.h5")
        pools[pool] = _numbered(
            _all(tumour, _hdf5, "y").ravel(), partial(_images, images, _hdf5, "x", None), f"{part}_"
        )
    return Original(pools, ["no tumour", "tumour"])


def dsprites(files: DatasetFiles, task: Task) -> Original:
    """imgs (n, 64, 64) of 0 and 1, latents/classes (n, 6); keys are image numbers."""
    path = files.plain("dsprites_*.hdf5")
    column = _all(path, _hdf5, "latents/classes")[:, _DSPRITES_COLUMNS[task.name]]
    of_image = getattr(labels, task.name)(column)
    return Original({"train": _numbered(of_image, partial(_images, path, _hdf5, "imgs", _white))})


def _white(sprites: np.ndarray) -> np.ndarray:
    return sprites * np.uint8(255)


def smallnorb(files: DatasetFiles, task: Task) -> Original:
    """smallnorb-*-{training,testing}-{dat,info}.mat.gz, the first of two cameras; keys are image numbers."""
    pools = {}
    for pool, part in {"train": "training", "test": "testing"}.items():
        stem = f"smallnorb-*-{part}"
        column = _all(files.plain(f"{stem}-info.mat"), _norb)[:, _NORB_COLUMNS[task.name]]
        images = partial(_images, files.plain(f"{stem}-dat.mat"), _norb, "", lambda cameras: cameras[:, 0])
        # Azimuth is in units of 10 degrees, and always even.
        pools[pool] = _numbered(column // 2 if task.name == "smallnorb_azimuth" else column, images)
    return Original(pools)


# ---------------------------------------------------------------------- pools
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


# ---------------------------------------------------------------------- arrays in files
# Each takes a file that is open, and the name of an array in it: returns what has a shape, and is sliced by rows.
def _hdf5(file: BinaryIO, name: str) -> h5py.Dataset:
    return h5py.File(file, "r")[name]


def _mat(file: BinaryIO, name: str) -> np.ndarray:
    """The last axis becomes the first."""
    return np.moveaxis(loadmat(file, variable_names=[name])[name], -1, 0)


def _norb(file: BinaryIO, name: str) -> np.memmap:
    """The only matrix of a file. Its header, in int32: magic number, number of dimensions, at least three
    dimensions.
    """
    magic, num_dims = np.frombuffer(file.read(8), "<i4").tolist()
    dims = np.frombuffer(file.read(4 * max(num_dims, 3)), "<i4").tolist()
    return np.memmap(file, _NORB_TYPES[magic], "r", file.tell(), tuple(dims[:num_dims]))


_Open = Callable[[BinaryIO, str], Any]


# The readers of MATLAB and HDF5 files raise exceptions of any kind.
def _all(path: AnyPath, open_array: _Open, name: str = "") -> np.ndarray:
    with damage_named(path, Exception), path.open("rb") as file:
        return open_array(file, name)[:]


def vector(path: AnyPath, name: str) -> np.ndarray:
    """Read a vector of a MATLAB file. Raises UserError for a damaged file or a missing array."""
    return _all(path, _mat, name).ravel()


def _images(
    path: AnyPath,
    open_array: _Open,
    name: str,
    change: Callable[[np.ndarray], np.ndarray] | None,
    rows: np.ndarray,
    num_labels: int,
) -> Iterator[np.ndarray]:
    """Yields some rows, ascending, of an array of images. Raises UserError if it has not as many rows as labels.

    change: applied to each block of rows.
    """
    with damage_named(path, Exception), path.open("rb") as file:
        images = open_array(file, name)
        if images.shape[0] != num_labels:
            raise UserError(
                f"{path} has {counted(images.shape[0], 'image')}, but there are {counted(num_labels, 'label')} for it."
                " Is it the file of another split, or of another version? Fetch images and labels again."
            )
        # A chunk of HDF5 may hold few pixels of very many images: all requested images of a chunk are read at once.
        chunk = (getattr(images, "chunks", None) or [1])[0]
        block = min(chunk, max(_BLOCK_BYTES // math.prod(images.shape[1:]), 1))
        for wanted in np.split(rows, np.flatnonzero(np.diff(rows // block)) + 1):
            first, last = int(wanted[0]), int(wanted[-1])
            found = images[first : last + 1][wanted - first]
            yield from change(found) if change else found


def _numbered(of_image: np.ndarray, images: list[FileLocation] | Pixels, prefix: str = "") -> Pool:
    """A pool whose keys are numbers."""
    return Pool([f"{prefix}{number}" for number in range(len(of_image))], of_image.astype(np.int64), images)
