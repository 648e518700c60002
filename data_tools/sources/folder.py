"""A folder of class folders: `<split's folder>/<class>/<name>.jpg`."""

import os
from pathlib import Path

from data_tools.sources.listing import Collector


def walk(source: Path, collector: Collector) -> None:
    """Tell the collector every folder and file below source."""
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
