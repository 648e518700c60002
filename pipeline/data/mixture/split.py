"""The training splits of several data sets as one split, whose rows are numbered through them."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from pipeline.architecture.pixels import Pixels
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import NOTHING_EXCLUDED, Split
from pipeline.data.mixture.phases import Mixture
from pipeline.settings.run import MixedSet

# Name in a run's identity.
MIXTURE = "mixture"


def _ask_the_parts(split: Split) -> NoReturn:
    raise AssertionError("a mixture has this of each part only: see `parts` and `part_of`")


@dataclass(frozen=True, eq=False)
class Part:
    """One data set of a mixture. entry: its settings. split: its samples. label_map: its classes' numbers in the
    mixture, int32; None for a set whose labels are not read.
    """

    entry: MixedSet
    dataset: Dataset
    split: Split
    label_map: np.ndarray | None = None

    @property
    def name(self) -> str:
        """Its folder, its split unless that is train, and "without labels" if they are not read."""
        of_split = f":{self.split.name}" * (self.split.name != "train")
        return self.dataset.path.name + of_split + " without labels" * (not self.entry.labels)


@dataclass(frozen=True)
class MixedSplit(Split):
    """What training needs of the splits of several data sets; made by `mix`. The fields that it inherits are those of
    all shards.

    mixture: its settings. lines: more of what `notes` says.
    """

    mixture: Mixture
    sets: tuple[Part, ...]
    lines: tuple[str, ...]

    # Inherited, they would silently be those of the first part.
    place_of = hash_of = label_counts = label_values = groups = group_names = property(_ask_the_parts)
    only = relabelled = without_labels = with_targets = property(_ask_the_parts)

    @property
    def parts(self) -> tuple[Split, ...]:
        return tuple(one.split for one in self.sets)

    @property
    def max_labels(self) -> int:
        return max(part.max_labels for part in self.parts)

    @cached_property
    def first_rows(self) -> list[int]:
        """Of each part, and the number of all rows."""
        return [0, *itertools.accumulate(map(len, self.parts))]

    def _find(self, row: int) -> tuple[Part, int]:
        """(the part that has this row, its row there)."""
        number = bisect_right(self.first_rows, row) - 1
        return self.sets[number], row - self.first_rows[number]

    def labels_of(self, row: int) -> np.ndarray:
        one, row = self._find(row)
        labels = one.split.labels_of(row)
        return labels if one.label_map is None else one.label_map[labels]

    @property
    def num_targets(self) -> int:
        """Those of `open_run_data`, the same of each set."""
        return self.parts[0].num_targets

    @property
    def target_values(self) -> np.ndarray:
        return np.concatenate([part.target_values for part in self.parts])

    def targets_of(self, row: int) -> np.ndarray:
        one, row = self._find(row)
        return one.split.targets_of(row)

    def part_of(self, row: int) -> tuple[Split, int]:
        one, row = self._find(row)
        return one.split, row

    def set_of(self, rows: np.ndarray) -> np.ndarray:
        """The part of each row, int64."""
        return np.searchsorted(self.first_rows, rows, side="right") - 1

    def manifest_rows(self, rows: np.ndarray | int) -> np.ndarray:
        """Rows in the manifest of each sample's own data set."""
        return self._of_parts(np.asarray(rows), Split.manifest_rows, np.int64)

    def keys(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        return self._of_parts(np.asarray(rows, np.int64), Split.keys, object).tolist()

    def _of_parts(self, rows: np.ndarray, ask: Callable[[Split, np.ndarray], Any], dtype: type) -> np.ndarray:
        """Answers for these rows, each by its part, of which rows are asked."""
        numbers = self.set_of(rows)
        answers: np.ndarray = np.empty(rows.shape, dtype)
        for number, part in enumerate(self.parts):
            mine = numbers == number
            answers[mine] = ask(part, rows[mine] - self.first_rows[number])
        return answers

    @property
    def set_names(self) -> list[str]:
        return [one.name for one in self.sets]

    @property
    def shares(self) -> list[str]:
        """The share of each part, such as "30.00%, 10.00% from step 50,000"."""
        return [
            ", ".join(
                f"{float(phase.shares.share(number)):.2%}"
                + f" from step {phase.first_batch:,}" * bool(phase.first_batch)
                for phase in self.mixture.phases
            )
            for number in range(len(self.sets))
        ]

    def describe(self) -> str:
        """The sets with their shares and sizes, in one line."""
        sets = zip(self.sets, self.shares, strict=True)
        return "mixture: " + "; ".join(
            f"{one.name} {share} ({counted(len(one.split), 'sample')})" for one, share in sets
        )

    def notes(self) -> list[str]:
        of_sets = [f"{one.name}: {line}" for one in self.sets for line in one.split.notes()]
        return [self.describe(), *of_sets, *self.lines]


def mix(mixture: Mixture, sets: Sequence[Part], lines: Sequence[str], pixels: Pixels) -> MixedSplit:
    """One split of these sets, in this order. The first one's index, table and excluded samples stand for it elsewhere.

    pixels: of a model that reads all.
    """
    splits = [one.split for one in sets]
    sha256 = [chunk for split in splits for chunk in split.shard_sha256.chunks]
    of_all = {
        "shard_paths": [path for split in splits for path in split.shard_paths],
        "shard_sizes": np.concatenate([split.shard_sizes for split in splits]),
        "shard_bytes": np.concatenate([split.shard_bytes for split in splits]),
        "shard_sha256": pa.chunked_array(sha256, pa.string()),
        "pixels": pixels,
    }
    of_first = {field.name: getattr(splits[0], field.name) for field in fields(Split)}
    return MixedSplit(**of_first | of_all, mixture=mixture, sets=tuple(sets), lines=tuple(lines))


def mixture_facts(split: MixedSplit) -> dict[str, Any]:
    """A checkpoint's record of a mixture, as plain values: each set with its content, and by first batch the samples of
    each set in a period.
    """
    sets = [
        {
            "path": one.entry.path,
            "split": one.entry.split,
            "limit": str(one.entry.limit),
            "fingerprint": one.dataset.fingerprint,
            "excluded": one.split.excluded,
        }
        | ({} if one.entry.labels else {"labels": False})
        for one in split.sets
    ]
    return {
        "sets": sets,
        "phases": [[phase.first_batch, phase.shares.counts.tolist()] for phase in split.mixture.phases],
    }


def mixed_until(identity: Mapping[str, Any], batches: int) -> str:
    """Describes a run's first batches by its identity: equal texts have equal batches."""
    mixture = identity.get(MIXTURE) or _one_set(identity)
    phases = [(start, counts) for start, counts in mixture["phases"] if start < max(batches, 1)]
    words = []
    for number, one in enumerate(mixture["sets"]):
        counts = [of_phase[number] for _, of_phase in phases]
        if not any(counts):
            continue
        shares = ", then ".join(
            f"{of_phase[number]}/{sum(of_phase)}" + f" from step {start}" * bool(start) for start, of_phase in phases
        )
        but = f" without {one['excluded']}" * (one["excluded"] != NOTHING_EXCLUDED)
        but += " without its labels" * (not one.get("labels", True))
        words.append(f"set {number}: {one['fingerprint']} split {one['split']}{but}, {shares}")
    return "; ".join(words)


def _one_set(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a run with one data set."""
    one = {
        "split": identity.get("data.train_split", "train"),
        "fingerprint": identity.get("fingerprint"),
        "excluded": identity.get("excluded", NOTHING_EXCLUDED),
    }
    return {"sets": [one], "phases": [[0, [1]]]}
