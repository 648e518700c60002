"""Assigns the files of a source (tars, Parquet) to splits by the prefix of their names."""

import re
from collections.abc import Iterator

from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.dataset.tables import INFO
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

    splits: split name -> prefix of its file names; the longest matching prefix counts. notes: gets warnings about files of these splits
    that are left out (compressed tars, and *.TAR) or missing. Raises UserError for a split without files, when one split would take files that look
    like several splits, and for an unfinished data set.
    """
    packed, named_otherwise = list[str](), list[str]()
    if source.is_file():
        paths = {source.name: source}
        _refuse_packed(source, [source.name])
        refuse_unfinished(source.parent)
    else:
        found = {name: path for path, *_ in walk_files(source) if (name := name_inside(path, source))}
        for path in found.values():
            if path.name == PLAN and path.parent.name == PARTS:
                refuse_unfinished(path.parent.parent)
        paths = {name: path for name, path in found.items() if path.name.endswith(suffix) and path.name[0] != "."}
        others = sorted(name for name in found.keys() - paths.keys() if found[name].name[0] != ".")
        if suffix == ".tar" and not paths:
            _refuse_packed(source, others)
        others = [name for name in others if name.startswith(tuple(splits.values()))]
        packed = [name for name in others if suffix == ".tar" and _is_packed(name)]
        named_otherwise = [name for name in others if name.lower().endswith(suffix)]
        for names, what, way_out in (
            (packed, "compressed tar", "unpack each to a .tar (gzip -d, ...)"),
            (named_otherwise, "file", f"rename each to *{suffix}"),
        ):
            if names:
                some = f"{counted(len(names), what)} of {source} left out, such as {printable(names[0])}"
                notes.append(f"warning: {some}. To use them, {way_out}")
    files: dict[str, list[tuple[str, str, AnyPath]]] = {split: [] for split in splits}
    for name in sorted(paths):
        fitting = [split for split, start in splits.items() if name.startswith(start)]
        if fitting:
            split = max(fitting, key=lambda split: len(splits[split]))
            files[split].append((split, name, paths[name]))
    some = ", ".join(sorted(paths)[:5]) or "none"
    some += "".join(f". Rename each like {printable(name)} to *{suffix}" for name in named_otherwise[:1])
    for split, of_split in files.items():
        if not of_split:
            _refuse_packed(source, [name for name in packed if name.startswith(splits[split])])
            raise UserError(
                f"{source}: no *{suffix} for split {split!r} (names that begin with {splits[split]!r}). There: {some}."
            )
    if list(splits.values()) == [""]:
        _refuse_mixture(source, list(paths))
    found_files = [file for of_split in files.values() for file in of_split]
    notes += _gaps([name for _, name, _ in found_files])
    return found_files


def _gaps(names: list[str]) -> Iterator[str]:
    """Warnings of numbers that are missing among those of the shards, if fewer are missing than there."""
    of_series: dict[tuple[str, str, int], set[int]] = {}
    for name in names:
        if found := _NUMBERED.fullmatch(name):
            before, number, total, suffix = found.groups()
            of_series.setdefault((before, f"-of-{total}{suffix}" if total else suffix, int(total or 0)), set()).add(
                int(number)
            )
    for (before, after, total), numbers in of_series.items():
        first, last = min(numbers), max(numbers)
        if total and last <= total:  # Numbered from 0, or from 1.
            first, last = last // total, last // total + total - 1
        count = last + 1 - first - len(numbers)
        if 0 < count < len(numbers):
            missing = sorted(set(range(first, last + 1)) - numbers)
            some = ", ".join(map(str, missing[:5])) + ", ..." * (count > 5)
            yield f"warning: {counted(count, 'number')} missing in {printable(before)}*{after}, {first} to {last}: {some}. Is the source complete?"


def _is_packed(name: str) -> bool:
    return name.lower().endswith(_PACKED)


def _refuse_packed(source: AnyPath, names: list[str]) -> None:
    """Raises UserError for compressed files: samples are read at their places in a plain tar."""
    if packed := sorted(filter(_is_packed, names)):
        raise UserError(
            f"{source}: {packed[0]} is compressed, and only plain tars have places from which one image can be read. Unpack it (gzip -d, "
            "...) to a .tar."
        )


def refuse_unfinished(folder: AnyPath) -> None:
    """Raise UserError for the folder of a data set that launch/shard.py has not finished: its tars are a part of them."""
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
        said = " ".join(f"splits.{word}={start}" for word, start in sorted(starts.items()))
        raise UserError(f"{source}: the files look like several splits. If they are, say so: {said}")
