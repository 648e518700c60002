"""Counts the exact copies in a data set, samples with equal bytes, by the hashes of its manifest."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from pipeline.base.words import command_line, counted
from pipeline.data.dataset.exclusion import excluded_rows
from pipeline.data.dataset.manifest import Dataset


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
    for split in sorted(dataset.splits, key=lambda name: name == "train"):
        index = dataset.index(split)
        rows = np.delete(np.arange(len(index)), excluded_rows(dataset, split, exclude)[0])
        # The first halves of hashes: that two of 100 million images agree by chance has a probability of 0.03 %.
        digests = np.ascontiguousarray(index.hashes[:]).view(np.uint64)[::2][rows]
        there, counts = np.unique(digests, return_counts=True)
        repeated = np.flatnonzero(np.isin(digests, there[counts > 1]))
        labels = defaultdict[int, list[bytes]](list)
        for digest, row in zip(digests[repeated].tolist(), rows[repeated].tolist(), strict=True):
            labels[digest].append(index.labels[index.label_starts[row] : index.label_starts[row + 1]].tobytes())
        num_differ = sum(len(of_digest) for of_digest in labels.values() if len({*of_digest}) > 1)
        in_splits = {name: num for name, other in earlier.items() if (num := int(np.isin(digests, other).sum()))}
        earlier[split] = there
        found[split] = SplitCopies(num_differ, in_splits)
    return {split: found[split] for split in dataset.splits}


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
