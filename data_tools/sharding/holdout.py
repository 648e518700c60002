"""Moves held-out samples from 'train' to 'val'; hashes of keys for random choices."""

import hashlib
from dataclasses import replace

import numpy as np
import pyarrow as pa

from data_tools.sources import Listing
from data_tools.sources.listing import TABLE
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.settings.commands.data import ShardConfig

_BATCH = 2**18


def hold_out(listing: Listing, config: ShardConfig) -> Listing:
    """Move samples of 'train' to a new split 'val', according to val_share or holdout_per_class."""
    if not (config.val_share or config.holdout_per_class):
        return listing
    split = listing.table["split"].to_numpy().copy()
    train = split == listing.splits.index("train")
    chosen = _share(listing, train, config.val_share) if config.val_share else _per_class(listing, train, config)
    split[chosen] = len(listing.splits)
    table = listing.table.set_column(TABLE.get_field_index("split"), "split", pa.array(split, pa.int8()))
    return replace(listing, splits=[*listing.splits, "val"], table=table)


def hash_keys(listing: Listing, prefix: str) -> np.ndarray:
    """(samples,) uint64: the first 8 bytes of sha256(prefix + key)."""
    parts = []
    for start in range(0, len(listing), _BATCH):
        keys = listing.table["key"].slice(start, _BATCH).to_pylist()
        digests = b"".join(hashlib.sha256((prefix + key).encode()).digest()[:8] for key in keys)
        parts.append(np.frombuffer(digests, ">u8").astype(np.uint64))
    return np.concatenate(parts)


def _share(listing: Listing, train: np.ndarray, share: float) -> np.ndarray:
    """Chosen by a hash of the key alone, so that more images or another seed do not change the choice."""
    chosen = train & (hash_keys(listing, "") < int(share * 2**64))
    num_val, num_train = int(chosen.sum()), int((train & ~chosen).sum())
    if not num_val or not num_train:
        raise UserError(
            f"val_share = {share} of {counted(num_val + num_train, 'image')} leaves {num_train} for 'train' and "
            f"{num_val} for 'val'. Use another val_share."
        )
    return chosen


def _per_class(listing: Listing, train: np.ndarray, config: ShardConfig) -> np.ndarray:
    """The first images of each class by key, the order of `ls | head` (ImageNet-21K-P, processing script).

    An image of several classes is chosen if it is among the first of any of them.
    """
    rows, labels = listing.label_pairs()
    in_train = train[rows]
    rows, labels = rows[in_train], labels[in_train]
    order = np.argsort(labels, kind="stable")
    rows, labels = rows[order], labels[order]
    counts = np.bincount(labels, minlength=len(listing.classes))
    small = np.flatnonzero((counts <= config.holdout_per_class) & (counts > 0))
    if len(small):
        raise UserError(
            f"holdout_per_class = {config.holdout_per_class} leaves nothing to train on of {counted(len(small), 'class')}, such as "
            f"{listing.classes[small[0]]!r} with {counts[small[0]]}. Set min_images={config.holdout_per_class} to leave "
            "them out, or hold out fewer."
        )
    rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[labels]
    chosen = np.zeros(len(listing), bool)
    chosen[rows[rank < config.holdout_per_class]] = True
    return chosen
