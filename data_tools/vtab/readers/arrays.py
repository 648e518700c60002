"""Readers of source data sets stored as pixel arrays: binary records, MATLAB, HDF5, NumPy, small NORB's matrices.

Only requested images are read, block by block, so that memory does not grow with the data set.
"""

import contextlib
import gzip
import math
import zipfile
from collections.abc import Iterator
from typing import IO

import h5py
import numpy as np
from scipy.io import loadmat

from data_tools.sources.layouts.archive import damage_named
from data_tools.sources.reader import PIXELS
from data_tools.vtab.datasets import DATASETS
from data_tools.vtab.readers import labels
from data_tools.vtab.readers.files import DatasetFiles, FileLocation
from data_tools.vtab.readers.original import Original, Pixels, Pool
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath
from pipeline.experiment.vtab_tasks import Task

_CIFAR_PIXELS = 3 * 32 * 32
_CIFAR_RECORD = 2 + _CIFAR_PIXELS  # Coarse label, fine label, red, green, blue.
_DSPRITES_ORIENTATION, _DSPRITES_X = 3, 4  # Columns of latents/classes.
_NORB_TYPES: dict[int, np.dtype] = {507333717: np.dtype(np.uint8), 507333716: np.dtype("<i4")}
_NORB_ELEVATION, _NORB_AZIMUTH = 1, 2  # Columns of info.
_BLOCK_BYTES = 2**27


def cifar100(files: DatasetFiles, task: Task) -> Original:
    """cifar-100-binary/{train,test}.bin; keys are record numbers."""
    pools = {}
    for pool in ("train", "test"):
        place = files.find(f"{pool}.bin")
        if place is None:
            raise files.missing(f"{pool}.bin")
        records = np.frombuffer(files.read([place])[0], np.uint8)
        if len(records) % _CIFAR_RECORD:
            raise UserError(f"{files.folder}: {pool}.bin does not end after a whole record. Fetch it again.")
        fine = records.reshape(-1, _CIFAR_RECORD)[:, 1].astype(np.int64)
        starts = range(place.offset + 2, place.offset + place.size, _CIFAR_RECORD)
        images = [FileLocation(place.name, place.archive, start, _CIFAR_PIXELS, PIXELS) for start in starts]
        pools[pool] = Pool(_numbers(len(fine)), fine, images)
    return Original(files.text("fine_label_names.txt").split(), pools)


def svhn(files: DatasetFiles, task: Task) -> Original:
    """{train,test}_32x32.mat: X (32, 32, 3, n), y (n, 1) from 1 to 10, where 10 is the digit 0; keys are image
    numbers.
    """
    pools = {}
    for pool in ("train", "test"):
        path = files.plain(f"{pool}_32x32.mat")
        digits = mat(path, "y").ravel().astype(np.int64) % 10
        pools[pool] = Pool(_numbers(len(digits)), digits, _of_mat(path, len(digits)))
    return Original([str(digit) for digit in range(10)], pools)


def _of_mat(path: AnyPath, num_labels: int) -> Pixels:
    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
        images = mat(path, "X")
        _check_count(path, images.shape[-1], num_labels)
        for row in rows.tolist():
            yield np.ascontiguousarray(images[..., row])

    return read


# The readers of NumPy, MATLAB and HDF5 files raise exceptions of any kind.
def mat(path: AnyPath, name: str) -> np.ndarray:
    """Read an array of a MATLAB file. Raises UserError for a damaged file or a missing array."""
    with damage_named(path, Exception), path.open("rb") as file:
        arrays = loadmat(file, variable_names=[name])
        if name not in arrays:
            raise ValueError(f"it has no array {name}")
        return arrays[name]


def patch_camelyon(files: DatasetFiles, task: Task) -> Original:
    """camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5.gz: x (n, 96, 96, 3), y (n, 1, 1, 1); keys are
    <part>_<number>.
    """
    pools = {}
    for pool, part in {"train": "train", "validation": "valid", "test": "test"}.items():
        stem = f"camelyonpatch_level_2_split_{part}"
        images, tumour = files.plain(f"{stem}_x.h5"), files.plain(f"{stem}_y.h5")
        with _hdf5(tumour) as file:
            of_image = file["y"][()].ravel().astype(np.int64)
        pixels = _of_hdf5(images, "x", len(of_image))
        pools[pool] = Pool([f"{part}_{number}" for number in range(len(of_image))], of_image, pixels)
    return Original(["no tumour", "tumour"], pools)


def dsprites(files: DatasetFiles, task: Task) -> Original:
    """imgs (n, 64, 64) of 0 and 1, latents/classes (n, 6), as .hdf5 or .npz; keys are image numbers."""
    is_location = task.name == "dsprites_location"
    name = DATASETS["dsprites"].files[0].name
    npz = files.find(name.replace(".hdf5", ".npz"))
    if npz and not files.find(name):
        path = files.folder / npz.name
        with damage_named(path, Exception), path.open("rb") as file, np.load(file) as arrays:
            latents = arrays["latents_classes"]
        images = _of_npz(path, "imgs", len(latents))
    else:
        path = files.plain(name)
        with _hdf5(path) as file:
            latents = file["latents/classes"][()]
        images = _of_hdf5(path, "imgs", len(latents))

    def white(rows: np.ndarray) -> Iterator[np.ndarray]:
        return (pixels * np.uint8(255) for pixels in images(rows))

    column = latents[:, _DSPRITES_X if is_location else _DSPRITES_ORIENTATION]
    of_image = labels.dsprites_location(column) if is_location else labels.dsprites_orientation(column)
    names = labels.LOCATIONS if is_location else labels.ORIENTATIONS
    return Original(names, {"train": Pool(_numbers(len(of_image)), of_image.astype(np.int64), white)})


@contextlib.contextmanager
def _hdf5(path: AnyPath) -> Iterator[h5py.File]:
    with damage_named(path, Exception), path.open("rb") as file, h5py.File(file, "r") as opened:
        yield opened


def _of_hdf5(path: AnyPath, name: str, num_labels: int) -> Pixels:
    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
        with _hdf5(path) as file:
            images = file[name]
            _check_count(path, len(images), num_labels)
            # A chunk may hold few pixels of very many images: all requested images of a chunk are read at once.
            chunk = images.chunks[0] if images.chunks else 1
            block = min(chunk, max(_BLOCK_BYTES // math.prod(images.shape[1:]), 1))
            for wanted in np.split(rows, np.flatnonzero(np.diff(rows // block)) + 1):
                first, last = int(wanted[0]), int(wanted[-1])
                yield from images[first : last + 1][wanted - first]

    return read


def _of_npz(path: AnyPath, name: str, num_labels: int) -> Pixels:
    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
        with (
            damage_named(path, Exception),
            path.open("rb") as file,
            zipfile.ZipFile(file) as arrays,
            arrays.open(f"{name}.npy") as array,
        ):
            # np.load would hold the whole array in memory: 3 GB.
            np.lib.format.read_magic(array)
            shape, _, dtype = np.lib.format.read_array_header_1_0(array)
            _check_count(path, shape[0], num_labels)
            yield from _in_turn(array, shape, dtype, rows, str(path))

    return read


def smallnorb(files: DatasetFiles, task: Task) -> Original:
    """smallnorb-*-{training,testing}-{dat,info}.mat.gz, the first of two cameras; keys are image numbers."""
    is_azimuth = task.name == "smallnorb_azimuth"
    stems = {
        pool: next(f.name for f in DATASETS["smallnorb"].files if part in f.name).rpartition("-")[0]
        for pool, part in (("train", "training"), ("test", "testing"))
    }
    pools = {}
    for pool, stem in stems.items():
        with _norb(files, f"{stem}-info.mat") as (file, where):
            shape, dtype = _norb_header(file, where)
            info = np.frombuffer(file.read(), dtype).reshape(shape)
        # Azimuth is in units of 10 degrees, and always even.
        column = info[:, _NORB_AZIMUTH] // 2 if is_azimuth else info[:, _NORB_ELEVATION]
        pools[pool] = Pool(_numbers(len(info)), column.astype(np.int64), _of_norb(files, f"{stem}-dat.mat", len(info)))
    return Original(labels.AZIMUTHS if is_azimuth else labels.ELEVATIONS, pools)


def _of_norb(files: DatasetFiles, name: str, num_labels: int) -> Pixels:
    def read(rows: np.ndarray) -> Iterator[np.ndarray]:
        with _norb(files, name) as (file, where):
            shape, dtype = _norb_header(file, where)
            _check_count(where, shape[0], num_labels)
            for cameras in _in_turn(file, shape, dtype, rows, where):
                yield cameras[0]

    return read


@contextlib.contextmanager
def _norb(files: DatasetFiles, name: str) -> Iterator[tuple[IO[bytes], str]]:
    """Open a matrix, compressed or not. Yields (file, its path for error messages)."""
    place = files.find(name) or files.find(f"{name}.gz")
    if place is None:
        raise files.missing(f"{name}.gz")
    path = files.folder / place.name
    with damage_named(path, Exception), path.open("rb") as raw:
        yield (gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw), str(path)  # type: ignore[misc]


def _norb_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype]:
    """Read shape and dtype of a matrix. Header, in int32: magic number, number of dimensions, at least three
    dimensions.
    """
    magic, num_dims = np.frombuffer(file.read(8), "<i4").tolist()
    if magic not in _NORB_TYPES:
        raise UserError(f"{where} is not a matrix of small NORB (it begins with {magic}). Fetch it again.")
    dims = np.frombuffer(file.read(4 * max(num_dims, 3)), "<i4").tolist()
    return tuple(dims[:num_dims]), _NORB_TYPES[magic]


def _in_turn(
    file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype, rows: np.ndarray, where: str
) -> Iterator[np.ndarray]:
    """Yields some rows, ascending, of an array that can only be read sequentially."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    per_block = max(_BLOCK_BYTES // row_bytes, 1)
    for start in range(0, int(rows[-1]) + 1, per_block):
        data = file.read(min(per_block, shape[0] - start) * row_bytes)
        block = np.frombuffer(data[: len(data) // row_bytes * row_bytes], dtype).reshape(-1, *shape[1:])
        wanted = rows[(rows >= start) & (rows < start + per_block)] - start
        if len(wanted) and wanted[-1] >= len(block):
            raise UserError(f"{where} is truncated: it has fewer than {counted(shape[0], 'row')}. Fetch it again.")
        yield from block[wanted]


def _check_count(where: AnyPath | str, num_images: int, num_labels: int) -> None:
    """Raises UserError if images and labels are not of the same samples."""
    if num_images != num_labels:
        raise UserError(
            f"{where} has {counted(num_images, 'image')}, but there are {counted(num_labels, 'label')} for it. Is it"
            " the file of another split, or of another version? Fetch images and labels again."
        )


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]
