"""The sample table: which images a source holds, of which class and split, under which key, and where they lie."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.bucket import AnyPath
from pipeline.errors import UserError

IMAGE_EXTENSIONS = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}

# split and label: numbers. key: class/stem, without dots. name: of the file inside the source. container: number of the
# archive that holds it, -1 for a file of its own. offset and size: of its bytes there; packed: 0, or for a member of a
# zip its stored bytes (offset is then that of the member's header). Large strings: 14 million keys pass 2 GiB.
TABLE = pa.schema(
    [
        ("split", pa.int8()),
        ("key", pa.large_string()),
        ("label", pa.int32()),
        ("name", pa.large_string()),
        ("container", pa.int32()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("packed", pa.int64()),
    ]
)
_BATCH = 2**16


@dataclass(frozen=True)
class Listing:
    """All samples of a source. table: TABLE, sorted by split and key, in one chunk. notes: what was passed over."""

    source: AnyPath
    splits: list[str]
    classes: list[str]
    containers: list[str]
    table: pa.Table
    notes: list[str]

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        return pc.sum(self.table["size"]).as_py()

    def digest(self) -> str:
        """Hex sha256 over split, key, class and size of each sample: what it is made of, not where it lies."""
        digest = hashlib.sha256("\n".join([*self.splits, "", *self.classes]).encode())
        for start in range(0, len(self), _BATCH):
            part = self.table.slice(start, _BATCH)
            digest.update("\n".join(part["key"].to_pylist()).encode())
            for name in ("split", "label", "size"):
                digest.update(part[name].to_numpy().tobytes())
        return digest.hexdigest()

    def rows(self, numbers: np.ndarray) -> dict[str, list[Any]]:
        """What a task needs to know of some samples: key, label, name, path, offset, size, packed (see TABLE).

        path is the file to open.
        """
        rows = self.table.take(pa.array(numbers)).to_pydict()
        paths = [
            str(self.source / name) if container < 0 else self.containers[container]
            for name, container in zip(rows["name"], rows["container"], strict=True)
        ]
        kept = ("key", "label", "name", "offset", "size", "packed")
        return {"path": paths, **{column: rows[column] for column in kept}}


@dataclass
class Collector:
    """Takes every folder and file that a layout meets, tells images and their classes, and makes the Listing.

    Names are relative to the source, with slashes; the first folder below a split's folder is the class.
    """

    source: AnyPath
    splits: dict[str, str]
    containers: list[str]
    _parts: list[pa.RecordBatch] = field(default_factory=list)
    _rows: list[tuple] = field(default_factory=list)
    _classes: dict[str, int] = field(default_factory=dict)
    # Number of images in each class folder, by split and class.
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _tops: dict[str, None] = field(default_factory=dict)
    _no_images: int = 0
    _outside: list[str] = field(default_factory=list)
    _num_outside: int = 0
    # Whether some image lies directly in its class folder.
    _flat: bool = False

    def __post_init__(self) -> None:
        # The longest folder first: with {train: "", test: test} a file below test/ belongs to test.
        folders = [(split, _clean(folder)) for split, folder in self.splits.items()]
        self._folders = sorted(folders, key=lambda pair: -len(pair[1]))
        self._numbers = {split: number for number, split in enumerate(self.splits)}

    def add_container(self, path: AnyPath) -> int:
        """Number of an archive, for `file`."""
        self.containers.append(str(path))
        return len(self.containers) - 1

    def folder(self, name: str) -> None:
        """A folder was met: if it is a class folder, it must hold an image."""
        name = _clean(name)
        if name and not _hidden(name):
            self._tops.setdefault(name.split("/")[0])
            split, inner = self._place(name)
            if split is not None and inner and "/" not in inner and not self._holds_split(name):
                self._counts.setdefault((split, inner), 0)

    def file(self, name: str, container: int, offset: int, size: int, packed: int = 0) -> None:
        """A file was met: offset and size of its bytes in archive `container`, or -1 and 0 for a file of its own."""
        name = _clean(name)
        stem, dot, ext = name.rpartition(".")
        if _hidden(name) or f".{ext.lower()}" not in IMAGE_EXTENSIONS or not dot:
            self._no_images += 1
            return
        self._tops.setdefault(name.split("/")[0])
        split, inner = self._place(stem)
        if split is None or "/" not in inner:
            self._num_outside += 1
            self._outside = self._outside or [name]
            return
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{self.source}: the file name {name!a} is not UTF-8. Rename it.") from None
        class_name, rest = inner.split("/", 1)
        self._flat = self._flat or "/" not in rest
        self._counts[split, class_name] = self._counts.get((split, class_name), 0) + 1
        label = self._classes.setdefault(class_name, len(self._classes))
        # webdataset ends a key at the first dot of the file name.
        key = inner.replace(".", "_")
        self._rows.append((self._numbers[split], key, label, name, container, offset, size, packed))
        if len(self._rows) == _BATCH:
            self._flush()

    def finish(self) -> Listing:
        """The table, checked. Raises UserError for what makes no data set."""
        self._flush()
        self._check_folders()
        table = pa.Table.from_batches(self._parts, TABLE).combine_chunks()
        self._parts = []
        classes = sorted(self._classes)
        ranks = np.zeros(len(classes), np.int32)
        for rank, name in enumerate(classes):
            ranks[self._classes[name]] = rank
        labels = pa.array(ranks[table["label"].to_numpy()])
        table = table.set_column(TABLE.get_field_index("label"), "label", labels)
        # By name too, so that the two files of a key that is there twice are named in the same order on every machine.
        order = pc.sort_indices(table, sort_keys=[("split", "ascending"), ("key", "ascending"), ("name", "ascending")])
        table = table.take(order).combine_chunks()
        self._check_keys(table)
        notes = []
        if self._no_images:
            notes.append(f"ignored {self._no_images:,} file{'s' * (self._no_images > 1)} that are no images")
        if self._outside:
            notes.append(
                f"ignored {self._num_outside:,} image{'s' * (self._num_outside > 1)} outside the class folders of "
                f"splits = {self.splits}, such as {self._outside[0]}"
            )
        return Listing(self.source, list(self.splits), classes, self.containers, table, notes)

    def _flush(self) -> None:
        if self._rows:
            values = zip(*self._rows, strict=True)
            columns = [pa.array(column, field.type) for column, field in zip(values, TABLE, strict=True)]
            self._parts.append(pa.RecordBatch.from_arrays(columns, schema=TABLE))
            self._rows = []

    def _place(self, name: str) -> tuple[str | None, str]:
        """The split that a name belongs to, and the rest of the name below that split's folder."""
        for split, folder in self._folders:
            if not folder:
                return split, name
            if name == folder or name.startswith(folder + "/"):
                return split, name[len(folder) + 1 :]
        return None, name

    def _holds_split(self, name: str) -> bool:
        return any(folder == name or folder.startswith(name + "/") for _, folder in self._folders)

    def _check_folders(self) -> None:
        tops = ", ".join(list(self._tops)[:8]) or "nothing"
        for split, folder in self.splits.items():
            counts = {name: count for (of, name), count in self._counts.items() if of == split}
            where = f"{self.source}/{_clean(folder)}".rstrip("/")
            if not any(counts.values()):
                raise UserError(
                    f"{where} has no class folders with images (split {split!r}). Images belong in <class>/<name>.jpg; "
                    f"splits.{split}=FOLDER names the folder that holds the classes. At the top of source: {tops}."
                )
            for name, count in counts.items():
                if not count:
                    raise UserError(f"{where}/{name} is a class folder without images. Fill it, or remove it.")
            if set(counts) <= {"train", "val", "valid", "validation", "test"}:
                raise UserError(
                    f"{where}: the class folders are called {', '.join(sorted(counts))}, like splits. "
                    "If they are, say so: "
                    + " ".join(f"splits.{name}={_clean(f'{folder}/{name}')}" for name in sorted(counts))
                )
            if len(counts) == 1 and not self._flat:
                only = next(iter(counts))
                raise UserError(
                    f"{where} holds the one folder {only!r}, which holds folders. If those are the classes, say so: "
                    f"splits.{split}={_clean(f'{folder}/{only}')}"
                )

    def _check_keys(self, table: pa.Table) -> None:
        keys, splits = table["key"], table["split"]
        same = pc.and_(pc.equal(keys[1:], keys[:-1]), pc.equal(splits[1:], splits[:-1]))
        twice = np.flatnonzero(same.to_numpy())
        if len(twice):
            first, second = (table["name"][int(row)].as_py() for row in (twice[0], twice[0] + 1))
            more = f" ({len(twice):,} such keys)" if len(twice) > 1 else ""
            what = f"{first} is in it twice" if first == second else f"{first} and {second} have the same key"
            raise UserError(
                f"{self.source}: {what}, {keys[int(twice[0])].as_py()!r}{more}. Keys are class/name without the "
                "extension, dots become _. Rename or remove one."
            )


def _clean(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
