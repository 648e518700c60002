"""Images in one folder whose names begin with the class: `n01440764_tench.JPEG`, as samples of ImageNet are handed out."""

import re
from collections.abc import Callable, Iterable

from data_tools.sources.listing import Collector
from pipeline.data.loading.decode import EXTENSIONS
from pipeline.data.storage.bucket import AnyPath

_WNID = re.compile(r"(n\d{8})_")


def is_flat(folder: AnyPath, names: Iterable[str]) -> bool:
    """Whether a folder holds such images, and no folders. names: of all that is directly in it."""
    images = {name for name in names if f".{name.rpartition('.')[2].lower()}" in EXTENSIONS}
    if not images or not all(_WNID.match(name) for name in images):
        return False
    return not any((folder / name).is_dir() for name in names if name not in images)


def are_flat(names: Iterable[str], folder: str) -> bool:
    """The same of the members of an archive. folder: that holds the images, '' for all of the archive."""
    start = f"{folder.strip('/')}/".lstrip("/")
    inner = [name.removeprefix("./").removeprefix(start) for name in names if not name.endswith("/")]
    images = [name for name in inner if f".{name.rpartition('.')[2].lower()}" in EXTENSIONS]
    return bool(images) and all(_WNID.match(name) and "/" not in name for name in images)


def renaming(collector: Collector) -> Callable[[str], str]:
    """For `Collector.rename`: the class is the WordNet id before the first underscore of the file's own name."""

    def rename(name: str) -> str:
        split, inner = collector.place(name)
        if split is None:
            return name
        match = _WNID.match(name.rpartition("/")[2])
        if match is None:
            raise ValueError("no class: its name does not begin as n01440764_")
        return f"{name.removesuffix(inner)}{match[1]}/{inner}"

    return rename
