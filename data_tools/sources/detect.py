"""Tells the layout of a source from its files (layout=auto). The first match counts."""

import itertools
from collections.abc import Collection

import pyarrow as pa

from data_tools.sources.layouts import archive, cifar, imagenet1k, imagenet21k, webdataset
from data_tools.sources.layouts.parquet import holds_images
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import INFO
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.parquet import open_parquet
from pipeline.settings.commands.data import ShardConfig


def detect_layout(source: AnyPath, config: ShardConfig) -> str:
    """The name of the layout that a source seems to have."""
    if source.is_dir():
        return _detect_in_folder(source, config.splits)
    if is_table(source):
        return (
            "list" if source.suffix != ".parquet" or _is_list(open_parquet(source).schema_arrow, config) else "parquet"
        )
    if archive.kind(source) == "zip":
        return "archive"
    if webdataset.is_shard(source):
        return "webdataset"
    first = itertools.islice(archive.members(source), archive.MEMBERS_TO_LOOK_AT)
    if cifar.is_cifar({member.name.rpartition("/")[2] for member in first}):
        return "cifar"
    return "imagenet21k" if imagenet21k.is_tar_of_tars(source) else "archive"


def _is_list(schema: pa.Schema, config: ShardConfig) -> bool:
    """Whether a table has paths but no images. Beside images, paths are often those that the files once had."""
    names = schema.names
    return config.path_column in names and not (
        config.image_column in names and holds_images(schema.field(names.index(config.image_column)).type)
    )


def _detect_in_folder(source: AnyPath, splits: dict[str, str]) -> str:
    names = {path.name for path in source.iterdir()}

    def files(wanted: Collection[str]) -> set[str]:
        """Those of the names that are files: class folders may have any name."""
        return {name for name in names.intersection(wanted) if (source / name).is_file()}

    if files({INFO}):
        return "webdataset"
    if files(imagenet1k.SPLITS.values()):
        return "imagenet1k"
    if cifar.is_cifar(names) and cifar.is_cifar(files(cifar.FILES)):
        return "cifar"
    # img2dataset writes a table of captions beside each tar.
    own = (name for name in names if name.endswith(".parquet") and f"{name.removesuffix('.parquet')}.tar" not in names)
    tables = itertools.chain((source / name for name in own), (source / "data").glob("*.parquet"))
    if any(path.is_file() for path in tables):
        return "parquet"
    # `splits` may name folders or prefixes of file names.
    first = source / next(iter(splits.values()))
    for place in (first, source):
        tar: AnyPath | None = next((path for path in place.glob("*.tar") if path.is_file()), None)
        if tar is not None:
            if webdataset.is_shard(tar):
                return "webdataset"
            if webdataset.is_numbered(tar):
                raise UserError(
                    f"{source}: is {tar.name} a shard of images without labels (layout=webdataset), or does each tar"
                    " hold the images of a class (layout=imagenet21k)? Say which."
                )
            return "imagenet21k"
    return "folder"


def is_table(source: AnyPath) -> bool:
    """Whether a source is a single table: CSV, TSV or Parquet."""
    return source.suffix.lower() in (".csv", ".tsv", ".parquet")
