"""The raw layouts that `launch/shard.py` reads: one file each.

To add a layout:

1. Write a new file here with a function `walk(source, config, staging, collector)` that reports every image to the
   `Collector` (../listing.py).
2. Add one line to LAYOUTS, and the name to the choices of `layout` in `pipeline/settings/commands/data.py` (a test
   compares the two).

3. For layout=auto to recognise it, a check in ../detect.py.
4. A row in docs/sharding.md, samples in tests/data_tools/sources/test_layouts.py, an entry in IN_BUCKET of
   test_layouts_in_buckets.py beside it, and one in SOURCES of tests/faults/test_file_mutations.py.

folder.py: class folders; webdataset.py: samples in tars; cifar.py: raw pixels at offsets in files. A worked example is
in docs/extending.md. Imports the files of sources/ beside this folder; used by sources/, and for tars and zips by
sharding/, check/ and vtab/.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from data_tools.sources.layouts import (
    cifar,
    folder,
    imagenet1k,
    imagenet21k,
    parquet,
    path_list,
    webdataset,
)
from data_tools.sources.listing import Collector
from pipeline.data.storage.bucket import AnyPath
from pipeline.settings.commands.data import ShardConfig


@dataclass(frozen=True)
class SourceLayout:
    """How a source of one layout is read.

    walk: reports the images of a source to the collector; it gets (source, settings, staging folder, collector).
    by_folders: classes come from class folders (`Collector.folder`, `Collector.file`), not with each sample.
    splits: default of the setting `splits`; empty is one split 'train'. find_splits: returns them for a source instead.
    is_table: a source that is a file is a table. For others it is an archive, which is unpacked before `walk` if it is
    compressed.
    """

    walk: Callable[[AnyPath, ShardConfig, AnyPath, Collector], None]
    by_folders: bool = False
    splits: dict[str, str] = field(default_factory=dict)
    find_splits: Callable[[AnyPath, ShardConfig], dict[str, str]] | None = None
    is_table: bool = False


LAYOUTS: dict[str, SourceLayout] = {
    "folder": SourceLayout(folder.walk, by_folders=True),
    "archive": SourceLayout(folder.walk, by_folders=True),
    "images": SourceLayout(folder.walk_images),
    "imagenet21k": SourceLayout(imagenet21k.walk, by_folders=True),
    "imagenet1k": SourceLayout(imagenet1k.walk, splits=imagenet1k.SPLITS),
    "cifar": SourceLayout(cifar.walk, splits=cifar.SPLITS),
    "parquet": SourceLayout(parquet.walk, is_table=True),
    "list": SourceLayout(path_list.walk, find_splits=path_list.find_splits, is_table=True),
    "webdataset": SourceLayout(webdataset.walk),
}
