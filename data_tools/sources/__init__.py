"""Readers of raw layouts: `list_source` says which images there are and where their bytes lie, `Reader` fetches them.

A layout is one file with one function that walks the source and tells a `Collector` what it meets; whatever the layout,
the result is the same `Listing`, so the same images give the same shards whether they come as a folder or as a tar.
"""

import itertools
import shlex
import tarfile
from collections.abc import Collection

import pyarrow as pa

from data_tools.progress import Progress
from data_tools.sources.layouts import (
    archive,
    cifar,
    flat,
    folder,
    imagenet1k,
    imagenet21k,
    parquet,
    path_list,
    tiny_imagenet,
    webdataset,
)
from data_tools.sources.listing import LISTED, Collector, Listing
from data_tools.sources.reader import Reader
from pipeline.data.dataset.manifest import INFO
from pipeline.data.storage.bucket import AnyPath, file_size
from pipeline.data.storage.parquet import open_parquet
from pipeline.errors import UserError
from pipeline.settings.data import ShardConfig

__all__ = ["Listing", "Reader", "list_source"]

_ONE_SPLIT = {"train": ""}
# Layouts that come in splits: what `splits` is where nothing is said.
_OWN_SPLITS = {"cifar": cifar.SPLITS, "imagenet1k": imagenet1k.SPLITS, "tiny_imagenet": tiny_imagenet.SPLITS}
# Layouts that know their samples; the others are class folders in some form.
_WALKS = {
    "cifar": cifar.walk,
    "imagenet1k": imagenet1k.walk,
    "parquet": parquet.walk,
    "list": path_list.walk,
    "webdataset": webdataset.walk,
}
# Layouts that may be a compressed tar, which is unpacked first.
_IN_TARS = ("auto", "archive", "imagenet21k", "cifar", "flat", "tiny_imagenet")
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
    if not source.is_file() and not source.is_dir():
        raise UserError(f"source = {source} is neither a regular file nor a folder.")
    plain = source
    if config.layout in _IN_TARS and source.is_file() and not _is_table(source):
        kind = archive.kind(source)
        plain = archive.unpack(source, kind, staging) if kind in archive.COMPRESSED else source
    with Progress(None, folder=staging.parent, done=LISTED) as progress:
        try:
            layout = config.layout if config.layout != "auto" else _look(plain, config)
            _check_form(source, layout)
            splits = _OWN_SPLITS.get(layout, config.splits) if config.splits == _ONE_SPLIT else config.splits
            collector = Collector(source, splits, by_folders=layout not in _WALKS, progress=progress)
            collector.advice = _list_advice(source, config)
            if layout in _WALKS:
                _WALKS[layout](plain, config, staging, collector)
            else:
                _walk_class_folders(plain, layout, staging, collector)
        except (tarfile.TarError, pa.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # The disk's; what Arrow raises for damaged data has no number.
            raise UserError(f"{source} is damaged ({' '.join(str(error).split())}). Fetch it again.") from None
        return collector.finish()


def _walk_class_folders(source: AnyPath, layout: str, staging: AnyPath, collector: Collector) -> None:
    if layout == "flat":
        collector.rename = flat.renaming(collector)
    elif layout == "tiny_imagenet":
        collector.rename = tiny_imagenet.renaming(source, collector.splits)
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
        return _look_at_members([member.filename for member in archive.zip_members(source)], config.splits)
    if webdataset.is_shard(source):
        return "webdataset"
    with source.open("rb") as file:
        members = itertools.islice(archive.tar_members(file, 0, file_size(source)), _MEMBERS_TO_LOOK_AT)
        names = [member.name for member in members]
    if cifar.is_cifar({name.rpartition("/")[2] for name in names}):
        return "cifar"
    return "imagenet21k" if imagenet21k.is_tar_of_tars(source) else _look_at_members(names, config.splits)


def _look_at_members(names: list[str], splits: dict[str, str]) -> str:
    """The layout of an archive with members of these names."""
    if any(f"/{name}".endswith(f"/{tiny_imagenet.ANNOTATIONS}") for name in names):
        return "tiny_imagenet"
    return "flat" if flat.are_flat(names, next(iter(splits.values()))) else "archive"


def _list_advice(source: AnyPath, config: ShardConfig) -> str:
    """The command for images without class folders."""
    folder = source if source.is_dir() else source.parent
    words = ["layout=list", f"source={folder / 'labels.csv'}", f"out={config.out}"]
    unpacked = "" if source.is_dir() else f"unpack it into {folder}, "
    return (
        f"For images without class folders, {unpacked}write {folder / 'labels.csv'} with a first line path,label and a line "
        f"for each image (1.jpg,cat), and run: python launch/shard.py {shlex.join(words)} . "
    )


def _look_into_folder(source: AnyPath, splits: dict[str, str]) -> str:
    names = {path.name for path in source.iterdir()}

    def files(wanted: Collection[str]) -> set[str]:
        """Those that are files: a class folder may have any name."""
        return {name for name in names.intersection(wanted) if (source / name).is_file()}

    if files({INFO}):
        return "webdataset"
    if files(imagenet1k.SPLITS.values()):
        return "imagenet1k"
    if cifar.is_cifar(names) and cifar.is_cifar(files(cifar.FILES)):
        return "cifar"
    if tiny_imagenet.is_tiny_imagenet(source):
        return "tiny_imagenet"
    tables = itertools.chain(
        (source / name for name in names if name.endswith(".parquet")), (source / "data").glob("*.parquet")
    )
    if any(path.is_file() for path in tables):
        return "parquet"
    # `splits` may name folders, or the beginnings of file names.
    first = source / next(iter(splits.values()))
    for place in (first, source):
        tar: AnyPath | None = next((path for path in place.glob("*.tar") if path.is_file()), None)
        if tar is not None:
            return "webdataset" if webdataset.is_shard(tar) else "imagenet21k"
    if first != source:
        names = {path.name for path in first.iterdir()} if first.is_dir() else set()
    return "flat" if flat.is_flat(first, names) else "folder"


def _is_table(source: AnyPath) -> bool:
    return source.suffix in (".csv", ".tsv", ".parquet")
