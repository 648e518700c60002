"""Lists the images of a raw source (`list_source`) and reads their bytes (`Reader`).

A source in any layout becomes the same `Listing`, so the same images give the same shards whether they come as a folder
or as a tar. layouts/ holds one file for each layout, and chooses one for layout=auto. Imports pipeline.data and
progress.py; used by the other folders of data_tools.
"""

import tarfile
from dataclasses import replace

import pyarrow as pa

from data_tools.progress import ProgressMeter
from data_tools.sources.layouts import LAYOUTS, archive, detect_layout, is_table
from data_tools.sources.listing import LISTED, Collector, Listing
from data_tools.sources.reader import Reader
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.schema import refuse_without_effect

__all__ = ["Listing", "Reader", "list_source"]

_ONE_SPLIT = {"train": ""}


def list_source(source: AnyPath, config: ShardConfig, staging: AnyPath) -> Listing:
    """Returns every image of a source, sorted by split and key.

    staging: a folder for unpacked data (compressed tars, images in Parquet) and for cached member lists of tars in a
    bucket; its parent folder holds progress.json meanwhile.
    Raises UserError for a source without images, an empty class folder, a repeated key, a damaged
    archive, and a source that does not have the given layout.
    """
    plain = source
    if source.is_file() and not is_table(source) and (config.layout == "auto" or not LAYOUTS[config.layout].is_table):
        plain = archive.plain_path(source, staging)
    with ProgressMeter(None, folder=staging.parent, done=LISTED) as progress:
        with archive.damage_named(source, tarfile.TarError, pa.ArrowException, UnicodeDecodeError, OSError):
            name = config.layout if config.layout != "auto" else detect_layout(plain, config)
            layout = LAYOUTS[name]
            splits = config.splits
            if splits == _ONE_SPLIT:
                splits = (layout.find_splits(plain, config) if layout.find_splits else layout.splits) or splits
            detected = replace(config, layout=name, splits=splits)  # type: ignore[arg-type]
            detected.check()  # Held-out images go to 'val', which the layout may have itself.
            refuse_without_effect(detected, f"source = {source} has layout = {name}: ")
            collector = Collector(
                source, splits, by_folders=layout.by_folders, progress=progress, scratch=staging.parent
            )
            collector.unpacked[plain] = source
            layout.walk(plain, config, staging, collector)
        listing = collector.finish()
        return replace(listing, about={"layout": name, "splits": splits})
