"""Readers of raw layouts: `list_source` says which images there are and where their bytes lie, `Reader` fetches them.

A layout is one file with one function that walks the source and tells a `Collector` what it meets; whatever the layout,
the result is the same `Listing`, so the same images give the same shards whether they come as a folder or as a tar.
"""

import tarfile

from data_tools.sources import archive, folder, imagenet21k
from data_tools.sources.listing import Collector, Listing
from data_tools.sources.reader import Reader
from pipeline.data.bucket import AnyPath
from pipeline.errors import UserError

__all__ = ["Listing", "Reader", "list_source"]


def list_source(source: AnyPath, layout: str, splits: dict[str, str], staging: AnyPath) -> Listing:
    """Every image of a source, sorted by split and key.

    layout: "folder", "archive", "imagenet21k", or "auto" to look. splits: split name -> folder inside the source.
    staging: a folder for the unpacked copy of a compressed tar (made when needed).
    Raises UserError for a missing source, one without images, an empty class folder, a key twice, a damaged archive.
    """
    if not source.exists():
        raise UserError(f"source = {source}: no such file or folder.")
    if source.is_dir():
        if layout == "archive":
            raise UserError(f"layout = archive, but source = {source} is a folder. Use layout=auto.")
        of_tars = layout == "imagenet21k" or (layout == "auto" and imagenet21k.is_folder_of_tars(source, splits))
        collector = Collector(source, splits, containers=[])
        (imagenet21k.walk_folder if of_tars else folder.walk)(source, collector)
        return collector.finish()
    if layout == "folder":
        raise UserError(f"layout = folder, but source = {source} is a file. Use layout=auto.")
    kind = archive.kind(source)
    plain = archive.unpack(source, kind, staging) if kind in archive.COMPRESSED else source
    collector = Collector(source, splits, containers=[str(plain)])
    try:
        if kind == "zip":
            archive.walk_zip(plain, collector)
        elif layout == "imagenet21k" or (layout == "auto" and imagenet21k.is_tar_of_tars(plain)):
            imagenet21k.walk_tar(plain, collector)
        else:
            archive.walk_tar(plain, collector)
    except tarfile.TarError as error:
        raise UserError(f"{source} is damaged ({error}). Fetch it again.") from None
    return collector.finish()
