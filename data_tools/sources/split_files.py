"""Assigns the files of a source (tars, Parquet) to splits by the prefix of their names."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator

from pipeline.base.errors import UserError
from pipeline.base.words import counted, first_of, printable
from pipeline.data.dataset.manifest import INFO
from pipeline.data.storage.bucket import AnyPath, name_inside, walk_files

# Names, in lower case, that are probably of splits -> the split, as the recipes' data.eval_split calls it.
LIKE_SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "dev",
    "test": "test",
    "testing": "test",
}
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.zstd")
_BEGINNINGS = ("train", "val", "test", "dev")
# Of shards: what is before its number, the number, perhaps that of all shards, the suffix.
_NUMBERED = re.compile(r"(.*?)(\d+)(?:-of-(\d+))?(\.\w+)")
# In the folder of a data set while launch/shard.py makes it, and after a kill.
PARTS, PLAN = ".parts", "plan.json"


def split_files(
    source: AnyPath, splits: dict[str, str], suffix: str, notes: list[str]
) -> list[tuple[str, str, AnyPath]]:
    """Returns (split, name inside source, path) of every file `*<suffix>` below source, sorted by split and name.

    splits: split name -> prefix of its file names; the longest matching prefix counts. notes: gets warnings about
    files of these splits that are left out (compressed tars, and *.TAR) or missing. Raises UserError for a split
    without files, when one split would take files that look like several splits, and for an unfinished data set.
    """
    endings = (suffix, *_PACKED * (suffix == ".tar"))
    if source.is_file():
        found, endings = {source.name: source}, _PACKED
        refuse_unfinished(source.parent)
    else:
        found = {name: path for path, *_ in walk_files(source) if (name := name_inside(path, source))}
        for path in found.values():
            if path.name == PLAN and path.parent.name == PARTS:
                refuse_unfinished(path.parent.parent)
    there = [name for name in sorted(found) if source.is_file() or not found[name].name.startswith(".")]
    others = [name for name in there if name.lower().endswith(endings) and not name.endswith(suffix)]
    paths = [name for name in there if name.endswith(suffix) or (source.is_file() and not others)]
    files: dict[str, list[tuple[str, str, AnyPath]]] = {split: [] for split in splits}
    for name in paths:
        fitting = [split for split, start in splits.items() if name.startswith(start)]
        if fitting:
            split = max(fitting, key=lambda split: len(splits[split]))
            files[split].append((split, name, found[name]))
    for split, of_split in files.items():
        unread = [name for name in others if name.startswith(splits[split])]
        if unread and of_split:
            notes.append(
                f"warning: {counted(len(unread), 'file')} of {source} left out, such as {printable(unread[0])}. To use"
                f" them, unpack (gzip -d, ...) or rename each to *{suffix}"
            )
        elif unread:
            raise UserError(
                f"{source}: {unread[0]} is not a plain *{suffix}, from which one image can be read. Unpack it (gzip -d,"
                " ...) or rename it."
            )
        elif not of_split:
            raise UserError(
                f"{source}: no *{suffix} for split {split!r} (names that begin with {splits[split]!r}). There:"
                f" {', '.join(paths[:5])}."
            )
    if list(splits.values()) == [""]:
        _refuse_mixture(source, paths)
    found_files = [file for of_split in files.values() for file in of_split]
    notes += _gaps([name for _, name, _ in found_files])
    return found_files


def _gaps(names: list[str]) -> Iterator[str]:
    """Warnings of numbers that are missing among those of the shards, if fewer are missing than there."""
    of_series = defaultdict[tuple[str, int, str], set[int]](set)
    for found in filter(None, map(_NUMBERED.fullmatch, names)):
        before, number, of, suffix = found.groups("0")
        of_series[before, int(of), suffix].add(int(number))
    for (before, total, suffix), numbers in of_series.items():
        first, last = min(numbers), max(numbers)
        if total and last <= total:  # Numbered from 0, or from 1.
            first = last // total
            last = first + total - 1
        count = last + 1 - first - len(numbers)
        if 0 < count < len(numbers):
            missing = sorted(set(range(first, last + 1)) - numbers)
            yield (
                f"warning: {counted(count, 'number')} missing in {printable(before)}*{suffix}, {first} to {last}:"
                f" {first_of([*map(str, missing)])}. Is the source complete?"
            )


def refuse_unfinished(folder: AnyPath) -> None:
    """Raise UserError for the folder of a data set that launch/shard.py has not finished: its tars are a part of
    them.
    """
    if (folder / PARTS / PLAN).exists() and not (folder / INFO).exists():
        raise UserError(f"{folder} is a data set that launch/shard.py has not finished. Run its command again first.")


def _refuse_mixture(source: AnyPath, names: list[str]) -> None:
    """Raises UserError when the names look like several splits: test images must not be trained on by accident."""
    starts: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        for depth, part in enumerate(parts):
            for word in _BEGINNINGS:
                if part.lower().startswith(word):
                    starts.setdefault(word, "/".join([*parts[:depth], part[: len(word)]]))
    if len(starts) > 1:
        said = shlex.join(f"splits.{word}={start}" for word, start in sorted(starts.items()))
        raise UserError(f"{source}: the files look like several splits. If they are, say so: {said}")
