"""ImageNet as published. Nothing is extracted.

ImageNet-21k: one tar for each class, `<wnid>.tar`, in a folder or in one big tar. Each inner tar is treated as the
class folder `<wnid>/`. Headers are about 100 KB apart, so listing a tar in an object store reads nearly all of it: tars
are listed in parallel, and their member lists are cached.

ImageNet-1k (ILSVRC 2012): a tar of <wnid>.tar for training, a flat tar of images for validation. The classes of the
flat tar are in a separate file (val_labels). In ReaL labels (arXiv 2006.07159) an image has several, or none; then it
is excluded, as in the ReaL score.
"""

import contextlib
import gzip
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from data_tools.sources.labels import ClassNumbers, read_names
from data_tools.sources.layouts import archive
from data_tools.sources.listing import NOT_UTF8, Collector
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.loading.decode import is_hidden
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, BucketPath, is_utf8, name_inside, walk_files
from pipeline.process.installed import read_lines
from pipeline.settings.commands.data import ShardConfig
from pipeline.settings.quantities import whole_number

# The tars of ImageNet-1k.
SPLITS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
# pyarrow's S3 client has 25 connections. _AT_ONCE bounds the lists in memory.
_THREADS, _AT_ONCE = 16, 64
_NAMED = 10


class _ClassTar(NamedTuple):
    """name: inside the source. path, start, end: where its bytes are. container: see `Collector.file`."""

    name: str
    path: AnyPath
    start: int
    end: int
    container: int


def is_tar_of_tars(source: AnyPath) -> bool:
    """Whether the first file in a tar, hidden ones apart, is itself a tar."""
    for member in archive.members(source):
        if not member.is_folder and not is_hidden(member.name.rpartition("/")[2]):
            return member.name.endswith(".tar")
    return False


def walk_21k(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report the members of every class's tar to the collector. (A zip is read as one of class folders.) Raises
    UserError with the damaged tars.
    """

    def tars() -> Iterator[_ClassTar]:
        for path, size, mtime in sorted(walk_files(source), key=lambda file: str(file[0])):
            name = name_inside(path, source)
            assert name
            if path.suffix == ".tar" and not path.name.startswith("."):
                yield _ClassTar(name, path, 0, size, collector.add_container(path, mtime))
            else:
                collector.file(name, -1, 0, size, mtime=mtime)

    if source.is_dir():
        _walk_classes(source, tars(), staging, collector)
    elif archive.kind(source) == "zip":
        archive.walk(source, collector)
    else:
        _walk_tar(source, staging, collector)


def _walk_tar(source: AnyPath, staging: AnyPath, collector: Collector, inside: str = "") -> None:
    """Report the members of every tar inside a plain tar to the collector, as if in the folder `inside`.

    Raises tarfile.TarError when the outer tar is damaged, UserError with the damaged tars inside.
    """
    container = collector.add_container(source)

    def tars() -> Iterator[_ClassTar]:
        for name, is_folder, offset, size, fault, *_ in archive.members(source):
            # Not the ._n01440764.tar beside a class's tar, in a tar made on a Mac.
            is_tar = name.endswith(".tar") and not is_hidden(name.rpartition("/")[2])
            if fault and is_tar:
                # It holds a whole class: not an item to skip.
                raise tarfile.ReadError(f"{printable(name)}: {fault}")
            if not is_folder and is_tar:
                yield _ClassTar(inside + name, source, offset, offset + size, container)
            elif not is_folder:
                collector.file(inside + name, container, offset, size, fault=fault)

    _walk_classes(source, tars(), staging, collector)


def _walk_classes(source: AnyPath, tars: Iterator[_ClassTar], staging: AnyPath, collector: Collector) -> None:
    """List tars in parallel, and report them to the collector in order."""
    damaged: list[str] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="list") as pool:
        while some := list(itertools.islice(tars, _AT_ONCE)):
            for tar, found in zip(some, pool.map(lambda tar: _list_members(tar, staging), some), strict=True):
                folder = tar.name.removesuffix(".tar")
                collector.folder(folder)
                if isinstance(found, str):
                    damaged.append(f"{tar.name} ({found})")
                    continue
                for name, _, offset, size, fault, *_ in found:
                    collector.file(f"{folder}/{name}", tar.container, offset, size, fault=fault)
    if damaged:
        raise UserError(
            f"{source} has {counted(len(damaged), 'damaged tar')}, to be fetched again:"
            f" {'; '.join(damaged[:_NAMED])}{'; ...' * (len(damaged) > _NAMED)}"
        )


def _list_members(tar: _ClassTar, staging: AnyPath) -> list[archive.Member] | str:
    """The files of a tar; for an object store the cached list in staging, if the tar has not changed. Runs in a thread.

    Returns what is wrong with a damaged tar.
    """
    cached = (
        archive.staged_path(tar.path, staging, f".{tar.start}{archive.LIST}")
        if isinstance(tar.path, BucketPath)
        else None
    )
    if cached is not None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(gzip.decompress(cached.read_bytes()))
    try:
        with tar.path.open("rb") as file:
            found = archive.tar_members(file, tar.start, tar.end)
            members = [member for member in found if not member.is_folder]
    except tarfile.TarError as error:
        return str(error)
    if cached is not None:
        with replacing(cached) as file:
            file.write(gzip.compress(json.dumps(members).encode()))
    return members


def walk_1k(source: AnyPath, config: ShardConfig, staging: AnyPath, collector: Collector) -> None:
    """Report the images of every split's tar to the collector."""
    for split, name in collector.splits.items():
        path = source / name
        if not path.is_file():
            raise UserError(
                f"{source} has no {name!r} (split {split!r}). Name the tars there are: splits.train=... splits.val=..."
            )
        with archive.damage_named(path, tarfile.TarError):
            if is_tar_of_tars(path):
                _walk_tar(path, staging, collector, f"{name}/")
            else:
                _walk_flat(path, split, config, collector)
    if unnamed := collector.class_folders() - set(collector.classes or collector.class_folders()):
        raise UserError(f"label_names = {config.label_names} lacks {min(unnamed)!r}, a class of the train tar.")


def _walk_flat(path: AnyPath, split: str, config: ShardConfig, collector: Collector) -> None:
    """Report the images of a flat tar to the collector."""
    if not config.val_labels:
        raise UserError(
            f"{path} holds images without classes: val_labels=FILE names them, a file of lines 'filename wnid', "
            "ILSVRC2012_validation_ground_truth.txt of the development kit, beside its meta.mat, or ReaL's real.json."
        )
    images = []
    for name, is_folder, offset, size, fault, *_ in archive.members(path):
        if fault or not is_utf8(name):
            collector.skip(f"{path.name}: {name}", fault or NOT_UTF8)
        elif not is_folder:
            images.append((name.rpartition("/")[2].partition(".")[0], name, offset, size))
    images.sort()
    container = collector.add_container(path)
    classes = _classes([stem for stem, *_ in images], config, collector)
    for (stem, name, offset, size), names in zip(images, classes, strict=True):
        if names:
            collector.sample(split, f"{names[0]}/{stem}", names, name, container, offset, size)


def _classes(stems: list[str], config: ShardConfig, collector: Collector) -> list[list[str]]:
    """The classes of each image. stems: file names of all images without the extension, sorted."""
    where = f"val_labels = {config.val_labels}"
    lines = read_lines(config.val_labels, "val_labels")
    if config.val_labels.endswith(".json"):
        of_images: list[list[Any]] = json_record.parse("\n".join(lines), list[list[int]], where)
        collector.notes.append(
            f"left out {of_images.count([]):,} of {counted(len(stems), 'image')}, which {config.val_labels} gives no"
            " class"
        )
    else:
        rows = [re.split(r"[\s,]+", line) for line in lines]
        of_images = [row[:1] for row in rows]
        if len(rows[0]) > 1:
            # Kaggle's LOC_val_solution.csv has boxes in further columns, and a header, whose key matches no image.
            found = {row[0].partition(".")[0]: row[1:2] for row in rows}
            if missing := [stem for stem in stems if not found.get(stem)]:
                raise UserError(
                    f"{where} names no class for {len(missing):,} of {counted(len(stems), 'image')}, such as"
                    f" {missing[0]}."
                )
            of_images = [found[stem] for stem in stems]
        elif whole_number(lines[0]) is not None:
            of_images = _by_number(lines, config.val_labels)
    if len(of_images) != len(stems):
        raise UserError(f"{where} is of {counted(len(of_images), 'image')}, but there are {len(stems):,}.")
    # As in real.json and Caffe's val.txt.
    are_numbers = all(whole_number(str(label)) is not None for labels in of_images for label in labels)
    if are_numbers != bool(config.label_names):
        raise UserError(
            f"{where} has class numbers: label_names=FILE names the wnids, one a line, from number 0 on."
            if are_numbers
            else f"label_names = {config.label_names} names numbers, but {where} has names. Leave it out."
        )
    if not are_numbers:
        return of_images
    names = ClassNumbers(read_names(config.label_names, "label_names"))
    collector.classes = names.classes()
    return [
        [names.name(int(number), f"{where}, {stem}") for number in labels]
        for stem, labels in zip(stems, of_images, strict=True)
    ]


def _by_number(numbers: list[str], val_labels: str) -> list[list[str]]:
    """Wnids of ILSVRC2012_IDs, from meta.mat of the development kit (the IDs are not in the order of wnids)."""
    from scipy.io import loadmat

    meta = Path(val_labels).parent / "meta.mat"
    if not meta.is_file():
        raise UserError(
            f"val_labels = {val_labels} has numbers, and {meta} is missing, which says what they stand for (it is in "
            "data/ of the development kit, ILSVRC2012_devkit_t12.tar.gz)."
        )
    # For a damaged file or another one, scipy and NumPy raise exceptions of any kind.
    with archive.damage_named(meta, Exception):
        synsets: Any = loadmat(meta, squeeze_me=True)["synsets"]
        wnids = {str(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
    unknown = [number for number in numbers if number not in wnids]
    if unknown:
        raise UserError(
            f"val_labels = {val_labels}: {unknown[0]!r} is not one of the {counted(len(wnids), 'number')} in {meta}."
        )
    return [[wnids[number]] for number in numbers]
