"""Assigns the files of a source (tars, Parquet) to splits by the prefix of their names."""

import shlex

from pipeline.base.errors import UserError
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
# In the folder of a data set while launch/shard.py makes it, and after a kill.
PARTS, PLAN = ".parts", "plan.json"


def split_files(source: AnyPath, splits: dict[str, str], suffix: str) -> list[tuple[str, str, AnyPath]]:
    """Returns (split, name inside source, path) of every file `*<suffix>` below source, sorted by split and name.

    splits: split name -> prefix of its file names; the longest matching prefix counts. Raises UserError for a split
    without files, for compressed tars and *.TAR of a split, and when one split would take files that look like several
    splits.
    """
    is_file = source.is_file()
    found = {source.name: source}
    if not is_file:
        found = {name: path for path, *_ in walk_files(source) if (name := name_inside(path, source))}
    endings = (suffix, *_PACKED * (suffix == ".tar"))
    files: dict[str, list[tuple[str, str, AnyPath]]] = {split: [] for split in splits}
    for name in sorted(found):
        fitting = [split for split, start in splits.items() if name.startswith(start)]
        is_wanted = is_file or (name.lower().endswith(endings) and not found[name].name.startswith("."))
        if not fitting or not is_wanted:
            continue
        if not name.endswith(suffix) and (not is_file or name.lower().endswith(_PACKED)):
            raise UserError(
                f"{source}: {name} is not a plain *{suffix}, from which one image can be read. Unpack it (gzip -d,"
                " ...), rename it, or move it elsewhere."
            )
        split = max(fitting, key=lambda split: len(splits[split]))
        files[split].append((split, name, found[name]))
    for split, of_split in files.items():
        if not of_split:
            raise UserError(
                f"{source}: no *{suffix} for split {split!r} (names that begin with {splits[split]!r}). There:"
                f" {', '.join(sorted(found)[:5])}."
            )
    in_order = [file for of_split in files.values() for file in of_split]
    if list(splits.values()) == [""]:
        _refuse_mixture(source, [name for _, name, _ in in_order])
    return in_order


def _refuse_mixture(source: AnyPath, names: list[str]) -> None:
    """Raises UserError when the names look like several splits: test images must not be trained on by accident."""
    starts: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        for depth, part in enumerate(parts):
            for word in {*LIKE_SPLITS.values()}:
                if part.lower().startswith(word):
                    starts.setdefault(word, "/".join([*parts[:depth], part[: len(word)]]))
    if len(starts) > 1:
        said = shlex.join(f"splits.{word}={start}" for word, start in sorted(starts.items()))
        raise UserError(f"{source}: the files look like several splits. If they are, say so: {said}")
