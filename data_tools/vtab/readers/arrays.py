"""Readers of source data sets stored as pixel arrays: binary records, MATLAB, HDF5, small NORB's matrices.

Only requested images are read, so that memory does not grow with the data set.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import h5py
import numpy as np
from scipy.io import loadmat

from data_tools.sources.layouts.archive import damage_named
from data_tools.sources.reader import PIXELS
from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.readers.files import DatasetFiles, FileLocation, Original, Pixels, Pool
from data_tools.vtab.readers.labels import RULES
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath
from pipeline.experiment.vtab_tasks import Task

_CIFAR_PIXELS = 3 * 32 * 32
_CIFAR_RECORD = 2 + _CIFAR_PIXELS  # Coarse label, fine label, red, green, blue.
_DSPRITES_COLUMNS = {"dsprites_orientation": 3, "dsprites_location": 4}  # Of latents/classes.
_NORB_TYPES: dict[int, np.dtype] = {507333717: np.dtype(np.uint8), 507333716: np.dtype("<i4")}
_NORB_COLUMNS = {"smallnorb_elevation": 1, "smallnorb_azimuth": 2}  # Of info.
_BLOCK_BYTES = 2**27


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
    path = files.plain(DATASETS["dsprites"].files[0].name)
    column = _all(path, _hdf5, "latents/classes")[:, _DSPRITES_COLUMNS[task.name]]
    return Original({"train": _numbered(RULES[task.name](column), partial(_images, path, _hdf5, "imgs", _white))})


def _white(sprites: np.ndarray) -> np.ndarray:
    return sprites * np.uint8(255)


def smallnorb(files: DatasetFiles, task: Task) -> Original:
    """smallnorb-*-{training,testing}-{dat,info}.mat.gz, the first of two cameras; keys are image numbers."""
    pools = {}
    for pool, part in {"train": "training", "test": "testing"}.items():
        stem = next(f.name for f in DATASETS["smallnorb"].files if part in f.name).rpartition("-")[0]
        column = _all(files.plain(f"{stem}-info.mat"), _norb)[:, _NORB_COLUMNS[task.name]]
        images = partial(_images, files.plain(f"{stem}-dat.mat"), _norb, "", lambda cameras: cameras[:, 0])
        # Azimuth is in units of 10 degrees, and always even.
        pools[pool] = _numbered(column // 2 if task.name == "smallnorb_azimuth" else column, images)
    return Original(pools)


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
