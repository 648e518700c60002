"""Class rules of a sharding job: which classes it keeps, their order, readable names."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from data_tools.sources import Listing
from data_tools.sources.labels import read_names
from data_tools.sources.listing import label_lists, label_pairs, with_columns
from data_tools.sources.spill import slices
from pipeline.base.errors import UserError
from pipeline.base.words import counted, first_of, printable
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
        counts = _count(listing, listing.splits.index("train"))
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
    trained = _count(listing, listing.splits.index("train")) > 0
    for number, split in enumerate(listing.splits):
        there = _count(listing, number) > 0
        unknown = [name for name, is_new in zip(listing.classes, there & ~trained, strict=True) if is_new]
        if unknown:
            raise UserError(
                f"{listing.source}: 'train' has no image of {len(unknown):,} of the"
                f" {counted(int(there.sum()), 'class')} of {split!r}, such as {printable(unknown[0])!r}. Are its"
                " folders or labels those of the same classes? If they are, name the classes to keep:"
                f" class_list=FILE."
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
    number = {name: place for place, name in enumerate(classes)}
    return _relabel(listing, classes, np.array([number.get(name, -1) for name in listing.classes], np.int32), reason)


def _relabel(listing: Listing, classes: list[str], new: np.ndarray, reason: str) -> Listing:
    """The listing with new `classes`. new: (old classes,) new number of each old class, -1 for a removed one."""

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


def _count(listing: Listing, split: int) -> np.ndarray:
    """(classes,) int64: number of images of each class in a split."""
    counts = np.zeros(len(listing.classes), np.int64)
    for table in slices(listing.table):
        rows, labels = label_pairs(table)
        in_split = table["split"].to_numpy()[rows] == split
        counts += np.bincount(labels[in_split], minlength=len(counts))
    return counts


def odd_classes(listing: Listing) -> list[str]:
    """Messages about classes with no or one training image, which are usually a mistake."""
    counts = _count(listing, listing.splits.index("train")) if "train" in listing.splits else ()
    few = [name for name, count in zip(listing.classes, counts, strict=False) if count < 2]
    return [f"{counted(len(few), 'class')} with at most one image in train: {first_of(few)}"] if few else []
