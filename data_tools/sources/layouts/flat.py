"""Images in one folder whose names begin with the class, such as `n01440764_tench.JPEG` (published samples of
ImageNet).
"""

import re
from collections.abc import Iterable

from data_tools.sources.layouts import folder as class_folders
from data_tools.sources.listing import Collector, is_hidden
from pipeline.data.loading.decode import EXTENSIONS
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import ShardConfig

_WNID = re.compile(r"(n\d{8})_")


def is_flat(folder: AnyPath, names: Iterable[str]) -> bool:
    """Whether a folder holds such images and no folders. names: all entries of the folder."""
    names = [name for name in names if not is_hidden(name)]
    images = {name for name in names if f".{name.rpartition('.')[2].lower()}" in EXTENSIONS}
    if not images or not all(_WNID.match(name) for name in images):
        return False
    return not any((folder / name).is_dir() for name in names if name not in images)


def are_flat(names: Iterable[str], folder: str) -> bool:
    """Whether the members of an archive are such images. folder: where the images are; '' is the whole archive."""
    start = f"{folder.strip('/')}/".lstrip("/")
    plain = (name.removeprefix("./") for name in names if not name.endswith("/"))
    inner = [name.removeprefix(start) for name in plain if not is_hidden(name)]
    images = [name for name in inner if f".{name.rpartition('.')[2].lower()}" in EXTENSIONS]
    return bool(images) and all(_WNID.match(name) and "/" not in name for name in images)


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every file to the collector. Its class is the WordNet id before the first underscore of its name."""

    def rename(name: str) -> str:
        split, inner = collector.place(name)
        if split is None:
            return name
        match = _WNID.match(name.rpartition("/")[2])
        if match is None:
            raise ValueError("no class: its name does not begin as n01440764_")
        return f"{name.removesuffix(inner)}{match[1]}/{inner}"

    collector.rename = rename
    class_folders.walk(source, config, staging, collector)
