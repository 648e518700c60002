"""Tiny-ImageNet as published: a folder, or a zip or tar of it.

    train/<wnid>/images/<wnid>_0.JPEG ...   val/images/val_0.JPEG ...   val/val_annotations.txt
    test/images/test_0.JPEG ...

val_annotations.txt has the classes of val, in lines `val_0.JPEG wnid x y w h`; those of test were not published.
words.txt has the readable names of wnids, in lines `wnid name`. Boxes are not read.
"""

import re
from collections.abc import Callable

from data_tools.sources.labels import names_of_synsets
from data_tools.sources.layouts import archive
from data_tools.sources.layouts import folder as class_folders
from data_tools.sources.listing import Collector, Place
from data_tools.sources.reader import Reader
from pipeline.base.errors import UserError
from pipeline.data.storage.bucket import AnyPath, file_size
from pipeline.settings.commands.data import ShardConfig

SPLITS = {"train": "train", "val": "val"}
ANNOTATIONS, WORDS = "val/val_annotations.txt", "words.txt"
_TRAIN, _VAL = re.compile(r"train/([^/]+)/images/([^/]+)"), re.compile(r"val/images/([^/]+)")


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every file to the collector, under the name `<split>/<class>/<name>`."""
    before, texts = _read_texts(source)
    collector.rename = _renaming(source, collector.splits, before, texts[before + ANNOTATIONS])
    if words := texts.get(before + WORDS):
        collector.class_names = names_of_synsets(words, f"{source}: {before}{WORDS}")
    collector.read = {*texts}
    class_folders.walk(source, config, staging, collector)


def _renaming(source: AnyPath, splits: dict[str, str], before: str, lines: list[str]) -> Callable[[str], str]:
    """Returns `Collector.rename`. before, lines: the top folder and the annotations. Raises UserError for a split
    without labels.
    """
    wanted = {split: folder.strip("/").removeprefix(before) for split, folder in splits.items()}
    for split, folder in wanted.items():
        if folder not in SPLITS:
            raise UserError(
                f"splits.{split} = {splits[split]!r}: Tiny-ImageNet has labels of its folders train and val only."
            )
    # Archives have one top folder, which the setting `splits` may include or omit.
    top = before if any(folder.strip("/").startswith(before) for folder in splits.values()) else ""
    with archive.damage_named(source / ANNOTATIONS, ValueError):
        class_of = {name: wnid for name, wnid, *_ in (line.split() for line in lines if line.strip())}

    def rename(name: str) -> str:
        inner = name.removeprefix(before)
        if match := _TRAIN.fullmatch(inner):
            inner = f"train/{match[1]}/{match[2]}"
        elif match := _VAL.fullmatch(inner):
            if match[1] not in class_of:
                raise ValueError("no class: val_annotations.txt has no line for it")
            inner = f"val/{class_of[match[1]]}/{match[1]}"
        return top + inner

    return rename


def _read_texts(source: AnyPath) -> tuple[str, dict[str, list[str]]]:
    """Returns (the archive's top folder with a slash, or "", lines of ANNOTATIONS and, if it exists, of WORDS, by the
    names of the files).
    """
    places: dict[str, Place] = {}
    if source.is_dir():
        there = (name for name in (ANNOTATIONS, WORDS) if (source / name).is_file())
        places = {name: (str(source / name), 0, file_size(source / name), 0) for name in there}
    else:
        for member in archive.members(source):
            if f"/{member.name}".endswith((f"/{ANNOTATIONS}", f"/{WORDS}")) and not member.fault:
                place = (str(source), member.offset, member.size, member.packed)
                places.setdefault(member.name.removeprefix("./"), place)
    before = next((name.removesuffix(ANNOTATIONS) for name in places if name.endswith(ANNOTATIONS)), None)
    if before is None:
        raise UserError(f"{source} is not Tiny-ImageNet: it has no {ANNOTATIONS}.")
    names = [name for name in (before + ANNOTATIONS, before + WORDS) if name in places]
    with Reader() as reader, archive.damage_named(source, ValueError):
        return before, {name: reader.read(*places[name]).decode().splitlines() for name in names}
