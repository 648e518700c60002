"""CIFAR-10 and CIFAR-100 (fine labels) as published: python version, as .tar.gz or unpacked.

Its pickles hold raw pixels, 3 planes of 32x32, which are read in place, at the offset of the pixel array. A pickle can
run any code: only the calls that build a NumPy array are allowed.
"""

import io
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_tools.sources.labels import ClassNumbers, read_names
from data_tools.sources.layouts.archive import damage_named, members
from data_tools.sources.listing import Collector
from data_tools.sources.reader import PIXELS, read_at
from pipeline.base.errors import UserError
from pipeline.base.words import printable
from pipeline.data.storage.bucket import AnyPath, walk_files
from pipeline.settings.commands.data import ShardConfig

SPLITS = {"train": "train", "test": "test"}
_BYTES = 3 * 32 * 32
# File names of each split, of CIFAR-10 and CIFAR-100; and of class names, with the key of these.
_TRAIN = {"train", *(f"data_batch_{number}" for number in range(1, 6))}
_TEST = {"test_batch", "test"}
_NAMES = {"batches.meta": "label_names", "meta": "fine_label_names"}
FILES = {*_TRAIN, *_TEST, *_NAMES}


@dataclass(frozen=True)
class _BatchFile:
    """A file of the source: size bytes at offset of path, which is the file or the tar that holds it."""

    name: str
    path: AnyPath
    offset: int
    size: int

    def __str__(self) -> str:
        return str(self.path) if self.path.name == self.name else f"{self.path}: {self.name}"

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            return read_at(file, self.offset, self.size)


def is_cifar(names: set[str]) -> bool:
    """Whether files of these names (without folders) are CIFAR: they include a test file and a file of class names."""
    return bool(names & _TEST) and bool(names & _NAMES.keys())


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every image to the collector. source: a folder or a plain tar."""
    files = {file.name: file for file in _files(source)}
    numbers = ClassNumbers(_class_names(files, config.label_names))
    for split, part in collector.splits.items():
        if part not in SPLITS:
            raise UserError(f"splits.{split} = {part!r}: CIFAR's own splits are called train and test.")
        found = sorted(files.keys() & (_TRAIN if part == "train" else _TEST))
        if not found:
            raise UserError(f"{source} has no file of CIFAR's {part} split. It has: {', '.join(sorted(files))}.")
        for file in (files[name] for name in found):
            container = collector.add_container(file.path)
            with damage_named(file, Exception):  # A damaged pickle may raise any exception.
                labels, start = _images(file)
            for number, label in enumerate(labels):
                name = numbers.name(label, f"{file}, image {number}")
                place = (file.name, container, file.offset + start + number * _BYTES, _BYTES, PIXELS)
                collector.sample(split, f"{name}/{file.name}_{number:05d}", [name], *place)
    collector.classes = numbers.classes()


def _files(source: AnyPath) -> Iterator[_BatchFile]:
    if source.is_dir():
        for path, size, _ in walk_files(source):
            yield _BatchFile(path.name, path, 0, size)
        return
    for name, is_folder, offset, size, fault, *_ in members(source):
        if fault:  # One file holds thousands of images: not an item to skip.
            raise tarfile.ReadError(f"{printable(name)}: {fault}")
        if not is_folder:
            yield _BatchFile(name.rpartition("/")[2], source, offset, size)


def _class_names(files: dict[str, _BatchFile], label_names: str) -> list[str]:
    if label_names:
        return read_names(label_names, "label_names")
    for name in files.keys() & _NAMES.keys():
        with damage_named(files[name], Exception):
            return [_text(text) for text in _unpickle(files[name].read())[_NAMES[name]]]
    return []


def _images(file: _BatchFile) -> tuple[list[int], int]:
    """(label of each image, offset of the first one's pixels)."""
    content = file.read()
    batch = _unpickle(content)
    labels, data = batch.get("fine_labels") or batch["labels"], batch["data"]
    if data.nbytes != len(labels) * _BYTES:
        raise ValueError("its `data` is not 3,072 bytes for each of its `labels`")
    return [int(label) for label in labels], content.index(data.tobytes())


# What a pickled array of numbers calls (NumPy 1 and 2, protocols 2 to 5).
_CALLS = {
    ("_codecs", "encode"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CALLS:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which is not allowed")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _unpickle(data: bytes) -> dict[str, Any]:
    # The original files were written by Python 2: text loads as bytes.
    content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    return {_text(key): value for key, value in content.items()}


def _text(text: bytes | str) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)
