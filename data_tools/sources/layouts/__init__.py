"""The raw layouts that `launch/shard.py` reads: one file each.

To add a layout:

1. Write a new file here with a function `walk(source, config, staging, collector)` that reports every image to the
   `Collector` (../listing.py).
2. Add one line to LAYOUTS, and the name to the choices of `layout` in `pipeline/settings/commands/data.py` (a test
   compares the two).

3. For layout=auto to recognise it, a check in `detect_layout`.
4. A row in docs/sharding.md, samples in tests/data_tools/sources/test_layouts.py, an entry in IN_BUCKET of
   test_layouts_in_buckets.py beside it, and one in SOURCES of tests/faults/test_file_mutations.py.

folder.py: class folders; webdataset.py: samples in tars; cifar.py: raw pixels at offsets in files. A worked example is
in docs/extending.md. Imports the files of sources/ beside this folder; used by sources/, and for tars and zips by
sharding/, check/ and vtab/.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from data_tools.sources.layouts import (
    archive,
    cifar,
    folder,
    imagenet,
    parquet,
    path_list,
    webdataset,
)
from data_tools.sources.listing import Collector
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import INFO
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet
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
    "imagenet21k": SourceLayout(imagenet.walk_21k, by_folders=True),
    "imagenet1k": SourceLayout(imagenet.walk_1k, splits=imagenet.SPLITS),
    "cifar": SourceLayout(cifar.walk, splits=cifar.SPLITS),
    "parquet": SourceLayout(parquet.walk, is_table=True),
    "list": SourceLayout(path_list.walk, find_splits=path_list.find_splits, is_table=True),
    "webdataset": SourceLayout(webdataset.walk),
}


def detect_layout(source: AnyPath, config: ShardConfig) -> str:
    """The name of the layout that a source seems to have by its files. The first match counts."""
    if source.is_dir():
        return _detect_in_folder(source, config.splits)
    if is_table(source):
        if source.suffix != ".parquet":
            return "list"
        schema = open_parquet(source).schema_arrow
        has_images = config.image_column in schema.names and parquet.holds_images(
            schema.field(schema.names.index(config.image_column)).type
        )
        # Beside images, paths are often those that the files once had.
        return "list" if config.path_column in schema.names and not has_images else "parquet"
    if archive.kind(source) == "zip":
        return "archive"
    if webdataset.is_shard(source):
        return "webdataset"
    first = itertools.islice(archive.members(source), archive.MEMBERS_TO_LOOK_AT)
    if cifar.is_cifar({member.name.rpartition("/")[2] for member in first}):
        return "cifar"
    return "imagenet21k" if imagenet.is_tar_of_tars(source) else "archive"


def _detect_in_folder(source: AnyPath, splits: dict[str, str]) -> str:
    names = {path.name for path in source.iterdir()}
    # Class folders may have any name.
    known = names & {INFO, *imagenet.SPLITS.values(), *cifar.FILES}
    files = {name for name in known if (source / name).is_file()}
    if INFO in files:
        return "webdataset"
    if not files.isdisjoint(imagenet.SPLITS.values()):
        return "imagenet1k"
    if cifar.is_cifar(files):
        return "cifar"
    # img2dataset writes a table of captions beside each tar.
    own = (name for name in names if name.endswith(".parquet") and f"{name.removesuffix('.parquet')}.tar" not in names)
    tables = itertools.chain((source / name for name in own), (source / "data").glob("*.parquet"))
    if any(path.is_file() for path in tables):
        return "parquet"
    # `splits` may name folders or prefixes of file names.
    first = source / next(iter(splits.values()))
    for place in (first, source):
        for tar in place.glob("*.tar"):
            if not tar.is_file():
                continue
            if webdataset.is_shard(tar):
                return "webdataset"
            if webdataset.NUMBERED.fullmatch(tar.name):
                raise UserError(
                    f"{source}: is {tar.name} a shard of images without labels (layout=webdataset), or does each tar"
                    " hold the images of a class (layout=imagenet21k)? Say which."
                )
            return "imagenet21k"
    return "folder"


def is_table(source: AnyPath) -> bool:
    """Whether a source is a single table: CSV, TSV or Parquet."""
    return source.suffix.lower() in (".csv", ".tsv", ".parquet")
