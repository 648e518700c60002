"""Readers of raw layouts: `list_source` says which images there are and where their bytes lie, `Reader` fetches them.

A layout is one file with one function that walks the source and tells a `Collector` what it meets; whatever the layout,
the result is the same `Listing`, so the same images give the same shards whether they come as a folder or as a tar.
"""

import itertools
import tarfile

import pyarrow as pa

from data_tools.progress import Progress
from data_tools.sources import archive, cifar, folder, imagenet1k, imagenet21k, parquet, path_list, webdataset
from data_tools.sources.listing import LISTED, Collector, Listing
from data_tools.sources.reader import Reader
from pipeline.data.bucket import AnyPath
from pipeline.data.manifest import INFO, open_parquet
from pipeline.data_config import ShardConfig
from pipeline.errors import UserError

__all__ = ["Listing", "Reader", "list_source"]

_ONE_SPLIT = {"train": ""}
# Layouts that come in splits: what `splits` is where nothing is said.
_OWN_SPLITS = {"cifar": cifar.SPLITS, "imagenet1k": imagenet1k.SPLITS}
# Layouts that know their samples; the others are class folders in some form.
_WALKS = {
    "cifar": cifar.walk,
    "imagenet1k": imagenet1k.walk,
    "parquet": parquet.walk,
    "list": path_list.walk,
    "webdataset": webdataset.walk,
}
_MEMBERS_TO_LOOK_AT = 16


def list_source(source: AnyPath, config: ShardConfig, staging: AnyPath) -> Listing:
    """Every image of a source, sorted by split and key.

    staging: a folder for what must be unpacked before it can be read in any order (a compressed tar, images in Parquet), and
    for lists of tars in a bucket; the folder around it has progress.json meanwhile.
    Raises UserError for a missing source, one without images, an empty class folder, a key twice, a damaged archive, and
    whatever else cannot be what the layout says it is.
    """
    if not source.exists():
        raise UserError(f"source = {source}: no such file or folder.")
    plain = source
    if config.layout in ("auto", "archive", "imagenet21k", "cifar") and source.is_file() and not _is_table(source):
        kind = archive.kind(source)
        plain = archive.unpack(source, kind, staging) if kind in archive.COMPRESSED else source
    with Progress(None, folder=staging.parent, done=LISTED) as progress:
        try:
            layout = config.layout if config.layout != "auto" else _look(plain, config)
            _check_form(source, layout)
            splits = _OWN_SPLITS.get(layout, config.splits) if config.splits == _ONE_SPLIT else config.splits
            collector = Collector(source, splits, by_folders=layout not in _WALKS, progress=progress)
            if layout in _WALKS:
                _WALKS[layout](plain, config, staging, collector)
            else:
                _walk_class_folders(plain, layout, staging, collector)
        except (tarfile.TarError, pa.ArrowInvalid) as error:
            raise UserError(f"{source} is damaged ({' '.join(str(error).split())}). Fetch it again.") from None
        return collector.finish()


def _walk_class_folders(source: AnyPath, layout: str, staging: AnyPath, collector: Collector) -> None:
    if source.is_dir() and layout == "imagenet21k":
        imagenet21k.walk_folder(source, staging, collector)
    elif source.is_dir():
        folder.walk(source, collector)
    elif archive.kind(source) == "zip":
        archive.walk_zip(source, collector)
    elif layout == "imagenet21k":
        imagenet21k.walk_tar(source, staging, collector)
    else:
        archive.walk_tar(source, collector)


def _check_form(source: AnyPath, layout: str) -> None:
    form = "a folder" if source.is_dir() else "a file"
    fitting = {"archive": "a file", "folder": "a folder", "imagenet1k": "a folder"}
    if fitting.get(layout, form) != form:
        raise UserError(f"layout = {layout}, but source = {source} is {form}. Use layout=auto.")


def _look(source: AnyPath, config: ShardConfig) -> str:
    """The layout that a source seems to have."""
    if source.is_dir():
        return _look_into_folder(source, config.splits)
    if _is_table(source):
        is_list = source.suffix != ".parquet" or config.path_column in open_parquet(source).schema_arrow.names
        return "list" if is_list else "parquet"
    if archive.kind(source) == "zip":
        return "archive"
    if webdataset.is_shard(source):
        return "webdataset"
    with source.open("rb") as file:
        members = itertools.islice(archive.tar_members(file, 0, source.stat().st_size), _MEMBERS_TO_LOOK_AT)
        if cifar.is_cifar({name.rpartition("/")[2] for name, *_ in members}):
            return "cifar"
    return "imagenet21k" if imagenet21k.is_tar_of_tars(source) else "archive"


def _look_into_folder(source: AnyPath, splits: dict[str, str]) -> str:
    names = {path.name for path in source.iterdir()}
    if INFO in names:
        return "webdataset"
    if set(imagenet1k.SPLITS.values()) & names:
        return "imagenet1k"
    if cifar.is_cifar(names):
        return "cifar"
    if any(name.endswith(".parquet") for name in names) or any((source / "data").glob("*.parquet")):
        return "parquet"
    # `splits` may name folders, or the beginnings of file names.
    for place in (source / next(iter(splits.values())), source):
        tar: AnyPath | None = next((path for path in place.glob("*.tar")), None)
        if tar is not None:
            return "webdataset" if webdataset.is_shard(tar) else "imagenet21k"
    return "folder"


def _is_table(source: AnyPath) -> bool:
    return source.suffix in (".csv", ".tsv", ".parquet")
