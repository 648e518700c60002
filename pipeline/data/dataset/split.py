"""One split of an open data set: the place and the labels of each sample that is not excluded, and how many may be
unreadable.

Samples may have groups: those that are alike although none is a copy, such as the images of a patient.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.architecture.pixels import Pixels
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.words import counted
from pipeline.data.dataset.mapped_index import ManifestIndex
from pipeline.data.images.stored import describe_left_out
from pipeline.data.storage.cache import Storage

SAMPLES_FILE = "samples.parquet"
NOTHING_EXCLUDED = "none"
# The column of samples.parquet that names the group of each sample, if they have groups.
GROUP = pa.field("group", pa.dictionary(pa.int32(), pa.string()))
# The default share: of all samples, and of the first _FEW, because a small folder with three broken files is common.
_SHARE, _SHARE_OF_FEW, _FEW = 0.001, 0.01, 100_000


def group_finder(pattern: str) -> Callable[[Sequence[str]], list[str]]:
    """Returns the function keys -> their groups, which raises UserError for a key without one."""
    compiled = re.compile(pattern)

    def find(keys: Sequence[str]) -> list[str]:
        groups = []
        for key in keys:
            match = compiled.search(key)
            group = match[min(1, compiled.groups)] if match else None
            if not group:
                raise UserError(
                    f"group_pattern = {quoted(pattern)} finds no group in the key {key!r}. Extend it, or shard such"
                    " images into a data set of their own."
                )
            groups.append(group)
        return groups

    return find


@dataclass(frozen=True)
class SampleTable:
    """The rows of one split in samples.parquet, read from disk at each call: for errors, tools and tests, not for
    training. open: opens the file when it is first needed, and returns it and the split's row groups.
    """

    open: Callable[[], tuple[pq.ParquetFile, Sequence[int]]]

    @cached_property
    def _opened(self) -> tuple[pq.ParquetFile, Sequence[int]]:
        return self.open()

    def read(self, columns: list[str]) -> Iterator[pa.Table]:
        """These columns of all rows, one row group at a time."""
        file, row_groups = self._opened
        for group in row_groups:
            yield file.read_row_group(group, columns=columns)

    def read_all(self, columns: list[str]) -> pa.Table:
        """These columns of all rows, in chunks."""
        return pa.concat_tables(self.read(columns))

    def keys(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Keys of these rows. Reads only the row groups that hold them."""
        # Without rows, skip pyarrow's `take`, which imports pandas: every run asks for its unreadable samples.
        if not len(rows):
            return []
        rows, (file, row_groups) = np.asarray(rows, np.int64), self._opened
        starts = np.cumsum([0] + [file.metadata.row_group(group).num_rows for group in row_groups])
        groups = np.searchsorted(starts, rows, side="right") - 1
        keys = np.empty(len(rows), object)
        for group in np.unique(groups).tolist():
            column = file.read_row_group(row_groups[group], columns=["key"])["key"]
            keys[groups == group] = column.take(pa.array(rows[groups == group] - starts[group])).to_pylist()
        return keys.tolist()

    def groups(self) -> pa.DictionaryArray | None:
        """The group of each row; None if samples have no groups."""
        schema = self._opened[0].schema_arrow
        if GROUP.name not in schema.names:
            return None
        empty = schema.empty_table().select([GROUP.name])
        return pa.concat_tables([empty, *self.read([GROUP.name])])[GROUP.name].unify_dictionaries().combine_chunks()


@dataclass(frozen=True)
class Split:
    """The samples of one split that are not excluded: n of them in S shards; sample i of shard s is row shard_starts[s]
    + i.

    shard_paths: S file names or URLs. shard_sizes: (S,) int64, samples of each.
    shard_bytes: (S,) int64, of each tar. shard_sha256: (S,) hex. storage: how they are read.
    index, table: of all samples in the manifest, excluded or not. excluded_rows: int64, ascending, rows in the
    manifest.
    excluded_by: name of a list -> how many samples it excludes. pixels: what the values of its images mean.
    left_out: see `Dataset.left_out`; None if the images were not looked at.
    """

    name: str
    shard_paths: list[str]
    shard_sizes: np.ndarray
    shard_bytes: np.ndarray
    shard_sha256: pa.ChunkedArray
    storage: Storage
    index: ManifestIndex
    excluded_rows: np.ndarray
    excluded_by: dict[str, int]
    table: SampleTable
    pixels: Pixels
    left_out: dict[str, int] | None

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    @cached_property
    def shard_starts(self) -> np.ndarray:
        """(S + 1,) int64, the first row of each shard, and the number of all."""
        return np.concatenate([[0], np.cumsum(self.shard_sizes)])

    def part_of(self, row: int) -> tuple["Split", int]:
        """(the split that has this row, its row there): of a mixture, one of its splits, else itself."""
        return self, row

    @property
    def parts(self) -> tuple["Split", ...]:
        """The splits of a mixture in the order of its rows; else only itself."""
        return (self,)

    @property
    def set_names(self) -> list[str]:
        """Name of each part."""
        return [f"split {self.name!r}"]

    @property
    def max_labels(self) -> int:
        """The largest number of labels of one sample, excluded or not."""
        return self.index.max_labels

    def refuse_without_score(self, where: object, reads_labels: bool) -> None:
        """Raise UserError if nothing can be scored on it: without images, and for a score of labels, without those.
        where: its data set.
        """
        missing = (
            "no images" if not len(self) else "" if self.max_labels or not reads_labels else "images, but no labels"
        )
        if missing:
            raise UserError(
                f"{where}: split {self.name!r} has {missing}, so nothing can be scored on it. Name another split."
            )

    @cached_property
    def groups(self) -> np.ndarray | None:
        """int64 (n,), the number of each sample's group, such as of a patient, in this split of the data set; None if
        it has no groups.
        """
        column = self.table.groups()
        return None if column is None else np.delete(np.from_dlpack(column.indices), self.excluded_rows).astype("i8")

    @property
    def group_names(self) -> np.ndarray | None:
        """object (n,), the name of each sample's group; None if the data set has no groups."""
        column = self.table.groups()
        return None if column is None else np.delete(np.array(column.to_pylist(), object), self.excluded_rows)

    @property
    def excluded(self) -> str:
        """A short text that identifies the excluded samples, whatever lists exclude them."""
        if not len(self.excluded_rows):
            return NOTHING_EXCLUDED
        digest = hashlib.sha256(self.excluded_rows.astype("<i8", copy=False).data).hexdigest()
        # Compared with the text in a checkpoint, so "1 samples" stays.
        return f"{len(self.excluded_rows):,} samples ({digest[:8]})"

    def notes(self) -> list[str]:
        """Lines to print about how this split was opened; often none."""
        lines = []
        # Counted only where that needs no pass over all samples. With several labels, none is a label like any other.
        if self.max_labels == 1 and (bare := len(self.index) - len(self.index.labels)):
            lines.append(f"{self.name}: {bare:,} of {counted(len(self.index), 'sample')} have no label")
        if any(self.excluded_by.values()):  # Most lists are of another split.
            lists = ", ".join(f"{name} {count:,}" for name, count in self.excluded_by.items())
            # Rows that `only` left out are on no list.
            num_listed = min(len(self.excluded_rows), sum(self.excluded_by.values()))
            lines.append(f"excluded from {self.name}: {num_listed:,} of {counted(len(self.index), 'sample')} ({lists})")
        return lines + describe_left_out(self.left_out or {})

    def manifest_rows(self, rows: np.ndarray | int) -> np.ndarray:
        """Rows in the manifest, int64, of samples by their rows in this split."""
        # The method of an array takes half the time of numpy's function.
        return rows + self._kept_before.searchsorted(rows, side="right")

    def manifest_range(self, first: int, end: int) -> np.ndarray:
        """`manifest_rows` of the rows from `first` to the one before `end`."""
        begin, last = (int(self.manifest_rows(row)) for row in (first, end - 1))
        between = slice(*np.searchsorted(self.excluded_rows, (begin, last)))
        return np.delete(np.arange(begin, last + 1), self.excluded_rows[between] - begin)

    def place_of(self, row: int) -> tuple[int, int]:
        """(offset inside its tar, size) in bytes of one image."""
        at = self.manifest_rows(row)
        return int(self.index.offsets[at]), int(self.index.sizes[at])

    def labels_of(self, row: int) -> np.ndarray:
        """(labels,) int32 of one sample."""
        at = self.manifest_rows(row)
        return self.index.labels[self.index.label_starts[at] : self.index.label_starts[at + 1]]

    @property
    def num_targets(self) -> int:
        """T, how many numbers there are to predict of each sample."""
        return self.index.targets.shape[1]

    @property
    def target_values(self) -> np.ndarray:
        """float32 (n, T), the numbers to predict of all samples, NaN for a missing one."""
        return np.delete(self.index.targets[:], self.excluded_rows, axis=0)

    def targets_of(self, row: int) -> np.ndarray:
        """float32 (T,), of one sample."""
        return self.index.targets[self.manifest_rows(row)]

    def with_targets(self, names: Sequence[str], own: Sequence[str]) -> "Split":
        """The same samples with these numbers to predict, in this order; one that is not among `own`, those of its data
        set, is missing.
        """
        chosen = np.full((len(self.index), len(names)), np.nan, np.float32)
        for place, name in enumerate(names):
            if name in own:
                chosen[:, place] = self.index.targets[:][:, own.index(name)]
        return replace(self, index=replace(self.index, targets=chosen))

    def hash_of(self, row: int) -> bytes | None:
        """XXH3-128 of the bytes of one image; None where the manifest has none."""
        return self.index.hashes[self.manifest_rows(row)].tobytes() if len(self.index.hashes) else None

    @cached_property
    def label_counts(self) -> np.ndarray:
        """int64 (n,), how many of `label_values` each sample has."""
        return np.delete(np.diff(self.index.label_starts[:]), self.excluded_rows)

    @cached_property
    def label_values(self) -> np.ndarray:
        """int32, the labels of all samples, one after another. For work on whole splits; batches use labels_of."""
        if not len(self.excluded_rows):
            return self.index.labels[:]
        is_kept = np.ones(len(self.index), bool)
        is_kept[self.excluded_rows] = False
        return self.index.labels[:][np.repeat(is_kept, np.diff(self.index.label_starts[:]))]

    def only(self, rows: np.ndarray) -> "Split":
        """A split of these rows alone, int64, ascending. excluded_by does not count the others."""
        kept = np.bincount(self.shard_of(rows), minlength=len(self.shard_paths))
        excluded_rows = np.setdiff1d(np.arange(len(self.index)), self.manifest_rows(rows), assume_unique=True)
        return replace(self, shard_sizes=kept, excluded_rows=excluded_rows)

    def relabelled(self, label_map: np.ndarray) -> "Split":
        """The same samples with label_map[label], int32, in place of each label, which copies the labels."""
        return replace(self, index=replace(self.index, labels=label_map[self.index.labels[:]]))

    def without_labels(self) -> "Split":
        """The same samples, of which none has a label."""
        nothing = np.broadcast_to(np.int64(0), len(self.index) + 1)
        index = replace(self.index, label_starts=nothing, labels=np.empty(0, np.int32), max_labels=0)
        return replace(self, index=index)

    def shard_of(self, rows: np.ndarray | int) -> np.ndarray:
        """Index into shard_paths of each sample, int64, the shape of rows."""
        return np.searchsorted(self.shard_starts, rows, side="right") - 1

    def keys(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Keys of samples, read from disk at each call."""
        return self.table.keys(self.manifest_rows(np.asarray(rows, np.int64)))

    @cached_property
    def _kept_before(self) -> np.ndarray:
        """How many samples that are kept come before each excluded one."""
        return self.excluded_rows - np.arange(len(self.excluded_rows))


@dataclass(frozen=True)
class BadBudget:
    """How many distinct samples may be unreadable: a share of all that are read, and at least `least` unless the share
    is 0.

    share: None is 1 % of the first 100,000 samples, or 0.1 % of all where that is more. setting: the setting that gave
    `share`; empty if none did. remedy: the last sentence of the error. least: 1 where samples are trained on or scored;
    more where each is reported by itself.
    """

    share: float | None
    setting: str = "data.max_bad_share"
    remedy: str = "Check the shards, or raise data.max_bad_share."
    least: int = 1

    def allowed(self, num_samples: int) -> int:
        """The largest number of unreadable samples of `num_samples`."""
        if self.share == 0:
            return 0
        if self.share is None:
            return max(self.least, int(_SHARE * num_samples), int(_SHARE_OF_FEW * min(num_samples, _FEW)))
        return max(self.least, int(self.share * num_samples))

    def excess(self, bad: Mapping[int, str], split: Split, num_samples: int) -> str:
        """An error message if these samples of the split, row -> reason, are more than allowed of `num_samples`; else
        empty.
        """
        if len(bad) <= self.allowed(num_samples):
            return ""
        row = min(bad)
        limit = f", more than {self.setting} = {self.share} allows ({self.allowed(num_samples)})" * bool(self.setting)
        return (
            f"{counted(len(bad), 'sample')} of {num_samples} cannot be read{limit}; the first is"
            f" {split.keys([row])[0]}: {bad[row]}. {self.remedy}"
        )

    def excess_of_any_set(self, bad: Mapping[int, str], split: Split) -> str:
        """The error message if these rows of a training split are more than allowed of one of its sets; else empty."""
        first = 0
        for part in split.parts:
            own = {row - first: reason for row, reason in bad.items() if first <= row < first + len(part)}
            if text := self.excess(own, part, len(part)):
                return text
            first += len(part)
        return ""
