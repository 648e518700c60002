"""Tars in the format of the webdataset library: `<key>.jpg` and `<key>.cls` or `<key>.json`; or images without
labels.
"""

import contextlib
import itertools
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from data_tools.sources.labels import ClassNumbers, read_names, refuse_other_names
from data_tools.sources.layouts.archive import MEMBERS_TO_LOOK_AT, Member, damage_named, members, tar_members
from data_tools.sources.listing import NOT_UTF8, Collector
from data_tools.sources.reader import read_at
from data_tools.sources.split_files import split_files
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import INFO, open_dataset
from pipeline.data.loading.decode import ARRAYS, EXTENSIONS
from pipeline.data.storage.bucket import AnyPath, file_size, is_utf8
from pipeline.settings.commands.data import ShardConfig

_NO_LABEL = "no .cls and no .json"
_LABEL = "it has a label, but the first samples have none (label_names=FILE says that there are labels)"
_LABEL_KEYS = ("labels", "label", "cls")
_NO_LABEL_IN_JSON = f".json: no whole numbers under any of {', '.join(_LABEL_KEYS)}"
_NO_IMAGE = "no image beside it; the files of a sample follow one another, as 1.jpg 1.cls 2.jpg 2.cls"
_OTHER_NAME = "an extension begins at the first dot of a name; that of a sample's image is jpg, png, ... alone"
_TWICE = "a second file of this name in a sample; webdataset refuses such tars"
# How many tars, and samples of each, are looked at to see what samples are.
_PROBED_TARS, _PROBED_SAMPLES = 8, 6
# Names that tools such as img2dataset give to shards, rather than to classes: 00000.tar, train-000000.tar.
NUMBERED = re.compile(r"(.*[-_])?\d{5,}\.tar")
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

    def fault_of(self, is_labelled: bool) -> str:
        """Why it cannot be used in a data set with or without labels; else empty."""
        if is_labelled or not (self.has_label_file or self.fault in (_NO_LABEL, _NO_LABEL_IN_JSON)):
            return self.fault
        return _LABEL * self.has_label_file


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every sample of every *.tar below source to the collector. Class names: label_names, else the numbers."""
    files = split_files(source, collector.splits, ".tar")
    names = known_class_names(source, files, config.label_names)
    collector.is_labelled = bool(names) or any(
        sample.has_label_file for *_, sample in first_samples([path for *_, path in files])
    )
    numbers = ClassNumbers(names)
    for split, tar, path in files:
        container = collector.add_container(path)
        with path.open("rb") as file:
            for sample in complete_samples(file, path):
                where = f"{tar}: {sample.name}"
                if fault := sample.fault_of(collector.is_labelled):
                    collector.skip(where, fault)
                else:
                    classes = [numbers.name(label, where) for label in sample.labels]
                    collector.sample(split, sample.key, classes, where, container, sample.offset, sample.size)
    collector.classes = numbers.classes()


def first_samples(tars: list[AnyPath]) -> Iterator[tuple[BinaryIO, AnyPath, TarSample]]:
    """(open tar, its path, sample) of the first samples of some tars, evenly over all, which say what all are."""
    for number in sorted({len(tars) * n // _PROBED_TARS for n in range(_PROBED_TARS)}):
        path = tars[number]
        with path.open("rb") as file, contextlib.suppress(UserError):  # A damaged tar is named when it is read whole.
            for sample in itertools.islice(complete_samples(file, path), _PROBED_SAMPLES):
                yield file, path, sample


def known_class_names(source: AnyPath, files: list[tuple[str, str, AnyPath]], label_names: str) -> list[str]:
    """Class names from the file label_names, else from the dataset.json in source or beside the tars (`split_files`),
    else empty.

    Raises UserError for tars of data sets with different classes: one number would be two of them.
    """
    if label_names:
        return read_names(label_names, "label_names")
    folders = dict.fromkeys([source, *(path.parent for *_, path in files)])
    named = {folder: open_dataset(folder).classes for folder in folders if (folder / INFO).is_file()}
    first = next(iter(named), source)
    for folder, names in named.items():
        refuse_other_names(f"The tars in {folder}", names, str(first), named[first])
    return named.get(first, [])


def is_shard(path: AnyPath) -> bool:
    """Whether there are labels or captions (.cls, .json) among the first members of a tar."""
    first = itertools.islice(members(path), MEMBERS_TO_LOOK_AT)
    return any(split_name(member.name)[1] in ("cls", "json") for member in first if not member.is_folder)


def complete_samples(file: BinaryIO, path: AnyPath) -> Iterator[TarSample]:
    """Yields every sample with an image, and those that should have one but do not, in tar order. Raises UserError when
    the tar is damaged.

    Consecutive files with one key are a sample, and hidden files (._1.jpg beside 1.jpg in a tar made on a Mac) belong
    to none, as in webdataset; a .cls takes precedence over a .json.
    """
    with damage_named(path, tarfile.TarError):
        files = (member for member in tar_members(file, 0, file_size(path)) if not member.is_folder)
        named = ((*split_name(member.name), member) for member in files)
        parts = (part for part in named if part[0] and not part[0].endswith("/"))
        for key, group in itertools.groupby(parts, key=lambda part: part[0]):
            image: Member | None = None
            instead: tuple[Member, str] | None = None  # The first file that should have had one, and why it has none.
            labels, fault, has_label_file, is_array = [], _NO_LABEL, False, False
            twice, extensions = None, set[str]()
            for _, ext, member in group:
                twice = member if ext in extensions else twice
                extensions.add(ext)
                if f".{ext}" in EXTENSIONS:
                    # Beside a photograph, an array is something else, such as its features.
                    if image is None or (is_array and f".{ext}" not in ARRAYS):
                        image, is_array = member, f".{ext}" in ARRAYS
                elif f".{ext.rpartition('.')[2]}" in EXTENSIONS:
                    instead = instead or (member, _OTHER_NAME)
                elif ext in ("cls", "json") and (fault or ext == "cls"):
                    try:
                        found = _read_labels(file, ext, member)
                        labels, fault = found or [], "" if found is not None else _NO_LABEL_IN_JSON
                        has_label_file |= found is not None
                    except ValueError as error:
                        fault = f".{ext}: {error}"
                        # A .json that cannot be read names no label: among those of captions it is one bad sample.
                        has_label_file |= not isinstance(error, UserError)
                    # Any program may leave a .json by itself in a tar, such as a list of names.
                    if ext == "cls" or not fault:
                        instead = instead or (member, _NO_IMAGE)
            if twice and (image or instead):
                member, labels, fault = twice, [], _TWICE
            elif image is not None:
                member, fault = image, image.fault or (fault if is_utf8(image.name) else NOT_UTF8)
            elif instead:
                (member, fault), labels = instead, []
            else:
                continue
            yield TarSample(key, member.name, member.offset, member.size, labels, fault, has_label_file)


def split_name(name: str) -> tuple[str, str]:
    """(key, extension in lower case): a key ends at the first dot of the file name, as in webdataset."""
    folder, slash, last = name.removeprefix("./").rpartition("/")
    stem, _, ext = last.partition(".")
    return folder + slash + stem, ext.lower()


def _read_labels(file: BinaryIO, ext: str, member: Member) -> list[int] | None:
    """Returns sorted, distinct labels; None for a .json that names none.

    Raises UserError for a .json that cannot be read, ValueError for wrong labels and for any fault of a .cls.
    """
    if member.fault or member.size > _MAX_LABEL_BYTES:
        fault = member.fault or f"{counted(member.size, 'byte')} is too large for labels"
        raise UserError(fault) if ext == "json" else ValueError(fault)
    data = read_at(file, member.offset, member.size)
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
