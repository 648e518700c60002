"""What the settings make of a listing: the classes that it keeps, their order and readable names, its groups, and the
samples of 'train' that are held out as 'val', whole groups if there are some; and what is said of all this. Hashes of
keys for random choices.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_tools.sources import Listing
from data_tools.sources.labels import read_names
from data_tools.sources.listing import label_lists, label_pairs, with_columns
from data_tools.sources.spill import slices
from pipeline.base.errors import UserError
from pipeline.base.words import counted, first_of, printable
from pipeline.data.dataset.split import group_finder
from pipeline.process.installed import read_lines
from pipeline.settings.commands.data import ShardConfig


def apply_rules(listing: Listing, config: ShardConfig) -> Listing:
    """Choose and order (class_list), then drop small classes (min_images).

    A sample that loses its last label is excluded, and counted in the notes. Raises UserError for a file that cannot be
    read or names unknown classes, and when no sample is left.
    """
    chosen = ("class_list", "min_images", "holdout_per_class", "synset_names", "label_names")
    if not listing.classes and (given := [name for name in chosen if getattr(config, name)]):
        raise UserError(
            f"{given[0]} = {getattr(config, given[0])} needs classes, but the images of {listing.source} have no"
            " labels."
        )
    if config.class_list:
        wanted = read_names(config.class_list, "class_list")
        if unknown := sorted({*wanted} - {*listing.classes}):
            raise UserError(
                f"class_list = {config.class_list}: {counted(len(unknown), 'name')} of no class, such as"
                f" {unknown[0]!r}. There are: {first_of(listing.classes)}."
            )
        listing = _choose(listing, wanted, f"not in class_list = {config.class_list}")
    if config.min_images:
        counts = _counts(listing)["train"]
        kept = [name for name, count in zip(listing.classes, counts, strict=True) if count > config.min_images]
        if not kept:
            raise UserError(
                f"min_images = {config.min_images:,} leaves no class: the largest has"
                f" {counted(counts.max(initial=0), 'image')}."
            )
        listing = _choose(listing, kept, f"of at most min_images = {counted(config.min_images, 'image')}")
    return listing


def refuse_untrained(listing: Listing, config: ShardConfig) -> None:
    """Raises UserError if other splits have classes without an image in 'train', unless class_list chooses the classes.

    A misread layout produces such classes, and every score on them would be wrong.
    """
    if "train" not in listing.splits or config.class_list:
        return
    counts = _counts(listing)
    for split, of_split in counts.items():
        unknown = np.flatnonzero((of_split > 0) & (counts["train"] == 0))
        if len(unknown):
            raise UserError(
                f"{listing.source}: 'train' has no image of {len(unknown):,} of the"
                f" {counted(int((of_split > 0).sum()), 'class')} of {split!r}, such as"
                f" {printable(listing.classes[unknown[0]])!r}. Are its folders or labels those of the same classes? If"
                " they are, name the classes to keep: class_list=FILE."
            )


def readable_names(classes: list[str], synset_names: str) -> list[str] | None:
    """The readable name of each class by the file synset_names, the class itself where it has none; None without a
    file.

    Raises UserError for a file that names no class.
    """
    if not synset_names:
        return None
    lines = read_lines(synset_names, "synset_names")
    names = dict(parts for line in lines if len(parts := line.strip().split(None, 1)) == 2)
    if not names.keys() & set(classes):
        raise UserError(
            f"synset_names = {synset_names} names none of the {counted(len(classes), 'class')}, such as"
            f" {classes[0]}. Its lines are 'wnid name', such as: {lines[0][:60]}"
        )
    return [names.get(name, name) for name in classes]


def _choose(listing: Listing, classes: list[str], reason: str) -> Listing:
    """The listing with these of its classes alone, in this order. reason: what the others are."""
    number = {name: place for place, name in enumerate(classes)}
    new = np.array([number.get(name, -1) for name in listing.classes], np.int32)

    def relabelled(table: pa.Table) -> pa.Table:
        rows, labels = label_pairs(table)
        stays = new[labels] >= 0
        # Samples that had no label before are kept.
        lost = np.zeros(len(table), bool)
        lost[rows] = True
        lost[rows[stays]] = False
        lists = label_lists(rows[stays], new[labels][stays], len(table))
        return with_columns(table, labels=lists).filter(pa.array(~lost))

    table, notes = listing.changed(relabelled), list(listing.notes)
    if num_lost := len(listing) - len(table):
        num_classes = int((new < 0).sum())
        notes.append(f"left out {counted(num_lost, 'image')} with {counted(num_classes, 'class')} {reason}")
    if not len(table):
        raise UserError(f"{listing.source}: no image is left, all are of classes {reason}.")
    return replace(listing, classes=classes, table=table, notes=notes)


def _counts(listing: Listing) -> dict[str, np.ndarray]:
    """Split -> (classes,) int64: number of images of each class."""
    counts = np.zeros((len(listing.splits), len(listing.classes)), np.int64)
    for table in slices(listing.table):
        rows, labels = label_pairs(table)
        np.add.at(counts, (table["split"].to_numpy()[rows], labels), 1)
    return dict(zip(listing.splits, counts, strict=True))


def odd_classes(listing: Listing) -> list[str]:
    """Messages about classes with no or one training image, which are usually a mistake."""
    counts = _counts(listing).get("train", ())
    few = [name for name, count in zip(listing.classes, counts, strict=False) if count < 2]
    return [f"{counted(len(few), 'class')} with at most one image in train: {first_of(few)}"] if few else []


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
    counts = {
        split: {row["values"]: row["counts"] for row in pc.value_counts(column).to_pylist()}
        for split, column in groups.items()
    }
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


def hash_keys(keys: Iterable[str], prefix: str = "") -> np.ndarray:
    """(keys,) uint64: the first 8 bytes of sha256(prefix + key)."""
    digests = b"".join(hashlib.sha256(f"{prefix}{key}".encode()).digest()[:8] for key in keys)
    return np.frombuffer(digests, ">u8").astype(np.uint64)


def _share(listing: Listing, train: np.ndarray, share: float) -> np.ndarray:
    """Chosen by a hash of the key or of the group alone, so that more images or another seed do not change the
    choice.
    """
    limit = int(share * 2**64)
    if listing.has_groups:
        groups = pc.dictionary_encode(listing.table["group"].combine_chunks())
        chosen = (hash_keys(groups.dictionary.to_pylist()) < limit)[groups.indices.to_numpy()]
    else:
        chosen = np.concatenate([hash_keys(table["key"].to_pylist()) < limit for table in slices(listing.table)])
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


def describe_targets(listing: Listing) -> Iterator[str]:
    """Lines to print: the values of each number in each split. Raises UserError for one that no image has."""
    if not listing.targets:
        return
    flat = pc.fill_null(pc.list_flatten(listing.table["targets"]), float("nan")).to_numpy()
    values = flat.reshape(len(listing), len(listing.targets))  # NaN for a missing one.
    split = listing.table["split"].to_numpy()
    for place, name in enumerate(listing.targets):
        if not np.isfinite(values[:, place]).any():
            raise UserError(f"{listing.source}: no image has a value of {name!r} (target_columns).")
        for number, of_split in enumerate(listing.splits):
            found = values[split == number, place]
            present = found[np.isfinite(found)]
            line = f"{printable(name)}: {len(present):,} of {counted(len(found), 'image')} of {of_split} have a value"
            if len(present):
                line += f", {present.min():.6g} to {present.max():.6g}, mean {present.mean():.6g}"
            yield line
