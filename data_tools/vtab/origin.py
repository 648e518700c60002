"""Finds the origin of a task's images (published files, a prepared copy of tensorflow_datasets, or lists), and reads
it.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from data_tools.sharding.shard import resolve
from data_tools.vtab.datasets import DATASETS, UNREADABLE
from data_tools.vtab.readers import arrays, image_files, lists, tfrecords
from data_tools.vtab.readers.files import DatasetFiles, MissingError, sources_of
from data_tools.vtab.readers.original import Original
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath
from pipeline.experiment.vtab_tasks import Task
from pipeline.settings.commands.data import VtabPrepareConfig

_READERS: dict[str, Callable[[DatasetFiles, Task], Original]] = {
    "caltech101": image_files.caltech101,
    "cifar100": arrays.cifar100,
    "dtd": image_files.dtd,
    "flowers102": image_files.flowers102,
    "pets": image_files.pets,
    "sun397": image_files.sun397,
    "svhn": arrays.svhn,
    "patch_camelyon": arrays.patch_camelyon,
    "eurosat": image_files.eurosat,
    "resisc45": image_files.resisc45,
    "retinopathy": image_files.retinopathy,
    "clevr": image_files.clevr,
    "dmlab": tfrecords.dmlab,
    "kitti": image_files.kitti,
    "dsprites": arrays.dsprites,
    "smallnorb": arrays.smallnorb,
}

# Exceptions of readers of text and tables for files that differ from the published ones.
_NOT_AS_PUBLISHED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error)

Kind = Literal["originals", "tfds", "lists"]


@dataclass(frozen=True)
class Origin:
    """kind: name of the setting. folder: folder of the data set, or of the task's lists."""

    kind: Kind
    folder: AnyPath


def given(config: VtabPrepareConfig) -> dict[str, str]:
    """Returns the values of originals, tfds and lists that are set. Raises UserError for one that is not a folder."""
    found = {name: value for name in get_args(Kind) if (value := getattr(config, name))}
    for name, value in found.items():
        folder = resolve(name, value)
        if not folder.is_dir():
            raise UserError(
                f"{name} = {value}: {folder} is not a folder. Give one with a folder for each data set: {name}=..."
            )
    return found


def find_origin(task: Task, config: VtabPrepareConfig) -> Origin:
    """Returns the first of originals, tfds and lists that has a folder for the task. Raises MissingError if none
    has.
    """
    dataset = DATASETS[task.dataset]
    looked: list[AnyPath] = []
    if config.originals:
        folder = resolve("originals", config.originals) / dataset.name
        if folder.is_dir() and any(folder.iterdir()):
            return Origin("originals", folder)
        looked.append(folder)
    if config.tfds:
        folder = resolve("tfds", config.tfds) / dataset.tfds
        if folder.is_dir():
            return Origin("tfds", folder)
        looked.append(folder)
    if config.lists:
        folder = resolve("lists", config.lists)
        if found := lists.find(task, folder):
            return Origin("lists", found)
        looked += lists.marks(task, folder)
    raise MissingError(f"{', '.join(map(str, looked))}: not found, or empty. {sources_of(dataset)}")


def read_original(task: Task, origin: Origin, staging: AnyPath, published: bool) -> Original:
    """Read all samples of a task, from originals or tfds.

    published: whether other checksums and numbers of images than the published ones raise UserError.
    """
    dataset = DATASETS[task.dataset]
    notes = []
    if origin.kind == "tfds":
        original = tfrecords.read(dataset, task, origin.folder)
    else:
        files = DatasetFiles(dataset, origin.folder, staging, published)
        try:
            original = _READERS[dataset.name](files, task)
        except UserError:
            raise
        except _NOT_AS_PUBLISHED as error:
            raise UserError(
                f"{origin.folder}: its files differ from the published ones ({type(error).__name__}: {error})."
            ) from error
        if published and files.unchecked:
            notes.append(f"without a published checksum, or unpacked: {', '.join(files.unchecked)}")
    if published:
        _check_counts(task, original, origin.folder)
    else:
        notes.append("published=false: checksums and numbers of images were not compared")
    return replace(original, notes=[*original.notes, *notes])


def _check_counts(task: Task, original: Original, folder: AnyPath) -> None:
    for pool, expected in DATASETS[task.dataset].counts.items():
        keys = original.pools[pool].keys
        if len(keys) - (UNREADABLE in keys) != expected:
            raise UserError(
                f"{folder} has {counted(len(keys), 'image')} of {pool!r}, but {expected:,} were published. Is a file"
                " missing? (published=false uses the files as they are; the scores are then not those of VTAB.)"
            )
    if len(original.classes) != task.num_classes:
        raise UserError(
            f"{folder} has {counted(len(original.classes), 'class')}, but {task.title} has {task.num_classes}."
        )
