"""Moves held-out samples from 'train' to 'val', whole groups if there are some; hashes of keys for random choices."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.sources import Listing
from data_tools.sources.listing import label_pairs, with_columns
from data_tools.sources.spill import slices
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.dataset.split import group_finder
from pipeline.settings.commands.data import ShardConfig


def with_groups(listing: Listing, pattern: str) -> Listing:
    """The listing with the groups that `pattern` (group_pattern) finds in the keys; itself without one.

    Raises UserError as `group_finder`.
    """
    if not pattern:
        return listing
    find = group_finder(pattern)

    def grouped(table: pa.Table) -> pa.Table:
        return with_columns(table, group=pa.array(find(table["key"].to_pylist()), pa.large_string()))

    return replace(listing, table=listing.changed(grouped))


def describe_groups(groups: Mapping[str, pa.Array | pa.ChunkedArray]) -> list[str]:
    """Lines to print about the groups of a data set: their number, and a warning if one is in several splits.

    groups: split -> the group of each sample; none of those without groups.
    """
    counts = {split: _sizes(column) for split, column in groups.items()}
    lines = [
        f"groups of {split}: {len(of):,}, of at most {counted(max(of.values()), 'image')}"
        for split, of in counts.items()
        if of
    ]
    for one, other in itertools.combinations(counts, 2):
        if both := sorted(counts[one].keys() & counts[other].keys()):
            lines.append(
                f"warning: {counted(len(both), 'group')} with images in both {one!r} and {other!r}, such as"
                f" {printable(both[0])!r}: a model that learnt from one of these splits is not scored on unseen groups"
                " by the other"
            )
    return lines


def groups_of(listing: Listing) -> dict[str, pa.ChunkedArray]:
    """Split -> the group of each sample; empty without groups."""
    if not listing.has_groups:
        return {}
    split, groups = listing.table["split"], listing.table["group"]
    return {name: groups.filter(pc.equal(split, number)) for number, name in enumerate(listing.splits)}


def _sizes(groups: pa.Array | pa.ChunkedArray) -> dict[str, int]:
    """The number of samples of each group."""
    return {row["values"]: row["counts"] for row in pc.value_counts(groups).to_pylist()}


def hold_out(listing: Listing, config: ShardConfig) -> Listing:
    """Move samples of 'train' to a new split 'val', according to val_share or holdout_per_class."""
    if not (config.val_share or config.holdout_per_class):
        return listing
    split = listing.table["split"].to_numpy().copy()
    train = split == listing.splits.index("train")
    chosen = _share(listing, train, config.val_share) if config.val_share else _per_class(listing, train, config)
    split[chosen] = len(listing.splits)
    table = with_columns(listing.table, split=pa.array(split, pa.int8()))
    return replace(listing, splits=[*listing.splits, "val"], table=table)


def hash_keys(keys: pa.ChunkedArray, prefix: str) -> np.ndarray:
    """(keys,) uint64: the first 8 bytes of sha256(prefix + key)."""
    return _hash([prefix + key for key in keys.to_pylist()])


def _hash(texts: Sequence[str]) -> np.ndarray:
    """(texts,) uint64: the first 8 bytes of the sha256 of each."""
    digests = b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def _share(listing: Listing, train: np.ndarray, share: float) -> np.ndarray:
    """Chosen by a hash of the key or of the group alone, so that more images or another seed do not change the
    choice.
    """
    limit = int(share * 2**64)
    if listing.has_groups:
        groups = pc.dictionary_encode(listing.table["group"].combine_chunks())
        chosen = (_hash(groups.dictionary.to_pylist()) < limit)[groups.indices.to_numpy()]
    else:
        chosen = np.concatenate([hash_keys(table["key"], "") < limit for table in slices(listing.table)])
    chosen &= train
    num_val, num_train = int(chosen.sum()), int((train & ~chosen).sum())
    if not num_val or not num_train:
        raise UserError(
            f"val_share = {share} of {counted(num_val + num_train, 'image')}{' in whole groups' * listing.has_groups}"
            f" leaves {num_train} for 'train' and {num_val} for 'val'. Use another val_share."
        )
    return chosen


def _per_class(listing: Listing, train: np.ndarray, config: ShardConfig) -> np.ndarray:
    """The first images of each class by key, the order of `ls | head` (ImageNet-21K-P, processing script).

    An image of several classes is chosen if it is among the first of any of them.
    """
    rows, labels = label_pairs(listing.table)
    in_train = train[rows]
    rows, labels = rows[in_train], labels[in_train]
    order = np.argsort(labels, kind="stable")
    rows, labels = rows[order], labels[order]
    counts = np.bincount(labels, minlength=len(listing.classes))
    small = np.flatnonzero((counts <= config.holdout_per_class) & (counts > 0))
    if len(small):
        raise UserError(
            f"holdout_per_class = {config.holdout_per_class} leaves nothing to train on of"
            f" {counted(len(small), 'class')}, such as {listing.classes[small[0]]!r} with {counts[small[0]]}. Set"
            f" min_images={config.holdout_per_class} to leave them out, or hold out fewer."
        )
    rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[labels]
    chosen = np.zeros(len(listing), bool)
    chosen[rows[rank < config.holdout_per_class]] = True
    return chosen
