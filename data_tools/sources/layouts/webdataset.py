"""Tars in the format of the webdataset library: `<key>.jpg` and `<key>.cls` or `<key>.json`; or images without
labels.
"""

import itertools
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from data_tools.sources.labels import ClassNumbers, read_names, refuse_other_names
from data_tools.sources.layouts.archive import Member, damage_named, tar_members
from data_tools.sources.listing import NOT_UTF8, Collector, Few
from data_tools.sources.reader import read_at
from data_tools.sources.split_files import split_files
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.loading.decode import ARRAYS, EXTENSIONS
from pipeline.data.storage.bucket import AnyPath, file_size, is_utf8
from pipeline.settings.commands.data import ShardConfig

NO_LABEL = "no .cls and no .json"
_LABEL_KEYS = ("labels", "label", "cls")
_NO_LABEL_IN_JSON = f".json: no whole numbers under any of {', '.join(_LABEL_KEYS)}"
_NO_IMAGE = "no image beside it; the files of a sample follow one another, as 1.jpg 1.cls 2.jpg 2.cls"
_OTHER_NAME = "an extension begins at the first dot of a name; that of a sample's image is jpg, png, ... alone"
_TWICE = "a second file of this name in a sample; webdataset refuses such tars"
_MEMBERS_TO_LOOK_AT = 16
# Names that tools such as img2dataset give to shards: 00000.tar, train-000000.tar.
_NUMBERED = re.compile(r"(.*[-_])?\d{5,}\.tar")
# Limit of a label file; a .json may also hold captions and boxes.
_MAX_LABEL_BYTES = 2**24


@dataclass(frozen=True)
class TarSample:
    """A sample of a tar: key, image (name, offset and size in the tar), and labels or the reason why there are none.

    Without an image: the file that there is instead, and the reason why it cannot be used.

    labels: ascending and distinct. has_label_file: False without .cls and with a .json that names no labels, as of
    captions, or cannot be read.
    """

    key: str
    name: str
    offset: int
    size: int
    labels: list[int]
    fault: str
    has_label_file: bool = True

    @property
    def is_unlabelled(self) -> bool:
        """Whether it can be used, except for the missing label."""
        return not self.has_label_file and self.fault in (NO_LABEL, _NO_LABEL_IN_JSON)


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every sample of every *.tar below source to the collector. Class names: label_names, else the numbers.

    Samples without a label are used if no sample of the source has one.
    """
    files = split_files(source, collector.splits, ".tar")
    names = known_class_names(source, files, config.label_names)
    if not names and not _report(files, None, collector):
        collector.is_labelled = False
        return
    collector.restart()
    if not _report(files, ClassNumbers(names), collector) and names:
        raise UserError(
            f"{source}: no sample has a label, though class names are given (label_names, or dataset.json beside the"
            " tars). For images without labels: layout=images."
        )


def _report(files: list[tuple[str, str, AnyPath]], numbers: ClassNumbers | None, collector: Collector) -> bool:
    """Report every sample. Returns whether any has a label, even one that cannot be read. Without numbers, stops at the
    first that has one.
    """
    has_labels, bare = False, Few()
    for split, tar, path in files:
        container = collector.add_container(path)
        with path.open("rb") as file:
            for sample in complete_samples(file, path):
                where = f"{tar}: {sample.name}"
                has_labels = has_labels or sample.has_label_file
                if numbers is None and has_labels:
                    return True
                if not sample.fault or (numbers is None and sample.is_unlabelled):
                    names = [numbers.name(label, where) for label in sample.labels] if numbers else []
                    collector.sample(split, sample.key, names, where, container, sample.offset, sample.size)
                elif sample.fault == NO_LABEL:
                    bare.add(f"{where} ({sample.fault})")
                else:
                    collector.skip(where, sample.fault)
    if bare.count:
        collector.notes.append(f"ignored {bare.counted('sample')}: {bare}")
    if numbers:
        collector.classes = numbers.classes()
    return has_labels


def known_class_names(source: AnyPath, files: list[tuple[str, str, AnyPath]], label_names: str) -> list[str]:
    """Class names from the file label_names, else from the dataset.json in source, else from those beside the tars
    (`split_files`), else empty.

    Raises UserError for tars of data sets with different classes: one number would be two of them.
    """
    if label_names:
        return read_names(label_names, "label_names")
    found = _data_sets(source, files)
    names = {folder: dataset.classes for folder, dataset in found.items() if dataset.classes}
    first, of_first = next(iter(names.items()), (source, []))
    for folder in dict.fromkeys(path.parent for *_, path in files) if names and source not in found else ():
        if folder in names or folder not in found:  # Not those of a data set without labels.
            refuse_other_names(f"The tars in {folder}", names.get(folder, []), str(first), of_first)
    return of_first


def _data_sets(source: AnyPath, files: list[tuple[str, str, AnyPath]]) -> dict[AnyPath, Dataset]:
    """The data sets that the tars are of, by folder: that of source, else those beside the tars."""
    folders = [source] if (source / INFO).is_file() else dict.fromkeys(path.parent for *_, path in files)
    return {folder: open_dataset(folder) for folder in folders if (folder / INFO).is_file()}


def is_shard(path: AnyPath) -> bool:
    """Whether there are labels among the first members of a tar, or captions (.txt) if its name is that of a shard."""
    with path.open("rb") as file:
        members = list(itertools.islice(tar_members(file, 0, file_size(path)), _MEMBERS_TO_LOOK_AT))
    parts = [split_name(member.name) for member in members if not member.is_folder]
    if any(ext in ("cls", "json") for _, ext in parts):
        return True
    captions = {key for key, ext in parts if ext == "txt"}
    return is_numbered(path) and any(key in captions and f".{ext}" in EXTENSIONS for key, ext in parts)


def is_numbered(path: AnyPath) -> bool:
    """Whether a tar has the name of a shard, such as 00000.tar, rather than of a class."""
    return _NUMBERED.fullmatch(path.name) is not None


def complete_samples(file: BinaryIO, path: AnyPath) -> Iterator[TarSample]:
    """Yields what `samples_of` does, in tar order. Raises UserError when the tar is damaged."""
    with damage_named(path, tarfile.TarError):
        members = tar_members(file, 0, file_size(path))
        yield from samples_of((member for member in members if not member.is_folder), partial(read_at, file))


def samples_of(members: Iterable[Member], read: Callable[[int, int], bytes]) -> Iterator[TarSample]:
    """Yields every sample with an image, and those that should have one but do not. members: the files of a tar, in
    order.

    Consecutive files with one key are a sample, and hidden files (._1.jpg beside 1.jpg in a tar made on a Mac) belong
    to none, as in webdataset; a .cls takes precedence over a .json. read: returns bytes of the tar by offset and size.
    """
    named = ((*split_name(member.name), member) for member in members)
    parts = (part for part in named if part[0] and not part[0].endswith("/"))
    for key, group in itertools.groupby(parts, key=lambda part: part[0]):
        image: Member | None = None
        instead: dict[str, Member] = {}  # Reason why there is no image -> the first file that it is said of.
        labels, fault, has_label_file, is_array = [], NO_LABEL, False, False
        twice, extensions = None, set[str]()
        for _, ext, member in group:
            twice = member if ext in extensions else twice
            extensions.add(ext)
            if f".{ext}" in EXTENSIONS:
                # Beside a photograph, an array is something else, such as its features.
                if image is None or (is_array and f".{ext}" not in ARRAYS):
                    image, is_array = member, f".{ext}" in ARRAYS
            elif f".{ext.rpartition('.')[2]}" in EXTENSIONS:
                instead.setdefault(_OTHER_NAME, member)
            elif ext in ("cls", "json") and (fault or ext == "cls"):
                try:
                    found = _read_labels(ext, member, read)
                    labels, fault = found or [], "" if found is not None else _NO_LABEL_IN_JSON
                    has_label_file = has_label_file or found is not None
                except ValueError as error:
                    fault = f".{ext}: {error}"
                    # A .json that cannot be read names no label: among those of captions it is one bad sample.
                    has_label_file = has_label_file or not isinstance(error, UserError)
                # Any program may leave a .json by itself in a tar, such as a list of names.
                if ext == "cls" or not fault:
                    instead.setdefault(_NO_IMAGE, member)
        if twice and (image or instead):
            yield TarSample(key, twice.name, twice.offset, twice.size, [], _TWICE, has_label_file)
        elif image is not None:
            fault = image.fault or (fault if is_utf8(image.name) else NOT_UTF8)
            yield TarSample(key, image.name, image.offset, image.size, labels, fault, has_label_file)
        elif instead:
            fault = next(reason for reason in (_OTHER_NAME, _NO_IMAGE) if reason in instead)
            member = instead[fault]
            yield TarSample(key, member.name, member.offset, member.size, [], fault, has_label_file)


def split_name(name: str) -> tuple[str, str]:
    """(key, extension in lower case): a key ends at the first dot of the file name, as in webdataset."""
    folder, slash, last = name.removeprefix("./").rpartition("/")
    stem, _, ext = last.partition(".")
    return folder + slash + stem, ext.lower()


def _read_labels(ext: str, member: Member, read: Callable[[int, int], bytes]) -> list[int] | None:
    """Returns sorted, distinct labels; None for a .json that names none.

    Raises UserError for a .json that cannot be read, ValueError for wrong labels and for any fault of a .cls.
    """
    if member.fault or member.size > _MAX_LABEL_BYTES:
        fault = member.fault or f"{counted(member.size, 'byte')} is too large for labels"
        raise UserError(fault) if ext == "json" else ValueError(fault)
    data = read(member.offset, member.size)
    if ext == "cls":
        if not re.fullmatch(rb"\s*[+-]?\d{1,18}\s*", data):
            raise ValueError(f"{data[:40]!r} is not an integer")
        return [int(data)]
    content: Any = json_record.parse(data, Any, "it")
    is_named = isinstance(content, dict)
    if is_named:
        content = next((content[key] for key in _LABEL_KEYS if key in content), None)
    labels = content if isinstance(content, list) else [content]
    wrong = [label for label in labels if type(label) is not int]
    if wrong and is_named and content is not None:
        raise ValueError(f"label {json_record.quoted(wrong[0])} is not an integer")
    return None if wrong else sorted(set(labels))
