"""Images without labels: any tree of folders, an archive, a bucket, or a tree that holds archives. Folders name no
classes.
"""

import tarfile

from data_tools.sources.layouts import archive
from data_tools.sources.layouts import folder as class_folders
from data_tools.sources.listing import Collector
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import ShardConfig


def walk(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report every image to the collector; an archive below a folder is read as a folder with the archive's name."""
    collector.is_labelled = False
    if source.is_dir():
        collector.archives = {}
    class_folders.walk(source, config, staging, collector)
    found, collector.archives = collector.archives or {}, None
    for name, suffix in sorted(found.items()):
        path = source / name
        plain = archive.plain_path(path, staging)
        collector.unpacked[plain] = path
        collector.inside = f"{name.removesuffix(suffix)}/"
        with archive.damage_named(path, tarfile.TarError):
            archive.walk(plain, collector)
