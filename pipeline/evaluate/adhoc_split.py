"""Opens image files, folders, tars of samples or a data set as a split, which the loader reads like any other."""

import glob
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.architecture.pixels import ANY_TYPE, RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes
from pipeline.base.words import counted, missing
from pipeline.data.dataset.manifest import INFO, open_dataset, shards_beside
from pipeline.data.dataset.mapped_index import ManifestIndex
from pipeline.data.dataset.split import SampleTable, Split
from pipeline.data.loading.decode import is_visible_image
from pipeline.data.storage.bucket import to_path, walk_files
from pipeline.data.storage.cache import Storage
from pipeline.process.outputs import kind_of
from pipeline.settings.commands.weights import GivenConfig

# Endings of what launch/shard.py reads, and a model does not.
_OF_SHARDING = {".zip", ".tgz", ".gz", ".csv", ".tsv", ".parquet"}


@dataclass(frozen=True)
class AdhocSplit:
    """split: the images, with the known labels. label_names: the class names of these labels; may be empty.

    readable: class name -> name to show, of a data set that has them. fingerprint, target_names: of a data set; target
    names are those of the split's numbers.
    """

    split: Split
    label_names: list[str]
    readable: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    target_names: list[str] = field(default_factory=list)

    def labels(self, rows: Iterable[int]) -> list[str | None]:
        """The known class names of samples, joined by ";"; None for a sample without."""
        return [";".join(self.label_names[i] for i in self.split.labels_of(row)) or None for row in rows]

    def captions(self, rows: Iterable[int]) -> list[str]:
        """What names samples in pictures: their known classes, or else the last part of their keys."""
        rows = list(rows)
        names = zip(self.labels(rows), self.split.keys(rows), strict=True)
        return [label or PurePosixPath(key).stem for label, key in names]

    def true_classes(self, names: Sequence[str]) -> "AdhocSplit":
        """Returns this split, without labels unless they are labels of the classes `names`."""
        if self.label_names == list(names):
            return self
        return replace(self, split=self.split.without_labels(), label_names=[])


def open_adhoc_split(
    places: Sequence[str],
    split: str,
    exclude: str,
    names: Sequence[str],
    setting: str = "source",
    pixels: Pixels = RGB8,
) -> AdhocSplit:
    """Open the images of a command. Files of a folder are sorted by path; files given by name keep their order.

    places: files, folders, tars and glob patterns; or a single data set, from which `split` and `exclude` select
    samples. Hidden files of a folder or tar are ignored, as in sharding: macOS adds a `._NAME.jpg`, which is not an
    image, to each file.
    names: class names of the weights. The label of an image file is the name of its folder if that is one of `names`.
    In a tar, the label is the number in the sample's .cls file, into the classes of the data set that the tar belongs
    to, else into `names`.
    setting: that names the places, for errors. pixels: how files are read; a data set says it itself.
    Raises UserError for a place that is missing or holds no image, and for a data set next to other places.
    """
    if setting == "data" or is_dataset(places):
        folders = [Path(places[0]), shards_beside(Path(places[0]))]
        if folders[0].is_dir() and {kind_of(folder) for folder in folders} == {None}:
            raise UserError(f"data = {places[0]} is not a data set. Image files are given as source={places[0]}")
        dataset = open_dataset(places[0])
        opened = dataset.split(split, exclude)
        if not len(opened):
            raise UserError(f"{places[0]}: split {split!r} has no images.")
        readable = dict(zip(dataset.classes, dataset.class_names, strict=True))
        return AdhocSplit(opened, dataset.classes, readable, dataset.fingerprint, dataset.targets)
    if pixels.type == ANY_TYPE:
        raise UserError(
            f"{setting} = {', '.join(places)}: these weights read images by the range that their data set records, and"
            " files have none. Make a data set of them: launch/shard.py."
        )
    links: list[str] = []
    files = [path for place in places for path in _expand(place, links, setting)]
    parents = {path.parent for path in files if path.suffix == ".tar"}
    label_names = {_names_in(folder) or tuple(names) for folder in parents} or {tuple(names)}
    if len(label_names) > 1:
        raise UserError(
            f"{setting} = {', '.join(places)}: these tars belong to data sets of different classes. Use tars of one"
            " data set."
        )
    (of_labels,) = label_names
    numbers = {name: number for number, name in enumerate(of_labels)}
    images: list[_Image] = []
    for path in files:
        if path.suffix == ".tar":
            images += _in_tar(path, len(of_labels), links, setting)
        else:
            folder = Path(os.path.abspath(path)).parent  # A link counts where it is.
            images.append(_Image(str(path), path, 0, path.stat().st_size, numbers.get(folder.name, -1)))
    note = f"left out: {counted(len(links), 'link')}, such as {links[0]}" if links else ""
    return AdhocSplit(_as_split(images, note, pixels), list(of_labels))


def open_places(config: GivenConfig, names: Sequence[str], pixels: Pixels, **splits: str) -> list[AdhocSplit]:
    """Open the places of some settings, and print what is left out. Arguments as of `open_adhoc_split`, and as of
    `refuse_without_dataset`, which is called.
    """
    given = {name: getattr(config, name) for name in ("exclude", *splits, *splits.values())}
    opened = [
        open_adhoc_split(given[of], given[split], given["exclude"], names, config.setting_of(of), pixels)
        for split, of in splits.items()
    ]
    refuse_without_dataset(config, **splits)
    for note in dict.fromkeys(note for images in opened for note in images.split.notes()):
        print(note)
    return opened


def refuse_without_dataset(config: GivenConfig, **splits: str) -> None:
    """Raise UserError for settings that select samples of a data set, where only files are read.

    splits: setting of a split -> setting of the places that it is of. `exclude` is of all of them.
    """
    of_files = {split: of for split, of in splits.items() if not is_dataset(getattr(config, of))}
    if len(of_files) == len(splits):
        of_files["exclude"] = "images"
    defaults = {field.name: field.default for field in fields(config)}
    for name, of in of_files.items():
        if getattr(config, name) != defaults[name]:
            raise UserError(f"{name} = {getattr(config, name)} is of a data set, but {of} are files. Leave it out.")


def is_dataset(places: Sequence[str]) -> bool:
    """Whether these places are a single data set."""
    return len(places) == 1 and ("://" in places[0] or (Path(places[0]) / INFO).is_file())


class _Image(NamedTuple):
    """Where the bytes of an image are. label: -1 if unknown."""

    key: str
    path: Path
    offset: int
    size: int
    label: int


def _expand(place: str, links: list[str], setting: str) -> Iterator[Path]:
    """Yield the files of one place. Links of a folder that are named as images and lead nowhere are appended to
    `links`. Raises UserError.
    """
    if "://" in place:
        raise UserError(f"{setting} = {place}: from a bucket, only a single data set can be read.")
    path = to_path(place)
    assert isinstance(path, Path)
    if not path.exists():
        found = [Path(name) for name in sorted(glob.glob(place, recursive=True)) if Path(name).is_file()]
        if not found:
            raise UserError(f"{setting} = {missing(place)}")
        yield from found
    elif (path / INFO).is_file():
        raise UserError(f"{setting} = {place} is a data set: give it alone, or give its tars.")
    elif path.is_dir():
        broken: list[Path] = []
        files = (file for file, *_ in walk_files(path, broken) if isinstance(file, Path))
        found = sorted(file for file in files if is_visible_image(str(file.relative_to(path))))
        links += sorted(str(link) for link in broken if is_visible_image(str(link.relative_to(path))))
        if not found:
            raise UserError(f"{setting} = {place}: no image in this folder or below it. For tars: {path / '*.tar'}.")
        yield from found
    elif path.suffix.lower() in _OF_SHARDING:
        raise UserError(
            f"{setting} = {place}: images in archives and tables are not read here. Unpack it, or make a data set of it"
            " and give that: launch/shard.py."
        )
    else:
        yield path


def _in_tar(path: Path, num_classes: int, links: list[str], setting: str) -> list[_Image]:
    """List the images of a tar, each with the number in its .cls file, or in that of its webdataset key, if it is that
    of a class. Raises UserError.

    As in sharding, a hard link stands for an earlier file of the tar. Other links are left out, and appended to
    `links`.
    """
    images, labels = dict[str, _Image](), dict[str, bytes]()
    files: dict[str, tarfile.TarInfo] = {}
    try:
        with path.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                name = member.name
                file = files.get(member.linkname) if member.islnk() else member
                if file is not None and file.isfile():
                    files[name] = file
                    if is_visible_image(name):
                        images[name] = _Image(f"{path.name}/{name}", path, file.offset_data, file.size, -1)
                    elif name.endswith(".cls"):
                        labels[name.removesuffix(".cls")] = os.pread(raw.fileno(), file.size, file.offset_data).strip()
                elif (member.islnk() or member.issym()) and (is_visible_image(name) or name.endswith(".cls")):
                    links.append(f"{path.name}/{name}")
            raw.seek(tar.offset)
            if raw.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                # tarfile stops at a damaged header as it does at the end.
                raise tarfile.ReadError(f"no header and no end mark at byte {tar.offset}")
    except (tarfile.TarError, ValueError) as error:
        raise UserError(
            f"{setting} = {path} is not a complete tar of samples ({error}). Copy it again, or leave it out."
        ) from None
    if not images:
        raise UserError(f"{setting} = {path}: no image in this tar.")
    known = {key: int(label) for key, label in labels.items() if label.isdigit() and int(label) < num_classes}
    return [image._replace(label=_label_of(name, known)) for name, image in images.items()]


def _label_of(name: str, known: dict[str, int]) -> int:
    """The label of an image in a tar, -1 if unknown. known: name of a .cls file without its suffix -> label."""
    folder, slash, last = name.rpartition("/")
    # webdataset's key of `2023.05.01.jpg` is `2023`, which other images may have, too.
    return known.get(name.rpartition(".")[0], known.get(folder + slash + last.partition(".")[0], -1))


def _names_in(folder: Path) -> tuple[str, ...]:
    """Class names of the data set in a folder; empty if there is none."""
    return tuple(open_dataset(folder).classes) if (folder / INFO).is_file() else ()


def _as_split(images: list[_Image], note: str, pixels: Pixels) -> Split:
    """Build the split. Consecutive images of the same file form a shard. note: see `ManifestIndex`."""
    runs = [list(run) for _, run in groupby(images, lambda image: image.path)]
    paths, labels = [run[0].path for run in runs], np.array([image.label for image in images], np.int32)
    # Arrow holds UTF-8 only.
    names = [as_bytes(image.key).decode() for image in images]
    keys = pa.BufferOutputStream()  # Arrow's threads may free a buffer of Python's after its end, and abort.
    pq.write_table(pa.table({"key": names}), keys)
    table = pq.ParquetFile(pa.BufferReader(keys.getvalue()))
    index = ManifestIndex(
        np.array([image.offset for image in images]),
        np.array([image.size for image in images]),
        np.concatenate([[0], np.cumsum(labels >= 0)]),
        labels[labels >= 0],
        max_labels=int((labels >= 0).any()),
        targets=np.empty((len(images), 0), np.float32),
        note=note,
    )
    return Split(
        name="images",
        shard_paths=[str(path) for path in paths],
        shard_sizes=np.array([len(run) for run in runs]),
        shard_bytes=np.array([path.stat().st_size for path in paths]),
        shard_sha256=pa.chunked_array([[""] * len(paths)]),
        storage=Storage(),
        index=index,
        excluded_rows=np.empty(0, np.int64),
        excluded_by={},
        table=SampleTable(lambda: (table, range(table.num_row_groups))),
        pixels=pixels,
        left_out=None,
    )
