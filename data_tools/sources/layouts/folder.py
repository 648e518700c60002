"""Folders of images, also in a plain tar or a zip: class folders, `<split's folder>/<class>/<name>.jpg`; images without
labels.
"""

import errno
import os
import tarfile
from pathlib import Path

from data_tools.sources.layouts import archive
from data_tools.sources.listing import Collector
from pipeline.base.json_record import shortened
from pipeline.data.loading.decode import is_hidden, is_image
from pipeline.data.storage.bucket import AnyPath, BucketPath, name_inside
from pipeline.settings.commands.data import ShardConfig


def walk_images(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every image without a label to the collector; an archive below a folder is read as a folder with the
    archive's name.
    """
    collector.is_labelled = False
    if source.is_dir():
        collector.archives = {}
    walk(source, config, staging, collector)
    found, collector.archives = collector.archives or {}, None
    for name, suffix in sorted(found.items()):
        path = source / name
        plain = archive.plain_path(path, staging)
        collector.unpacked[plain] = path
        with archive.damage_named(path, tarfile.TarError):
            archive.walk(plain, collector, f"{name.removesuffix(suffix)}/")


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every folder and file of a folder or archive to the collector."""
    if source.is_file():
        archive.walk(source, collector)
    elif isinstance(source, BucketPath):
        for path, size, mtime in source.walk():
            name = name_inside(path, source)
            assert name
            collector.folder(name.rpartition("/")[0])
            collector.file(name, -1, 0, size, mtime=mtime)
    else:
        _walk(source, collector)


def _walk(source: Path, collector: Collector) -> None:
    folders = [""]  # Names inside source; all but the first end in a slash.
    while folders:
        inside = folders.pop()
        with os.scandir(f"{source}/{inside}") as entries:
            for entry in entries:
                name = inside + entry.name
                try:
                    is_folder = entry.is_dir()
                except OSError as error:
                    # A loop of links, or a path that is too long.
                    collector.skip(shortened(name), str(error.strerror))
                    continue
                if not is_folder:
                    size, mtime, fault = _look_at(entry)
                    collector.file(name, -1, 0, size, fault=fault, mtime=mtime)
                elif entry.is_symlink() and _holds_itself(source, name):
                    collector.skip(name, "a link to a folder that it lies in")
                else:
                    collector.folder(name)
                    # Hidden folders (.git) may be huge, those of a system unreadable, and both hold no samples.
                    if is_hidden(entry.name):
                        collector.ignore("hidden folders", name)
                    else:
                        folders.append(f"{name}/")


def _look_at(entry: os.DirEntry) -> tuple[int, int, str]:
    """(size, mtime, fault) of an entry that is not a folder; see `Collector.file`."""
    try:
        found = entry.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0, 0, str(error.strerror)
        # A broken link: one named as an image is listed, so that the job reports it as unreadable; another may be to a
        # folder.
        return 0, 0, "" if is_image(entry.name) else "a link that leads nowhere"
    return found.st_size, found.st_mtime_ns, ""


def _holds_itself(source: Path, name: str) -> bool:
    """Whether a linked folder is one of its own parents: following it would not end."""
    parents = (source / name).parents[: name.count("/") + 1]
    return any(os.path.samefile(source / name, path) for path in parents)
