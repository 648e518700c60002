"""Exact copies, samples with equal bytes: merges those of a source into one sample with the labels of all, and counts
those of a data set.

To merge, Ray tasks hash the samples whose size occurs more than once, in the order of their offsets in the source. The
hashes of each task are kept in the parts folder until the data set is finished. To count, the hashes of the manifest
are compared.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from data_tools.sharding.source_table import COMPARE
from data_tools.sources import Listing, Reader
from data_tools.sources.listing import SourceImage, label_lists, label_pairs, with_columns
from data_tools.tasks import tasks_on_cluster
from pipeline.base.errors import UserError
from pipeline.base.words import command_line, counted
from pipeline.data.dataset.exclusion import excluded_rows
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.mapped_index import ManifestIndex
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, file_size, make_folder, to_path

_SAMPLES_PER_TASK = 4096
# Images whose hashes are sorted at a time: some 300 MB. Images whose hashes are read at a time.
_COMPARED, _READ = 2**24, 2**20
_HASH_BYTES = 16
_UNREADABLE = bytes(_HASH_BYTES)


@dataclass(frozen=True)
class HashJob:
    """A task: hash these samples, and save the hashes to `path`.

    again: ignore hashes saved by an earlier run.
    """

    path: str
    images: list[SourceImage]
    again: bool = False


@dataclass(frozen=True)
class Copies:
    """What was merged. rows: (key, split, key and split of the kept sample) of each removed sample.

    of_test: how many were removed from 'train' because a sample of another split has the same bytes. other_numbers: how
    many had other numbers to predict than the kept one.
    """

    rows: list[tuple[str, str, str, str]]
    of_test: int
    other_numbers: int


def merge_copies(listing: Listing, folder: AnyPath, num_tasks: int, out: AnyPath) -> tuple[Listing, Copies]:
    """Returns the listing without copies, and what was merged.

    Within a split, the first key of equal bytes is kept, with its numbers to predict, and gets the labels of all.
    Samples of 'train' with a copy in another split are removed, so that no test image is trained on. Copies between
    other splits are kept.

    folder: where hashes are saved. num_tasks: concurrent tasks, 0 is one per CPU. out: folder of progress.json.
    """
    sizes = listing.table["size"].to_numpy()
    _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    rows = np.flatnonzero((counts[inverse] > 1) & (sizes > 0))
    # By position in the source, so that archives are read sequentially.
    place = [listing.table[name].to_numpy()[rows] for name in ("offset", "container")]
    rows = rows[np.lexsort(place)]
    return _merge(listing, rows, _hash_all(listing, rows, folder, num_tasks, out))


@dataclass(frozen=True)
class SplitCopies:
    """How many images of a split have the bytes of others. other_labels: of others in the split with other labels.

    in_splits: name of another split -> of its images; of each two splits once, of 'train' if that is one of them.
    """

    other_labels: int
    in_splits: dict[str, int]


def exact_copies(dataset: Dataset, exclude: str) -> dict[str, SplitCopies]:
    """Split -> its copies, without the samples that the lists `exclude` name (see `Dataset.split`). Raises
    UserError.
    """
    found: dict[str, SplitCopies] = {}
    earlier: dict[str, np.ndarray] = {}
    images: dict[str, tuple[ManifestIndex, np.ndarray]] = {}
    for split in sorted(dataset.splits, key=lambda name: name == "train"):
        index = dataset.index(split)
        stays = np.ones(len(index), bool)
        stays[excluded_rows(dataset, split, exclude)[0]] = False
        images[split] = index, stays
    occur_twice = _occur_twice([*images.values()])
    for split, (index, stays) in images.items():
        rows = np.concatenate([rows[np.isin(some, occur_twice)] for rows, some in _digests(index, stays)])
        digests = _first_halves(index.hashes[rows])
        _, group, sizes = np.unique(digests, return_inverse=True, return_counts=True)
        labels = defaultdict[int, set[bytes]](set)
        repeated = np.flatnonzero(sizes[group] > 1)
        for number, row in zip(group[repeated].tolist(), rows[repeated].tolist(), strict=True):
            labels[number].add(index.labels[index.label_starts[row] : index.label_starts[row + 1]].tobytes())
        num_differ = sum(int(sizes[number]) for number, sets in labels.items() if len(sets) > 1)
        in_splits = {name: num for name, other in earlier.items() if (num := int(np.isin(digests, other).sum()))}
        earlier[split] = digests
        found[split] = SplitCopies(num_differ, in_splits)
    return {split: found[split] for split in dataset.splits}


def _occur_twice(images: list[tuple[ManifestIndex, np.ndarray]]) -> np.ndarray:
    """The digests that several images have, each once."""
    # Divided by their last bits into parts, each of which is sorted.
    mask = (1 << (sum(len(index) for index, _ in images) // _COMPARED).bit_length()) - 1
    found = []
    for part in range(mask + 1):
        digests = np.concatenate([some[some & mask == part] for pair in images for _, some in _digests(*pair)])
        digests.sort()
        found.append(np.unique(digests[1:][digests[1:] == digests[:-1]]))
    return np.concatenate(found)


def _digests(index: ManifestIndex, stays: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (rows, their digests), many at a time. stays: (n,) bool, the rows to yield."""
    for start in range(0, len(index), _READ):
        chosen = np.flatnonzero(stays[start : start + _READ])
        yield start + chosen, _first_halves(index.hashes[start : start + _READ])[chosen]


def _first_halves(hashes: np.ndarray) -> np.ndarray:
    """(n,) uint64: that two of 100 million images agree by chance has a probability of 0.03 %. hashes: (n,) V16."""
    return np.ascontiguousarray(hashes).view(np.uint64)[::2]


def copy_notes(dataset: Dataset, found: dict[str, SplitCopies]) -> list[str]:
    """Lines about the exact copies in a data set, with the commands that exclude them; often none."""
    lines = []
    for split, copies in found.items():
        searched = f"data={dataset.path}", f"split={split}"
        if num := copies.other_labels:
            lines.append(
                f"note: {split}: {counted(num, 'image')} with the same bytes as an image of another class. To exclude"
                f" all but one of each: {command_line('dedup', *searched, 'within_split=true')}"
            )
        lines += [
            f"note: {split}: {counted(num, 'exact copy')} of images in {other}. To exclude them:"
            f" {command_line('dedup', *searched, f'against={dataset.path}:{other}')}"
            for other, num in copies.in_splits.items()
        ]
    return lines


def hash_samples(job: HashJob) -> bytes:
    """Ray task: returns the concatenated hashes of the job's samples, from the saved file if there is one.

    They are saved if all samples could be read.
    """
    path = to_path(job.path)
    if not job.again and path.exists() and file_size(path) == len(job.images) * _HASH_BYTES:
        return path.read_bytes()
    hashes = []
    with Reader() as reader:
        for image in job.images:
            try:
                digest = hashlib.sha256(b"" if image.page < 0 else str(image.page).encode())
                for file in image.files:
                    digest.update(b"lacking" if file is None else reader.read(*file))
                hashes.append(digest.digest()[:_HASH_BYTES])
            except UserError:  # For example, the object store cannot be reached.
                raise
            except (OSError, ValueError):
                # `write_shard` will report it as a bad image.
                hashes.append(_UNREADABLE)
    data = b"".join(hashes)
    if _UNREADABLE not in hashes:
        with replacing(path) as saved:
            saved.write(data)
    return data


def _hash_all(listing: Listing, rows: np.ndarray, folder: AnyPath, num_tasks: int, out: AnyPath) -> np.ndarray:
    """(rows, 2) uint64: the hash of each row; zeros for an unreadable sample."""
    make_folder(folder)
    starts = range(0, len(rows), _SAMPLES_PER_TASK)

    def jobs() -> Iterator[HashJob]:
        for start in starts:
            images = listing.images(rows[start : start + _SAMPLES_PER_TASK])
            # Named by the samples: the same source, packed again, may have them in another order.
            name = hashlib.sha256(json.dumps(images).encode()).hexdigest()[:16]
            again = any(image.mtime == COMPARE for image in images)
            yield HashJob(str(folder / f"{name}.hashes"), images, again)

    hashes = np.zeros((len(rows), 2), np.uint64)
    sizes = listing.table["size"].to_numpy()
    with tasks_on_cluster(hash_samples, jobs(), num_tasks, len(rows), len(starts), out, "hashed") as (tasks, progress):
        for number, data in tasks:
            part = slice(starts[number], starts[number] + _SAMPLES_PER_TASK)
            hashes[part] = np.frombuffer(data, np.uint64).reshape(-1, 2)
            progress.add(len(data) // _HASH_BYTES, int(sizes[rows[part]].sum()))
    return hashes


def _merge(listing: Listing, rows: np.ndarray, hashes: np.ndarray) -> tuple[Listing, Copies]:
    """Merge equal samples. rows: (n,) the hashed rows of the listing; hashes: (n, 2)."""
    split = listing.table["split"].to_numpy().astype(np.int64)
    num_splits = len(listing.splits)
    readable = hashes.any(axis=1)
    group = _first_equal(rows[readable], hashes[readable], len(listing))

    # The first row of each (group, split) is kept.
    _, first, inverse = np.unique(group * num_splits + split, return_index=True, return_inverse=True)
    keeper = first[inverse]
    train = np.array([name == "train" for name in listing.splits])[split]
    # The first sample of each group that is not in 'train'.
    tested = np.full(len(listing), -1)
    others = np.flatnonzero(~train)[::-1]
    tested[group[others]] = others
    leaked = train & (tested[group] >= 0)
    keeper[leaked] = tested[group[leaked]]
    stays = keeper == np.arange(len(listing))

    # The labels of a copy removed from 'train' are not added to a test sample.
    of, labels = label_pairs(listing.table)
    gives = ~leaked[of]
    lists = label_lists(keeper[of[gives]], labels[gives], len(listing))
    table = with_columns(listing.table, labels=lists)
    gone = np.flatnonzero(~stays)
    names = np.array(listing.splits, object)
    keys = [listing.table["key"].take(pa.array(numbers)).to_pylist() for numbers in (gone, keeper[gone])]
    copies = list(zip(keys[0], names[split[gone]], keys[1], names[split[keeper[gone]]], strict=True))
    kept = replace(listing, table=table.filter(pa.array(stays)).combine_chunks())
    numbers = [listing.table["targets"].take(pa.array(numbers)).to_pylist() for numbers in (gone, keeper[gone])]
    differ = sum(one != other for one, other in zip(*numbers, strict=True))
    return kept, Copies(copies, int(leaked.sum()), differ)


def _first_equal(rows: np.ndarray, hashes: np.ndarray, num_rows: int) -> np.ndarray:
    """(num_rows,) int64: the first row with the same hash; the row itself if it was not hashed."""
    order = np.argsort(rows)
    _, first, inverse = np.unique(hashes[order], axis=0, return_index=True, return_inverse=True)
    group = np.arange(num_rows)
    group[rows[order]] = rows[order][first[inverse.ravel()]]
    return group
