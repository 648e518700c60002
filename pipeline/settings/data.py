"""The settings of work on data (`data_tools/`): sharding, indexing, verifying, counting, de-duplicating, measuring.

As in `run.py`, every field is typed and explained, and `--help` of each command prints them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.errors import UserError
from pipeline.json_record import quoted
from pipeline.settings.quantities import MAX_SIDE
from pipeline.settings.run import MAX_BATCH, MAX_SEED, MAX_THREADS
from pipeline.settings.schema import REQUIRED, setting


def _check_split_names(splits: dict[str, str]) -> None:
    if not splits or any(not re.fullmatch(r"[a-z0-9_]+", name) for name in splits):
        raise UserError(f"splits = {quoted(splits)} must name at least one split, in lower-case letters and digits.")


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """A sharding job: raw images -> tars and manifest."""

    source: str = setting(REQUIRED, "Folder, file or URL (s3://, gs://) of images, as one of the layouts")
    out: str = setting(REQUIRED, "Folder or URL (s3://, gs://) of the new data set", output="folder")
    layout: Literal[
        "auto",
        "folder",
        "archive",
        "flat",
        "tiny_imagenet",
        "imagenet21k",
        "imagenet1k",
        "cifar",
        "parquet",
        "list",
        "webdataset",
    ] = setting("auto", "What source is; auto looks.")
    splits: dict[str, str] = setting(
        {"train": ""},
        "Split name -> what of source belongs to it ('' is all): the folder that holds its class folders; the tar "
        "(imagenet1k); the list; the beginning of the file names (parquet, webdataset).",
    )
    val_share: float = setting(0.0, "Share of the train split held out as 'val', by a hash of the key: it never moves.")
    holdout_per_class: int = setting(
        0, "Images of each class held out of the train split as 'val', the first in the order of names."
    )
    val_labels: str = setting(
        "",
        "imagenet1k: file of lines 'filename wnid', ILSVRC2012_validation_ground_truth.txt beside its meta.mat, or with "
        "label_names lines 'filename number' or ReaL's real.json.",
    )
    cifar100_labels: Literal["fine", "coarse"] = setting("fine", "cifar: CIFAR-100's 100 classes, or its 20 groups.")
    image_column: str = setting("image", "parquet: column of encoded images, binary or struct<bytes, path>.")
    path_column: str = setting("path", "list: column of paths, relative to the list's folder, or of URLs.")
    label_column: str = setting("label", "parquet, list: column of labels: names, numbers, or lists of either.")
    label_separator: str = setting(";", "list: stands between several labels of one image.")
    label_names: str = setting("", "File of class names, one a line, where labels are numbers from 0 (list: text too).")
    class_map: str = setting("", "File of lines 'old,new' (or a tab): classes renamed, or merged into one.")
    class_list: str = setting("", "File of class names, one a line: only these, in this order.")
    min_images: int = setting(0, "Only classes with more than so many images in the train split.")
    synset_names: str = setting("", "File of lines 'wnid name' (words.txt, LOC_synset_mapping.txt): readable names.")
    merge_copies: bool = setting(
        False, "Samples of equal bytes become one, with the labels of all; reads every byte of source once more."
    )
    seed: int = setting(0, "Mixes samples across classes.", most=MAX_SEED)
    samples_per_shard: int = setting(4096, "Samples in each tar, but for a split's last.")
    resize_short: int = setting(
        0, "Resize images whose short side is larger to this; 0 copies the bytes.", most=MAX_SIDE
    )
    resize_filter: Literal["area", "antialias"] = setting(
        "area",
        "With resize_short: area is what evaluation does with full-size images; antialias is Pillow's bilinear, in less "
        "time.",
    )
    jpeg_quality: int = setting(95, "Of re-encoded images (only with resize_short).")
    inspect: Literal["decode", "header"] = setting(
        "decode",
        "Whether images are decoded whole, or only their header is read and the end marker of a JPEG or PNG looked for.",
    )
    max_bad_share: float = setting(0.001, "Share of unreadable images above which the job stops.")
    num_tasks: int = setting(0, "Shards written at the same time; 0 is one per CPU of the cluster.", most=1_000_000)

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not 0 <= self.val_share < 1:
            raise UserError(f"val_share = {self.val_share} must be at least 0 and below 1.")
        if self.val_share and self.holdout_per_class:
            raise UserError("val_share and holdout_per_class both hold out 'val': use one.")
        for name in ("val_share", "holdout_per_class"):
            if getattr(self, name) and "val" in self.splits:
                raise UserError(
                    f"{name} holds images out of 'train' as 'val', but splits names a 'val' already: use one."
                )
        for name in ("val_share", "holdout_per_class", "min_images"):
            if getattr(self, name) and "train" not in self.splits:
                raise UserError(f"{name} is about the split 'train', but splits has only {', '.join(self.splits)}.")
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(f"max_bad_share = {self.max_bad_share} must be between 0 and 1.")
        if self.samples_per_shard < 1:
            raise UserError(f"samples_per_shard = {self.samples_per_shard} must be at least 1.")
        if not 1 <= self.jpeg_quality <= 100:
            raise UserError(f"jpeg_quality = {self.jpeg_quality} must be from 1 to 100.")
        for name in ("resize_short", "num_tasks", "holdout_per_class", "min_images"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} = {getattr(self, name)} must not be negative.")
        if not self.label_separator:
            raise UserError("label_separator must not be empty.")
        _check_split_names(self.splits)


@dataclass(frozen=True, kw_only=True)
class VtabPrepareConfig:
    """VTAB-1k's 19 tasks: original files, or prepared copies of them -> a data set for each."""

    originals: str = setting(
        "", "Folder of a folder for each source data set, with the files as their authors publish them (docs/vtab.md)."
    )
    tfds: str = setting("", "data_dir of tensorflow_datasets with prepared data sets, for those not in originals.")
    lists: str = setting(
        "", "Folder of vtab-1k as train800.txt, ..., for tasks in neither; their splits cannot be proved."
    )
    out: str = setting(REQUIRED, "Folder or URL (s3://, gs://) of the tasks' data sets", output="folder")
    tasks: list[str] = setting(list, "Names of tasks; empty is all whose files are there.")
    published: bool = setting(
        True, "Whether files must have the published sizes and checksums, and pools the published numbers of images."
    )
    prove: bool = setting(False, "Write nothing: compute the splits of the data sets in out again, and compare.")
    samples_per_shard: int = setting(4096, "Samples in each tar, but for a split's last.")
    num_tasks: int = setting(0, "Shards written at the same time; 0 is one per CPU of the cluster.", most=1_000_000)

    def not_written(self) -> tuple[str, ...]:
        """Outputs that are not tried: --prove only reads."""
        return ("out",) if self.prove else ()

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not (self.prove or self.originals or self.tfds or self.lists):
            raise UserError("Say where the images are: originals=..., tfds=..., or lists=... (docs/vtab.md).")
        if self.samples_per_shard < 1:
            raise UserError(f"samples_per_shard = {self.samples_per_shard} must be at least 1.")
        if self.num_tasks < 0:
            raise UserError(f"num_tasks = {self.num_tasks} must not be negative.")


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """A manifest for webdataset shards that stay where they are."""

    source: str = setting(REQUIRED, "Folder or URL of tars, or one tar, of <key>.jpg and <key>.cls or <key>.json")
    out: str = setting("", "Folder or URL of the manifest; empty is the folder of the tars.", output="folder")
    splits: dict[str, str] = setting({"train": ""}, "Split name -> how the names of its tars begin ('' is all).")
    label_names: str = setting("", "File of class names, one a line, by label; without, classes are called by number.")
    inspect: Literal["decode", "header"] = setting(
        "decode",
        "Whether images are decoded whole, or only their header is read and the end marker of a JPEG or PNG looked for.",
    )
    max_bad_share: float = setting(0.001, "Share of unreadable samples above which no manifest is written.")
    num_tasks: int = setting(0, "Tars read at the same time; 0 is one per CPU of the cluster.", most=1_000_000)

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(f"max_bad_share = {self.max_bad_share} must be between 0 and 1.")
        if self.num_tasks < 0:
            raise UserError(f"num_tasks = {self.num_tasks} must not be negative.")
        _check_split_names(self.splits)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """A check of a data set on disk, to the last byte."""

    data: str = setting(REQUIRED, "Folder or URL of a data set (shards and manifest, made by launch/shard.py)")
    out: str = setting("", "Folder of report.json and damage.csv; empty is <data>/verify.", output="folder")
    decode_share: float = setting(
        1.0, "Share of the images that are decoded, by a hash of the key; those of the last run's list always are."
    )
    num_tasks: int = setting(0, "Shards read at the same time; 0 is one per CPU of the cluster.", most=1_000_000)

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not 0 <= self.decode_share <= 1:
            raise UserError(f"decode_share = {self.decode_share} must be between 0 and 1.")
        if self.num_tasks < 0:
            raise UserError(f"num_tasks = {self.num_tasks} must not be negative.")


@dataclass(frozen=True, kw_only=True)
class StatsConfig:
    """What is in a data set, counted and drawn."""

    data: str = setting(REQUIRED, "Folder or URL of a data set (shards and manifest, made by launch/shard.py)")
    out: str = setting("", "Folder of stats.json, tables and pictures; empty is <data>/stats.", output="folder")
    sheet: int = setting(60, "Images on the contact sheet; 0 is no sheet, and reads no shard.")
    mlflow: str = setting("", "MLflow tracking URI that the numbers and pictures are sent to; empty sends nothing.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not 0 <= self.sheet <= 1000:
            raise UserError(f"sheet = {self.sheet} must be from 0 to 1000 images.")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """A measurement of reading or writing data, beside other projects that do it."""

    what: Literal["data", "shard", "augment"] = setting(
        REQUIRED, "data: the loader; shard: sharding; augment: what augmentation costs"
    )
    source: str = setting(REQUIRED, "Folder or tar of JPEGs")
    images: int = setting(4000, "Number of images; those of the source are repeated.")
    batch: int = setting(64, "Images of a batch.", most=MAX_BATCH)
    image_size: int = setting(224, "Side in pixels of a view.", most=MAX_SIDE)
    max_threads: int = setting(
        16, "data: our loader is measured with one thread per core and twice, four times ... that.", most=MAX_THREADS
    )
    rounds: int = setting(3, "Times that everything is measured, in turns; medians are printed.")
    folder: str = setting(
        "",
        "Where the images are written, and removed at the end; empty is the system's for such files.",
        output="folder",
    )

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        for name in ("images", "batch", "image_size", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1.")
        if self.images < 2 * self.batch:
            raise UserError(f"images = {self.images} must be at least two batches of {self.batch}.")
        if self.what == "augment" and self.batch % 2:
            raise UserError(f"batch = {self.batch} must be even: images are mixed in pairs.")
        if self.folder and not Path(self.folder).is_dir():
            raise UserError(f"folder = {quoted(self.folder)}: there is no such folder.")


@dataclass(frozen=True, kw_only=True)
class DedupConfig:
    """A search for images of a data set that are copies of test images."""

    data: str = setting(REQUIRED, "Folder or URL of the data set whose copies are marked")
    split: str = setting("train", "Its split that is searched and marked.")
    against: list[str] = setting(
        REQUIRED, "Data sets of test images: [folder, ...] for all splits, folder:split for one. They are only read."
    )
    max_distance: float = setting(
        0.14,
        "Pairs up to this are copies: 1 - agreement of all small parts, so 0 is equal. docs/data.md has the errors.",
    )
    max_bad_share: float = setting(0.001, "Share of images that cannot be decoded above which the job stops.")
    num_tasks: int = setting(0, "Shards read at the same time; 0 is one per CPU of the cluster.", most=1_000_000)
    dry_run: bool = setting(False, "Report and picture sheet only: no image is marked.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not self.against:
            raise UserError("against is empty. Name the data sets of test images: against=[datasets/pets,...]")
        if not 0 <= self.max_distance <= 0.5:
            raise UserError(f"max_distance = {self.max_distance} must be between 0 and 0.5 (beyond, all is a copy).")
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(f"max_bad_share = {self.max_bad_share} must be between 0 and 1.")
        if self.num_tasks < 0:
            raise UserError(f"num_tasks = {self.num_tasks} must not be negative.")
