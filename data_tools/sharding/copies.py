"""Exact copies: samples whose bytes are equal become one sample with the labels of all.

The bytes are read once more for that, by Ray tasks in the order in which they lie in the source. Only samples that have
the size of another are read. Each task's hashes stay in the parts folder until the data set is finished.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from data_tools.progress import Progress
from data_tools.sources import Listing, Reader
from data_tools.sources.listing import TABLE, label_lists
from data_tools.sources.reader import raise_if_lost
from pipeline import ray_tasks
from pipeline.data.storage.bucket import AnyPath, file_size, make_folder, to_path
from pipeline.data.storage.whole import replacing
from pipeline.errors import UserError

_SAMPLES_PER_TASK = 4096
_HASH_BYTES = 16
_UNREADABLE = bytes(_HASH_BYTES)


@dataclass(frozen=True)
class HashJob:
    """Hashes to be: rows are those of `Listing.rows`; path is the file that keeps the hashes.

    again: whether hashes of an earlier run are not to be taken.
    """

    path: str
    rows: dict[str, list[Any]]
    again: bool = False


@dataclass(frozen=True)
class Copies:
    """What was merged. rows: (key, split, key and split of the sample that it is a copy of), of samples that went.

    of_test: how many of them went from 'train' because a sample of another split has the same bytes.
    """

    rows: list[tuple[str, str, str, str]]
    of_test: int


def merge_copies(
    listing: Listing, folder: AnyPath, num_tasks: int, out: AnyPath, doubtful: Set[str] = frozenset()
) -> tuple[Listing, Copies]:
    """The listing without copies.

    folder: where hashes are kept; num_tasks: at a time, 0 is one per CPU; out: of progress.json.
    doubtful: keys of samples that an earlier run could not read: those of now may have other bytes, and are hashed again.

    Within a split, the first key of equal bytes stays and gets the labels of all. Samples of 'train' that have a copy in
    another split go: what is tested on is not trained on. Splits other than 'train' do not change each other.
    """
    sizes = listing.table["size"].to_numpy()
    _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    rows = np.flatnonzero((counts[inverse] > 1) & (sizes > 0))
    # As they lie in the source, so that archives are read from front to back.
    place = [listing.table[name].to_numpy()[rows] for name in ("offset", "container")]
    rows = rows[np.lexsort(place)]
    return _merge(listing, rows, _hash_all(listing, rows, folder, num_tasks, out, doubtful))


def hash_samples(job: HashJob) -> bytes:
    """The hashes of some samples, one after another; from the file of an earlier run if there is one. Ray's task."""
    path = to_path(job.path)
    num_samples = len(job.rows["path"])
    if not job.again and path.exists() and file_size(path) == num_samples * _HASH_BYTES:
        return path.read_bytes()
    hashes = []
    with Reader() as reader:
        columns = (job.rows[name] for name in ("path", "offset", "size", "packed"))
        for place in zip(*columns, strict=True):
            try:
                hashes.append(hashlib.sha256(reader.read(*place)).digest()[:_HASH_BYTES])
            except UserError:  # A bucket out of reach, say: no fault of this sample.
                raise
            except (OSError, ValueError) as error:
                raise_if_lost(error, place[0])
                # Whoever writes the shard meets it again, counts it and names it.
                hashes.append(_UNREADABLE)
    data = b"".join(hashes)
    with replacing(path) as file:
        file.write(data)
    return data


def _hash_all(
    listing: Listing, rows: np.ndarray, folder: AnyPath, num_tasks: int, out: AnyPath, doubtful: Set[str]
) -> np.ndarray:
    """(rows, 2) uint64."""
    make_folder(folder)
    starts = range(0, len(rows), _SAMPLES_PER_TASK)

    def jobs() -> Iterator[HashJob]:
        for number, start in enumerate(starts):
            of_job = listing.rows(rows[start : start + _SAMPLES_PER_TASK])
            yield HashJob(str(folder / f"{number:06d}.hashes"), of_job, not doubtful.isdisjoint(of_job["key"]))

    hashes = np.zeros((len(rows), 2), np.uint64)
    sizes = listing.table["size"].to_numpy()
    num_cpus = ray_tasks.connect(num_tasks)
    progress = Progress(len(rows), len(starts), out, "hashed")
    tasks = ray_tasks.run_tasks(hash_samples, jobs(), num_tasks or num_cpus, progress.retried)
    with progress, contextlib.closing(tasks):
        for number, data in tasks:
            part = slice(starts[number], starts[number] + _SAMPLES_PER_TASK)
            hashes[part] = np.frombuffer(data, np.uint64).reshape(-1, 2)
            progress.add(len(data) // _HASH_BYTES, int(sizes[rows[part]].sum()))
    return hashes


def _merge(listing: Listing, rows: np.ndarray, hashes: np.ndarray) -> tuple[Listing, Copies]:
    """rows: (n,) of the listing whose bytes were hashed; hashes: (n, 2)."""
    split = listing.table["split"].to_numpy().astype(np.int64)
    num_splits = len(listing.splits)
    readable = hashes.any(axis=1)
    group = _first_equal(rows[readable], hashes[readable], len(listing))

    # The first row of each (group, split) stands for all of them.
    _, first, inverse = np.unique(group * num_splits + split, return_index=True, return_inverse=True)
    keeper = first[inverse]
    if "train" in listing.splits:
        train = split == listing.splits.index("train")
        # Of each group, its first sample that is not of 'train'.
        tested = np.full(len(listing), -1)
        others = np.flatnonzero(~train)[::-1]
        tested[group[others]] = others
        leaked = train & (tested[group] >= 0)
        keeper[leaked] = tested[group[leaked]]
    else:
        leaked = np.zeros(len(listing), bool)
    stays = keeper == np.arange(len(listing))

    # A copy that leaves 'train' takes its labels with it: those of a test set are not ours to change.
    of, labels = listing.label_pairs()
    gives = ~leaked[of]
    lists = label_lists(keeper[of[gives]], labels[gives], len(listing))
    table = listing.table.set_column(TABLE.get_field_index("labels"), "labels", lists)
    gone = np.flatnonzero(~stays)
    names = np.array(listing.splits, object)
    keys = [listing.table["key"].take(pa.array(numbers)).to_pylist() for numbers in (gone, keeper[gone])]
    copies = list(zip(keys[0], names[split[gone]], keys[1], names[split[keeper[gone]]], strict=True))
    kept = replace(listing, table=table.filter(pa.array(stays)).combine_chunks())
    return kept, Copies(copies, int(leaked.sum()))


def _first_equal(rows: np.ndarray, hashes: np.ndarray, num_rows: int) -> np.ndarray:
    """(num_rows,) int64: for each row the first one with the same hash; itself for rows that were not hashed."""
    order = np.lexsort((rows, hashes[:, 1], hashes[:, 0]))
    rows, hashes = rows[order], hashes[order]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    group = np.arange(num_rows)
    group[rows] = rows[is_new][np.cumsum(is_new) - 1]
    return group
