"""Finds and reads the published files of a task."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from data_tools.sharding.shard import resolve
from data_tools.sources.layouts.archive import damage_named
from data_tools.vtab.datasets import DATASETS, UNREADABLE
from data_tools.vtab.readers import by_dataset
from data_tools.vtab.readers.files import DatasetFiles, Original, sources_of
from data_tools.vtab.readers.labels import NAMES
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.storage.bucket import AnyPath
from pipeline.experiment.vtab_tasks import Task
from pipeline.settings.commands.data import VtabPrepareConfig


class MissingError(UserError):
    """The data set of a task is missing."""


def find_originals(task: Task, config: VtabPrepareConfig) -> AnyPath:
    """Returns the folder of the task's data set. Raises MissingError if there is none, or an empty one."""
    dataset = DATASETS[task.dataset]
    folder = resolve("originals", config.originals) / dataset.name
    if not (folder.is_dir() and any(folder.iterdir())):
        raise MissingError(f"{folder}: not found, or empty. {sources_of(dataset)}")
    return folder


def read_original(task: Task, folder: AnyPath, staging: AnyPath, published: bool) -> Original:
    """Read all samples of a task, from originals.

    published: whether other checksums and numbers of images than the published ones raise UserError.
    """
    with damage_named(folder, Exception):  # Of any kind, if a file differs from the published one.
        files = DatasetFiles(DATASETS[task.dataset], folder, staging, published)
        original: Original = getattr(by_dataset, task.dataset)(files, task)
    classes = NAMES.get(task.name) or original.classes or [str(label) for label in range(task.num_classes)]
    notes = [*original.notes]
    if not published:
        notes.append("published=false: checksums and numbers of images were not compared")
    else:
        if files.unchecked:
            notes.append(f"without a published checksum, or unpacked: {', '.join(files.unchecked)}")
        for problem in wrong_counts(task.dataset, {name: pool.keys for name, pool in original.pools.items()}):
            raise UserError(
                f"{folder} {problem}. Is a file missing? (published=false uses the files as they are; the scores"
                " are then not those of VTAB.)"
            )
        if len(classes) != task.num_classes:
            raise UserError(f"{folder} has {counted(len(classes), 'class')}, but {task.title} has {task.num_classes}.")
    return replace(original, classes=classes, notes=notes)


def wrong_counts(dataset: str, keys: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields a description of each pool of another number of samples than was published. keys: of each pool."""
    for pool, expected in DATASETS[dataset].counts.items():
        found = keys.get(pool, ())
        if len(found) - (UNREADABLE in found) != expected:
            yield f"has {counted(len(found), 'image')} of {pool!r}, but {expected:,} were published"
