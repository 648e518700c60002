"""Opens image files, folders or a data set as a split, which the loader reads like any other."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.architecture.pixels import ANY_TYPE, RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes
from pipeline.base.words import missing
from pipeline.data.dataset.manifest import INFO, open_dataset
from pipeline.data.dataset.mapped_index import ManifestIndex
from pipeline.data.dataset.split import SampleTable, Split
from pipeline.data.loading.decode import is_visible_image
from pipeline.data.storage.bucket import walk_files
from pipeline.data.storage.cache import Storage
from pipeline.settings.commands.weights import LookConfig


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

    places: files and folders; or a single data set, from which `split` and `exclude` select samples.
    Hidden files of a folder are ignored, as in sharding: macOS adds a `._NAME.jpg`, which is no image, to each file.
    names: class names of the weights. The label of an image file is the name of its folder if that is one of `names`.
    setting: that names the places, for errors. pixels: how files are read; a data set says it itself.
    Raises UserError for a place that is missing or holds no image, and for a data set next to other places.
    """
    if setting == "data" or is_dataset(places):
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
    found = [path for place in places for path in _expand(place, setting)]
    numbers = {name: number for number, name in enumerate(names)}
    folders = (Path(os.path.abspath(path)).parent for path in found)  # A link counts where it is.
    labels = np.array([numbers.get(folder.name, -1) for folder in folders], np.int32)
    return AdhocSplit(_as_split(found, labels, pixels), list(names))


def open_given(config: LookConfig, names: Sequence[str], pixels: Pixels) -> AdhocSplit:
    """Open the images of the settings, and print what is left out. Arguments as of `open_adhoc_split`."""
    setting = config.setting_of("images")
    opened = open_adhoc_split(config.images, config.split, config.exclude, names, setting, pixels)
    for note in opened.split.notes():
        print(note)
    return opened


def is_dataset(places: Sequence[str]) -> bool:
    """Whether these places are a single data set."""
    return len(places) == 1 and ("://" in places[0] or (Path(places[0]) / INFO).is_file())


def _expand(place: str, setting: str) -> Iterator[Path]:
    """Yield the file, or the files of the folder. Raises UserError."""
    if "://" in place:
        raise UserError(f"{setting} = {place}: from a bucket, only a single data set can be read.")
    path = Path(place)
    if not path.exists():
        raise UserError(f"{setting} = {missing(place)}")
    elif (path / INFO).is_file():
        raise UserError(f"{setting} = {place} is a data set: give it alone.")
    elif path.is_dir():
        files = (file for file, *_ in walk_files(path) if isinstance(file, Path))
        found = sorted(file for file in files if is_visible_image(str(file.relative_to(path))))
        if not found:
            raise UserError(f"{setting} = {place}: no image in this folder or below it.")
        yield from found
    else:
        yield path


def _as_split(paths: list[Path], labels: np.ndarray, pixels: Pixels) -> Split:
    """Build the split: a shard of each file. labels: int32 (n,), -1 if unknown."""
    sizes = np.array([path.stat().st_size for path in paths])
    names = [as_bytes(str(path)).decode() for path in paths]  # Arrow holds UTF-8 only.
    keys = pa.BufferOutputStream()  # Arrow's threads may free a buffer of Python's after its end, and abort.
    pq.write_table(pa.table({"key": names}), keys)
    table = pq.ParquetFile(pa.BufferReader(keys.getvalue()))
    index = ManifestIndex(
        np.zeros(len(paths), np.int64),
        sizes,
        np.concatenate([[0], np.cumsum(labels >= 0)]),
        labels[labels >= 0],
        max_labels=int((labels >= 0).any()),
        targets=np.empty((len(paths), 0), np.float32),
    )
    return Split(
        name="images",
        shard_paths=[str(path) for path in paths],
        shard_sizes=np.ones(len(paths), np.int64),
        shard_bytes=sizes,
        shard_sha256=pa.chunked_array([[""] * len(paths)]),
        storage=Storage(),
        index=index,
        excluded_rows=np.empty(0, np.int64),
        excluded_by={},
        table=SampleTable(lambda: (table, range(table.num_row_groups))),
        pixels=pixels,
        left_out=None,
    )
