"""A folder of class folders: `<split's folder>/<class>/<name>.jpg`."""

import os

from data_tools.sources.listing import Collector
from pipeline.data.bucket import AnyPath, BucketPath, name_inside


def walk(source: AnyPath, collector: Collector) -> None:
    """Tell the collector every folder and file below source."""
    if isinstance(source, BucketPath):
        for path, size in source.walk():
            name = name_inside(path, source)
            assert name
            collector.folder(name.rpartition("/")[0])
            collector.file(name, -1, 0, size)
    else:
        _walk(str(source), "", collector)


def _walk(path: str, inside: str, collector: Collector) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            name = inside + entry.name
            if entry.is_dir():
                collector.folder(name)
                # Hidden folders may be huge (.git), and hold nothing of ours.
                if not entry.name.startswith("."):
                    _walk(entry.path, f"{name}/", collector)
                continue
            try:
                size = entry.stat().st_size
            except OSError:
                # A broken link: listed, so that the job finds it unreadable, counts it and names it.
                size = 0
            collector.file(name, -1, 0, size)
