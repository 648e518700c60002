"""Tiny-ImageNet as published: a folder, or a zip or tar of it.

    train/<wnid>/images/<wnid>_0.JPEG ...   val/images/val_0.JPEG ...   val/val_annotations.txt
    test/images/test_0.JPEG ...

val_annotations.txt has the classes of val, in lines `val_0.JPEG wnid x y w h`; those of test were not published.
words.txt has the readable names of wnids, in lines `wnid name`. Boxes are not read.
"""

import re
from collections.abc import Callable

from data_tools.sources.class_numbers import names_of_synsets
from data_tools.sources.layouts import archive
from data_tools.sources.layouts import folder as class_folders
from data_tools.sources.listing import Collector
from data_tools.sources.reader import Reader
from pipeline.base.errors import UserError
from pipeline.data.storage.atomic import read_bytes
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import ShardConfig

SPLITS = {"train": "train", "val": "val"}
ANNOTATIONS, WORDS = "val/val_annotations.txt", "words.txt"
_TRAIN, _VAL = re.compile(r"train/([^/]+)/images/([^/]+)"), re.compile(r"val/images/([^/]+)")


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every file to the collector, under the name `<split>/<class>/<name>`."""
    before, texts = _read_texts(source)
    collector.rename = _renaming(source, collector.splits, before, texts[ANNOTATIONS])
    if WORDS in texts:
        where = f"{source}: {before}{WORDS}"
        collector.class_names = names_of_synsets(_lines(texts[WORDS], where), where)
    collector.read = {f"{before}{name}" for name in texts}
    class_folders.walk(source, config, staging, collector)


def _renaming(source: AnyPath, splits: dict[str, str], before: str, text: bytes) -> Callable[[str], str]:
    """Returns `Collector.rename`. before, text: the top folder and the annotations. Raises UserError for a split
    without labels.
    """
    wanted = {split: folder.strip("/").removeprefix(before) for split, folder in splits.items()}
    for split, folder in wanted.items():
        if folder not in SPLITS:
            raise UserError(
                f"splits.{split} = {splits[split]!r}: Tiny-ImageNet has labels of its folders train and val only."
            )
    # Archives have one top folder, which the setting `splits` may include or omit.
    removed = "" if any(folder.strip("/").startswith(before) for folder in splits.values()) else before
    class_of = _parse(text, f"{source}: {before}{ANNOTATIONS}")

    def rename(name: str) -> str:
        inner = name.removeprefix(before)
        if match := _TRAIN.fullmatch(inner):
            inner = f"train/{match[1]}/{match[2]}"
        elif match := _VAL.fullmatch(inner):
            if match[1] not in class_of:
                raise ValueError("no class: val_annotations.txt has no line for it")
            inner = f"val/{class_of[match[1]]}/{match[1]}"
        return inner if removed else f"{before}{inner}"

    return rename


def _parse(text: bytes, where: str) -> dict[str, str]:
    """Maps the name of a validation image to its class."""
    rows = [line.split() for line in _lines(text, where) if line.strip()]
    if any(len(row) < 2 or "/" in row[1] for row in rows):
        raise UserError(f"{where} has a line that is not of the form 'val_0.JPEG n03444034 ...'. Fetch it again.")
    return {row[0]: row[1] for row in rows}


def _lines(text: bytes, where: str) -> list[str]:
    try:
        return text.decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8 text. Fetch it again.") from None


def _read_texts(source: AnyPath) -> tuple[str, dict[str, bytes]]:
    """Returns (the archive's top folder with a slash, or "", content of ANNOTATIONS and, if it exists, of WORDS)."""
    found: dict[str, bytes] = {}
    if source.is_dir():
        found = {name: read_bytes(source / name) for name in (ANNOTATIONS, WORDS) if (source / name).is_file()}
    else:
        with Reader() as reader:
            for member in archive.members(source):
                if f"/{member.name}".endswith((f"/{ANNOTATIONS}", f"/{WORDS}")) and not member.fault:
                    with archive.damage_named(source, ValueError):
                        text = reader.read(str(source), member.offset, member.size, member.packed)
                    found.setdefault(member.name.removeprefix("./"), text)
    before = next((name.removesuffix(ANNOTATIONS) for name in found if name.endswith(ANNOTATIONS)), None)
    if before is None:
        raise UserError(f"{source} is not Tiny-ImageNet: it has no {ANNOTATIONS}.")
    return before, {name: found[before + name] for name in (ANNOTATIONS, WORDS) if before + name in found}
