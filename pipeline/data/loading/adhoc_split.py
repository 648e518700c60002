"""Images wherever they lie (files, folders, a tar of samples, a data set) as a split, which everything else here reads."""

import glob
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.dataset.manifest import INFO, open_dataset
from pipeline.data.dataset.mapped_index import Index
from pipeline.data.dataset.split import SampleTable, Split
from pipeline.data.loading.decode import EXTENSIONS
from pipeline.data.storage.bucket import to_path
from pipeline.data.storage.cache import Storage
from pipeline.errors import UserError


@dataclass(frozen=True)
class Pictures:
    """split: the images, with the labels that are known. label_names: of all its labels; without any, empty."""

    split: Split
    label_names: list[str]

    def true_classes(self, names: Sequence[str]) -> "Pictures":
        """The same, without its labels when they are not of the classes `names`: they could not be compared."""
        if self.label_names == list(names):
            return self
        starts = np.zeros(len(self.split.index) + 1, np.int64)
        none = replace(self.split.index, labels=np.empty(0, np.int32), label_starts=starts, max_labels=0)
        return replace(self, split=replace(self.split, index=none), label_names=[])


def open_pictures(places: Sequence[str], split: str, exclude: str, names: Sequence[str]) -> Pictures:
    """What the user calls images. Files are sorted within their folder; explicit ones keep their order.

    places: files, folders, tars, patterns; or one data set, of which `split` and `exclude` say what is taken.
    names: the classes of the weights. In a folder, the image's own folder is its label if it is one of them; in a tar, it
    is what its .cls says, of the classes of the data set that the tar lies in, else of these.
    Raises UserError for a place that is not there or holds no image, and for a data set among other places.
    """
    if len(places) == 1 and ("://" in places[0] or (Path(places[0]) / INFO).is_file()):
        dataset = open_dataset(places[0])
        opened = dataset.split(split, exclude)
        if not len(opened):
            raise UserError(f"{places[0]}: split {split!r} has no images.")
        return Pictures(opened, dataset.classes)
    files = [path for place in places for path in _expand(place)]
    label_names = {_names_of_tar(path) or tuple(names) for path in files if path.suffix == ".tar"} or {tuple(names)}
    if len(label_names) > 1:
        raise UserError(f"images = {', '.join(places)}: tars of other classes. Take those of one data set at a time.")
    (of_labels,) = label_names
    numbers = {name: number for number, name in enumerate(of_labels)}
    images = [
        image
        for path in files
        for image in (_in_tar(path, len(numbers)) if path.suffix == ".tar" else _file(path, numbers))
    ]
    return Pictures(_as_split(images), list(of_labels))


class _Image(NamedTuple):
    """Where an image's bytes are. label: -1 where none is known."""

    key: str
    path: Path
    offset: int
    size: int
    label: int


def _expand(place: str) -> Iterator[Path]:
    """The files of a place."""
    if "://" in place:
        raise UserError(f"images = {place}: of a bucket, take one data set, and nothing beside it.")
    path = to_path(place)
    assert isinstance(path, Path)
    if not path.exists():
        found = [Path(name) for name in sorted(glob.glob(place, recursive=True)) if Path(name).is_file()]
        if not found:
            raise UserError(f"images = {place}: no such file or folder.")
        yield from found
    elif (path / INFO).is_file():
        raise UserError(f"images = {place} is a data set: take it alone, or name its tars.")
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS and file.is_file())
        if not found:
            raise UserError(
                f"images = {place}: no image in this folder, nor below it. For tars, write {path / '*.tar'}."
            )
        yield from found
    else:
        yield path


def _file(path: Path, numbers: dict[str, int]) -> list[_Image]:
    return [_Image(str(path), path, 0, path.stat().st_size, numbers.get(path.resolve().parent.name, -1))]


def _in_tar(path: Path, num_classes: int) -> list[_Image]:
    """The images of a tar, each with the number in the .cls of the same key."""
    images, labels = {}, {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, slash, last = member.name.rpartition("/")
                key = folder + slash + last.partition(".")[0]
                if Path(member.name).suffix.lower() in EXTENSIONS and member.isfile():
                    images[key] = _Image(f"{path.name}/{member.name}", path, member.offset_data, member.size, -1)
                elif member.name.endswith(".cls") and (content := tar.extractfile(member)):
                    labels[key] = int(content.read())
    except (tarfile.TarError, ValueError) as error:
        raise UserError(
            f"images = {path} is no whole tar of samples ({error}). Copy it again, or leave it out."
        ) from None
    if not images:
        raise UserError(f"images = {path}: no image in this tar.")
    known = {key: label for key, label in labels.items() if 0 <= label < num_classes}
    return [image._replace(label=known.get(key, -1)) for key, image in images.items()]


def _names_of_tar(path: Path) -> tuple[str, ...]:
    """The classes of the data set that a tar is a shard of; none where it lies alone."""
    return tuple(open_dataset(path.parent).classes) if (path.parent / INFO).is_file() else ()


def _as_split(images: list[_Image]) -> Split:
    """Each run of images in the same file is a shard."""
    firsts = [i for i, image in enumerate(images) if i == 0 or image.path != images[i - 1].path]
    starts = np.array([*firsts, len(images)])
    labels = np.array([image.label for image in images], np.int32)
    keys = io.BytesIO()
    pq.write_table(pa.table({"key": [image.key for image in images]}), keys)
    table = pq.ParquetFile(pa.BufferReader(keys.getvalue()))
    index = Index(
        np.array([image.offset for image in images]),
        np.array([image.size for image in images]),
        np.concatenate([[0], np.cumsum(labels >= 0)]),
        labels[labels >= 0],
        max_labels=int((labels >= 0).any()),
    )
    return Split(
        name="images",
        shard_paths=[str(images[first].path) for first in firsts],
        shard_sizes=np.diff(starts),
        shard_starts=starts,
        shard_bytes=np.array([images[first].path.stat().st_size for first in firsts]),
        shard_sha256=pa.chunked_array([[""] * len(firsts)]),
        storage=Storage(),
        index=index,
        excluded_rows=np.empty(0, np.int64),
        excluded_by={},
        table=SampleTable(table, range(table.num_row_groups)),
    )
