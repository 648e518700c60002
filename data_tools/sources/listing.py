"""The sample table of a source: key, split, labels and location of every image."""

import hashlib
import itertools
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.progress import ProgressMeter
from data_tools.sources import spill
from data_tools.sources.spill import Spill, changed, sorted_by
from data_tools.sources.split_files import LIKE_SPLITS
from pipeline.base.errors import UserError
from pipeline.base.words import counted, first_of, printable
from pipeline.data.loading.decode import is_hidden, is_image
from pipeline.data.storage.bucket import AnyPath, is_utf8, locate

# split: index of the split. key: class/stem, without dots. labels: class numbers, ascending. name: of the file inside
# the source. container: index of the archive that holds it, -1 for a separate file. offset, size: of its bytes in the
# container.
# packed: 0; reader.PIXELS; or for a zip member its compressed size (offset is then that of the member's header). group:
# "" without. targets: numbers to predict, null for a missing one; empty without.
# mtime: time of the last change of the file, or of its container, in ns; 0 if unknown.
# Large strings, because 14 million keys exceed 2 GiB.
TABLE = pa.schema(
    [
        ("split", pa.int8()),
        ("key", pa.large_string()),
        ("labels", pa.list_(pa.int32())),
        ("name", pa.large_string()),
        ("container", pa.int32()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("packed", pa.int64()),
        ("group", pa.large_string()),
        ("mtime", pa.int64()),
        ("targets", pa.list_(pa.float32())),
    ]
)
# The file to open, and offset, size, packed: see TABLE.
Place = tuple[str, int, int, int]
_OF_FILE = ("name", "offset", "size", "packed")
# The operation, for `ProgressMeter`.
LISTED = "listed"
# (key, where, reason) of a skipped item, the columns of skipped.csv.
Skipped = tuple[str, str, str]
NOT_UTF8 = "its name is not UTF-8; rename it"
_BATCH = 2**16
# Number of examples in a message.
NAMED = 3
_NO_IMAGES, _OUTSIDE = "files without an image extension", "images outside the folders of splits"
_ADVICE = (
    "For images without labels: layout=images. For labels in a table: layout=list source=labels.csv, with a first line"
    " path,label and a line for each image."
)
_ARCHIVES = (".tar", ".zip", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


class SourceImage(NamedTuple):
    """What a task needs of a sample: columns of TABLE, the page of its file (-1 if the file is one sample), and its
    file, or that of each channel, None for one that it lacks.
    """

    key: str
    labels: list[int]
    name: str
    mtime: int
    page: int
    files: list[Place | None]
    targets: Sequence[float | None] = ()
    group: str = ""


@dataclass(frozen=True)
class Listing:
    """All samples of a source.

    table: schema TABLE, sorted by split and key; a large one is mapped from a file, in chunks. notes: messages for the
    user about what was ignored. skipped: items that belong to the data set but cannot be used; they count as bad
    images.
    root: the folder that the names of separate files are relative to. convert: applied to each image file before it is
    written; a module-level function, so that it can be pickled for tasks. None copies the bytes. about: further entries
    for `source` in dataset.json. extra_tables: further tables for the data set's folder, by file name. is_labelled:
    whether its shards have labels; False for a source of images alone.
    needs_all: whether one bad image is an error, whatever max_bad_share allows. channels: with a file for each channel,
    their names; then `table` has the column parts, rows of `separate` (schema TABLE). A table may have the column page,
    of a file that is several samples. targets: names of the numbers to predict. scratch: folder for files of a table
    that is too large for memory; None keeps it there.
    """

    source: AnyPath
    root: AnyPath
    splits: list[str]
    classes: list[str]
    containers: list[str]
    table: pa.Table
    notes: list[str]
    convert: Callable[[bytes], bytes] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    extra_tables: dict[str, pa.Table] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    is_labelled: bool = True
    needs_all: bool = False
    channels: list[str] = field(default_factory=list)
    separate: pa.Table | None = None
    targets: list[str] = field(default_factory=list)
    scratch: AnyPath | None = None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def has_groups(self) -> bool:
        """Whether samples have groups; then all have one."""
        return len(self) > 0 and self.table["group"][0].as_py() != ""

    @property
    def num_bytes(self) -> int:
        return pc.sum(self.table["size"]).as_py()

    def digest(self) -> str:
        """Hex sha256 of split, key, classes, size, group and targets of each sample. It does not depend on where the
        source is.
        """
        digest = hashlib.sha256("\n".join([*self.splits, "", *self.classes]).encode())
        for part in self._batches():
            digest.update("\n".join(part["key"].to_pylist()).encode())
            for column in (part["split"], pc.list_flatten(part["labels"]), part["size"]):
                digest.update(column.to_numpy().tobytes())
        if pc.any(pc.not_equal(pc.list_value_length(self.table["labels"]), 1)).as_py():
            # Omitted if every sample has one label, so that the digest of older data sets stays the same.
            for part in self._batches():
                digest.update(pc.list_value_length(part["labels"]).to_numpy().tobytes())
        if self.has_groups:
            for number, part in enumerate(self._batches()):
                digest.update("\n".join([*[""] * bool(number), *part["group"].to_pylist()]).encode())
        if self.targets:
            digest.update(f"({self.targets!r}, [".encode())
            for number, part in enumerate(self._batches()):
                digest.update((", " * bool(number) + repr(part["targets"].to_pylist())[1:-1]).encode())
            digest.update(b"])")
        return digest.hexdigest()

    def _batches(self) -> Iterator[pa.Table]:
        for start in range(0, len(self), _BATCH):
            yield self.table.slice(start, _BATCH)

    def changed(self, change: Callable[[pa.Table], pa.Table]) -> pa.Table:
        """The table that `change` makes of the table, some rows at a time if it is large."""
        return changed(self.table, change, self.scratch)

    def images(self, numbers: np.ndarray) -> list[SourceImage]:
        """The samples of the given rows, for a task."""
        return images_of(self.planned(self.table.take(pa.array(numbers))), self.root)

    def planned(self, table: pa.Table) -> pa.Table:
        """What `images_of` needs of these rows of the table: some of its columns and page, the group's name, and the
        files of each sample as a list, in which null is a channel that it lacks.
        """
        if self.separate is None:
            starts, files = pa.array(np.arange(len(table) + 1, dtype=np.int32)), self._places(table)
        else:
            parts = table["parts"].combine_chunks()
            starts, rows = parts.offsets, parts.flatten()
            files = self._places(self.separate.take(rows), rows.is_null())
        columns = {name: table[name] for name in ("key", "labels", "name", "mtime", "targets", "group")}
        page = table["page"] if "page" in table.column_names else pa.array(np.full(len(table), -1, np.int32))
        return pa.table({**columns, "page": page, "files": pa.ListArray.from_arrays(starts, files)})

    def _places(self, table: pa.Table, are_lacking: pa.Array | None = None) -> pa.StructArray:
        """Container (null without), name, offset, size and packed of each row. are_lacking: rows that are null."""
        container = table["container"].combine_chunks()
        inside = pc.if_else(pc.less(container, 0), pa.scalar(None, pa.int32()), container)
        columns = [self._containers.take(inside), *(table[name].combine_chunks() for name in _OF_FILE)]
        return pa.StructArray.from_arrays(columns, ["container", *_OF_FILE], mask=are_lacking)

    @cached_property
    def _containers(self) -> pa.Array:
        return pa.array(self.containers, pa.large_string())


def images_of(planned: pa.Table, root: AnyPath) -> list[SourceImage]:
    """The samples of rows of `Listing.planned`. root: see `Listing`."""
    lists = planned["files"].combine_chunks()
    flat = lists.flatten()
    places: list[Place | None] = [
        (str(locate(root, name)) if container is None else container, *place) if is_there else None
        for is_there, container, name, *place in zip(
            flat.is_valid().to_pylist(), *(column.to_pylist() for column in flat.flatten()), strict=True
        )
    ]
    ends = (lists.offsets.to_numpy() - lists.offsets[0].as_py()).tolist()
    files = [places[start:end] for start, end in itertools.pairwise(ends)]
    first = [planned[name].to_pylist() for name in ("key", "labels", "name", "mtime", "page")]
    return list(map(SourceImage, *first, files, *(planned[name].to_pylist() for name in ("targets", "group"))))


def with_columns(table: pa.Table, **columns: Any) -> pa.Table:
    """The table with these columns replaced or appended."""
    for name, column in columns.items():
        place = table.schema.get_field_index(name)
        table = table.append_column(name, column) if place < 0 else table.set_column(place, name, column)
    return table


def sorted_by_key(table: pa.Table, scratch: AnyPath | None = None) -> pa.Table:
    """The table sorted by split and key. scratch: see `Listing`."""
    # Also by name, so that errors about a repeated key are the same on every machine.
    return sorted_by(table, ("split", "key", "name"), scratch)


def label_pairs(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """(row, label) of every label of every sample: two integer arrays of equal length, ordered by row."""
    labels = table["labels"].combine_chunks()
    return pc.list_parent_indices(labels).to_numpy(), pc.list_flatten(labels).to_numpy()


def label_lists(rows: np.ndarray, labels: np.ndarray, num_rows: int) -> pa.ListArray:
    """The sorted, distinct labels of each of num_rows samples, from pairs (row, label) in any order."""
    pairs = np.sort(rows.astype(np.int64) * 2**32 + labels)
    rows, labels = np.divmod(pairs[np.diff(pairs, prepend=-1) != 0], 2**32)
    offsets = np.searchsorted(rows, np.arange(num_rows + 1))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(labels.astype(np.int32)))


@dataclass
class Collector:
    """Receives the items of a source from a layout's `walk`, and builds the Listing.

    A layout of class folders reports every folder and file by `folder` and `file` (names relative to the source, with
    slashes; the first folder below a split's folder is the class). Any other layout (by_folders=False) reports each
    image by `sample`, or by `file` with is_labelled=False.

    containers: path of an archive -> its number.
    classes: all class names in order, if the layout defines an order; else they are sorted.
    root: the folder that the names of separate files are relative to, if it is not the source.
    is_labelled: see Listing. archives: if not None, `file` puts the names of archives here, with their suffixes.
    progress: shown while its block lasts.
    unpacked: container that was unpacked from a file of the source -> this file, whose time of change counts.
    targets, scratch: see Listing.
    """

    source: AnyPath
    splits: dict[str, str]
    containers: dict[str, int] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    by_folders: bool = True
    root: AnyPath | None = None
    notes: list[str] = field(default_factory=list)
    progress: ProgressMeter = field(default_factory=lambda: ProgressMeter(None, done=LISTED))
    is_labelled: bool = True
    archives: dict[str, str] | None = None
    skipped: list[Skipped] = field(default_factory=list)
    unpacked: dict[AnyPath, AnyPath] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)
    scratch: AnyPath | None = None
    _mtimes: list[int] = field(default_factory=list)  # Of the containers.
    _parts: list[pa.Table] = field(default_factory=list)
    _spill: Spill | None = None  # Those before them.
    _rows: list[tuple] = field(default_factory=list)
    _classes: dict[str, int] = field(default_factory=dict)
    # Split -> folders in that split's folder, class folders if is_labelled, and their numbers of images.
    _counts: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _direct: Counter[str] = field(default_factory=Counter)  # Split -> images that lie in no such folder.
    # By what they are: the first names, and their number.
    _ignored: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _num_ignored: Counter[str] = field(default_factory=Counter)
    # (split, folder) of those with an image that is in no folder of it.
    _flat: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        # The longest folder first: with {train: "", test: test} a file below test/ belongs to test.
        folders = [(split, _clean(folder)) for split, folder in self.splits.items()]
        self._folders = sorted(folders, key=lambda pair: -len(pair[1]))
        self._numbers = {split: number for number, split in enumerate(self.splits)}

    def add_container(self, path: AnyPath, mtime: int | None = None) -> int:
        """Register an archive, once. Returns its number, for `file` and `sample`. mtime: of the archive; None looks it
        up.
        """
        number = self.containers.setdefault(str(path), len(self.containers))
        if number == len(self._mtimes):
            self._mtimes.append(self.unpacked.get(path, path).stat().st_mtime_ns if mtime is None else mtime)
        return number

    def folder(self, name: str) -> None:
        """Report a folder. `finish` raises if it is a class folder without images."""
        name = _clean(name)
        if name and not is_hidden(name):
            split, inner = self._place(name)
            holds_split = any(f"{folder}/".startswith(f"{name}/") for _, folder in self._folders)
            if split and inner and "/" not in inner and not holds_split:
                self._counts[split].setdefault(inner, 0)

    def ignore(self, what: str, name: str) -> None:
        """Report a file, or a folder whose files are not reported, that belongs to no sample. what: plural."""
        self._num_ignored[what] += 1
        if self._num_ignored[what] <= NAMED + 1:
            self._ignored[what].append(name)

    def file(
        self, name: str, container: int, offset: int, size: int, packed: int = 0, fault: str = "", mtime: int = 0
    ) -> None:
        """Report a file. container, offset, size, packed, mtime: see TABLE.

        fault: why it cannot be used, else ""; an image with a fault is skipped.
        """
        name = _clean(name)
        if is_hidden(name):
            self.ignore("hidden files", name)
            return
        if self.archives is not None and (suffix := next(filter(name.lower().endswith, _ARCHIVES), "")):
            self.archives[name] = name[-len(suffix) :]
            return
        if not is_image(name):
            self.ignore(_NO_IMAGES, f"{name} ({fault})" if fault else name)
            return
        split, inner = self._place(name.rpartition(".")[0])
        if split is None:
            self.ignore(_OUTSIDE, name)
            return
        class_name, is_in_folder, rest = inner.partition("/")
        if is_in_folder:
            if "/" not in rest:
                self._flat.add((split, class_name))
            self._counts[split][class_name] += 1
        else:
            self._direct[split] += 1
            if self.is_labelled:
                self.ignore(_OUTSIDE, name)
                return
        classes = (class_name,) if self.is_labelled else ()
        if fault:
            self.skip(name, fault)
        else:
            self.sample(split, inner, classes, name, container, offset, size, packed, mtime=mtime)

    def skip(self, where: str, reason: str) -> None:
        """Report an item that belongs to the data set but cannot be used. It counts as a bad image."""
        self.skipped.append(("", printable(where), reason))

    def sample(
        self,
        split: str,
        key: str,
        classes: Iterable[str],
        name: str,
        container: int,
        offset: int,
        size: int,
        packed: int = 0,
        group: str = "",
        mtime: int = 0,
        targets: Sequence[float | None] = (),
    ) -> None:
        """Report a sample; see TABLE. key: may have dots. classes: names of all its classes. mtime: without a
        container.

        A sample whose name is not allowed in a tar is skipped; a leading slash of the key is removed, as by tar.
        """
        if not is_utf8(name):
            self.skip(name, NOT_UTF8)
            return
        # In webdataset a key ends at the first dot of the file name. (This also excludes "..".)
        key = key.replace(".", "_").lstrip("/")
        if not key or "\0" in key:
            self.skip(name, "its name has a NUL character" if key else "it has no name but an extension")
            return
        labels = [self._classes.setdefault(class_name, len(self._classes)) for class_name in classes]
        if container >= 0:
            mtime = self._mtimes[container]
        place = name, container, offset, size, packed
        self._rows.append((self._numbers[split], key, labels, *place, group, mtime, targets))
        if len(self._rows) == _BATCH:
            self._flush()

    def class_folders(self) -> set[str]:
        """Names of the class folders reported so far."""
        return set().union(*self._counts.values())

    def has_class_folders(self, split: str) -> bool:
        """Whether the folders of a split are probably classes: several, which hold most of its images, and not all in
        folders of their own.
        """
        names = +self._counts[split]
        is_most = names.total() > self._direct[split]
        return len(names) > 1 and is_most and any((split, name) in self._flat for name in names)

    def like_splits(self, split: str) -> dict[str, str]:
        """Folders of a split that are probably splits themselves, by their names -> the name of such a split."""
        names = self._counts[split]
        like = {name: LIKE_SPLITS[name.lower()] for name in sorted(names) if name.lower() in LIKE_SPLITS}
        # Beside folders of other names (extra, annotations), train and val are splits if both hold nothing but folders.
        are_splits = len(like) == len(names) or len({(split, name) for name in like} - self._flat) > 1
        return like if are_splits else {}

    def finish(self) -> Listing:
        """Returns the checked Listing. Raises UserError if it cannot make a data set."""
        self._flush()
        if self.by_folders:
            self._check_folders()
        before = [self._spill.mapped().read_all()] if self._spill else []
        table = pa.concat_tables([TABLE.empty_table(), *before, *self._parts])
        self._parts = []
        there = pc.unique(table["split"]).to_pylist()
        for split, number in self._numbers.items():
            if number not in there:
                raise UserError(
                    f"{self.source}: split {split!r} ({self.splits[split] or 'all of it'}) has no"
                    f" images{self._but_skipped()}. {'; '.join(self._notes())}"
                )
        classes = self.classes or sorted(self._classes)
        numbers = {name: number for number, name in enumerate(classes)}
        ranks = np.array([numbers[name] for name in self._classes], np.int32)

        def renumbered(table: pa.Table) -> pa.Table:
            rows, labels = label_pairs(table)
            return with_columns(table, labels=label_lists(rows, ranks[labels], len(table)))

        table, notes = sorted_by_key(changed(table, renumbered, self.scratch), self.scratch), self.notes
        keys, splits = table["key"], table["split"]
        same = pc.and_(pc.equal(keys[1:], keys[:-1]), pc.equal(splits[1:], splits[:-1]))
        if len(twice := np.flatnonzero(same.to_numpy())):
            first, second = table.slice(int(twice[0]), 2).to_pylist()
            raise UserError(
                f"{self.source}: {first['name']} and {second['name']} have the same key, {first['key']!r}"
                f" ({counted(len(twice), 'such key')}). A key is the name without the extension, in tars of samples up"
                " to its first dot, and dots become _. Rename or remove one; in tars"
                " that launch/index.py indexes in place keys may repeat."
            )
        notes += self._notes()
        if self.skipped:
            notes.append(f"cannot use {len(self.skipped):,} of the items listed: {reasons(self.skipped)}")
        num_bare = pc.sum(pc.equal(pc.list_value_length(table["labels"]), 0)).as_py()
        if num_bare and self.is_labelled:
            notes.append(f"{num_bare:,} of {counted(len(table), 'image')} without a label, of which no class is learnt")
        return Listing(
            self.source,
            self.root or self.source,
            list(self.splits),
            classes,
            list(self.containers),
            table,
            notes,
            skipped=sorted(self.skipped),
            is_labelled=self.is_labelled,
            targets=self.targets,
            scratch=self.scratch,
        )

    def _flush(self) -> None:
        if self._rows:
            columns = [pa.array(*pair) for pair in zip(zip(*self._rows, strict=True), TABLE.types, strict=True)]
            self._parts.append(pa.Table.from_arrays(columns, schema=TABLE))
            self.progress.add(len(self._rows), pc.sum(self._parts[-1]["size"]).as_py())
            self._rows = []
            if self.scratch is not None and sum(map(len, self._parts)) >= spill.ROWS_IN_MEMORY:
                self._spill = self._spill or Spill(self.scratch)
                self._spill.write(pa.concat_tables(self._parts))
                self._parts = []

    def _place(self, name: str) -> tuple[str | None, str]:
        """Returns (split of a name, the name relative to that split's folder)."""
        for split, folder in self._folders:
            if f"{name}/".startswith(f"{folder}/".lstrip("/")):
                return split, name.removeprefix(folder).lstrip("/")
        return None, name

    def _check_folders(self) -> None:
        for split, folder in self.splits.items():
            counts = self._counts[split]
            where = f"{self.source}/{_clean(folder)}".rstrip("/")
            if not (inside := counts.total()):
                raise UserError(
                    f"{where} has no class folders with images (split {split!r}{self._but_skipped()}). Images belong in"
                    f" <class>/<name>.jpg; splits.{split}=FOLDER names the folder that holds the classes. {_ADVICE}"
                    f" {'; '.join(self._notes())}"
                )
            if like := self.like_splits(split):
                say = [f"splits.{name}={_clean(f'{folder}/{inner}')}" for inner, name in like.items()]
                raise UserError(
                    f"{where}: class folders are called {', '.join(like)}, like splits. If they are, say so:"
                    f" {shlex.join(say)}"
                )
            if (direct := self._direct[split]) > inside:
                raise UserError(
                    f"{where}: {counted(direct, 'image')} of {direct + inside:,} lie directly in it, which gives them"
                    f" no class; only {inside:,} lie in {counted(len(counts), 'folder')} ({first_of(sorted(counts))})."
                    " Without labels, to use all: layout=images. To use only those in folders, move them to a folder"
                    " of their own."
                )
            # Left out, it would shift the numbers of the classes after it once it is filled; as a class, it would have
            # no image.
            if empty := sorted(name for name, count in counts.items() if not count):
                raise UserError(
                    f"{where}: {counted(len(empty), 'class folder')} without images: {first_of(empty)}. Fill or remove"
                    " what is empty."
                )
            if len(counts) == 1 and not any(of == split for of, _ in self._flat):
                only = next(iter(counts))
                raise UserError(
                    f"{where} holds the one folder {only!r}, which holds folders. If those are the classes, say so: "
                    f"{shlex.quote(f'splits.{split}=' + _clean(f'{folder}/{only}'))} . {_ADVICE}"
                )

    def _notes(self) -> list[str]:
        return [
            f"ignored {what} ({self._num_ignored[what]:,}): {first_of(names, NAMED)}"
            for what, names in self._ignored.items()
        ]

    def _but_skipped(self) -> str:
        return f"; {len(self.skipped):,} cannot be used: {reasons(self.skipped)}" if self.skipped else ""


def reasons(skipped: list[Skipped]) -> str:
    """The first few items that cannot be used, each with its reason."""
    few = "; ".join(f"{printable(where)} ({reason})" for _, where, reason in sorted(skipped)[:NAMED])
    return few + "; ..." * (len(skipped) > NAMED)


def _clean(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))
