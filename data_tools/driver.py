"""Removes unfinished files of killed drivers."""

from pathlib import Path

from pipeline.data.storage.bucket import AnyPath


def remove_leftovers(*folders: AnyPath, pattern: str = ".*.tmp") -> None:
    """Remove unfinished files of killed drivers and tasks (`atomic.replacing`). Object stores have none: uploads are
    atomic.
    """
    for folder in folders:
        for leftover in folder.glob(pattern) if isinstance(folder, Path) else ():
            leftover.unlink(missing_ok=True)
