"""The settings of jobs on data (`data_tools/`): sharding, indexing, verification, statistics, de-duplication."""

import re
import sys
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.settings.quantities import PathText, RegularExpression, Seed, Share, ShareBelow1, Side, Tasks
from pipeline.settings.schema import Distinct, Settings, setting
from pipeline.settings.shared import GroupsConfig, MlflowConfig

Inspect = Literal["decode", "header"]
SplitName = Annotated[str, Field(pattern="^[a-z0-9_]+$")]
ChannelName = Annotated[str, Field(pattern="^[^,]*$")]


def _range(values: list[str]) -> list[str]:
    if values in ([], ["full"], ["percentiles"]):
        return values
    numbers = [float(value) for value in values]
    if len(numbers) % 2 or not all(low < high for low, high in zip(numbers[::2], numbers[1::2], strict=True)):
        raise ValueError("must be full, percentiles, or [low,high] with low < high")
    return values


ValueRange = Annotated[list[str], AfterValidator(_range)]


class JobConfig(Settings):
    """A job of Ray tasks on data."""

    num_tasks: Tasks = 0
    """Tasks (shards) at the same time; 0 is one per CPU of the cluster."""


class ValuesConfig(JobConfig):
    """A job that may measure the range of the images' values."""

    values: ValueRange = []
    """Which values become 0 and 1 in training, for images that are not 8-bit RGB: full (the range of the type),
    percentiles (0.1 and 99.9 of the training split, per channel), or [low,high] for all channels,
    [low,high,low,high,...] for each. Default: full for 8 bits, else percentiles.
    """
    values_images: NonNegativeInt = 10000
    """Training images whose values are counted for it, evenly from all shards; 0 is all."""


class ImagesConfig(GroupsConfig, ValuesConfig):
    """A job that makes a data set's manifest from images."""

    inspect: Inspect = "decode"
    """decode: decode every image; header: read its header and, except for GIF, BMP, TIFF and PPM, look for its end."""
    channels: Distinct[ChannelName] = []
    """Names of the channels, in order, as [blue,green,red,nir]. Default: red, green, blue of three, gray of one, else
    c0, c1, ... Gray photographs are RGB, and one channel with channels=gray. With one file per channel: those that are
    used.
    """
    nodata: float | None = setting(
        None,
        min=-sys.float_info.max,  # GDAL's usual values are the lowest of float32 and float64.
    )
    """Value of missing pixels. Default: what GeoTIFFs say."""
    max_bad_share: Share | None = None
    """Share of unreadable images above which the job stops; one is always allowed, unless it is 0. Default: 0.01 of the
    first 100,000 images, and 0.001 of all where that is more.
    """


class ShardConfig(ImagesConfig):
    """A sharding job, from raw images to tars and a manifest."""

    source: PathText
    """Folder, file or URL (s3://, gs://) of images in one of the layouts"""
    out: PathText = setting(output="folder or URL", holds="data set")
    """Folder or URL (s3://, gs://) of the new data set"""
    layout: Literal[
        "auto",
        "folder",
        "archive",
        "images",
        "imagenet21k",
        "imagenet1k",
        "cifar",
        "parquet",
        "list",
        "webdataset",
    ] = "auto"
    """Layout of source; auto detects it. images: any tree of images without labels."""
    splits: dict[SplitName, str] = setting({"train": ""}, min_items=1)
    """Mapping from split name to its part of source ('' is all): the folder that contains its class folders or images;
    the tar (imagenet1k); the list, or a value of its split_column (list); the prefix of its file names (parquet,
    webdataset).
    """
    val_share: ShareBelow1 = 0.0
    """Share of the train split held out as 'val', chosen by a hash of the key, or with groups of the group, so that a
    sample never changes split.
    """
    holdout_per_class: NonNegativeInt = 0
    """Images per class of split train held out as 'val': the first by name."""
    val_labels: PathText = setting("", needs="layout=auto,imagenet1k")
    """imagenet1k: labels of the validation images: a file of lines 'filename wnid'; or
    ILSVRC2012_validation_ground_truth.txt with meta.mat beside it; or, with label_names, a file of lines 'filename
    number' or ReaL's real.json.
    """
    image_column: str = setting("image", needs="layout=auto,parquet")
    """parquet: column of images: encoded (binary, or struct<bytes, path>), or arrays (lists of lists of numbers).
    """
    path_column: str = setting("path", needs="layout=auto,list")
    """list: column of paths, relative to the list's folder, absolute, or URLs (s3://, gs://)."""
    label_column: str = setting("label", needs="layout=auto,parquet,list")
    """parquet, list: column of labels: names, numbers, or lists of them; empty: none."""
    label_separator: str = setting(";", min_items=1, needs="layout=auto,list")
    """list: separator between the labels of an image."""
    group_column: str = setting("", needs="layout=auto,parquet,list")
    """parquet, list: column of the group of an image, such as a patient, a video or a place: images that are alike
    although nobody copied them. val_share and data.dev_share hold out whole groups, and intervals of scores are over
    groups.
    """
    target_columns: Distinct[str] = setting(list, needs="layout=auto,parquet,list")
    """parquet, list: columns of numbers to predict (train.loss=regression), as [age,dose]. An empty cell is a missing
    value.
    """
    split_column: str = setting("split", needs="layout=auto,list")
    """list: column of the split of an image, if the list has it: splits chooses among its values, and renames them;
    empty: none.
    """
    label_names: PathText = setting("", needs="layout=auto,imagenet1k,cifar,parquet,list,webdataset")
    """File of class names, one per line, for labels that are numbers from 0. (class_list chooses among classes.)"""
    class_list: PathText = ""
    """File of class names, one per line: keep only these, in this order."""
    min_images: NonNegativeInt = 0
    """Keep only classes with more than this number of images in the train split."""
    synset_names: PathText = ""
    """File of lines 'wnid name' with class names (words.txt, LOC_synset_mapping.txt)."""
    seed: Seed = 0
    """Seed of the order of samples."""
    samples_per_shard: PositiveInt = 4096
    """Samples per tar, except a split's last."""
    resize_short: Side = 0
    """Resize larger images to this short side, by area, as evaluation does with large images; 0 copies the bytes."""
    jpeg_quality: int = setting(95, min=1, max=100, needs="resize_short")
    """With resize_short: JPEG quality of re-encoded images."""
    channel_pattern: RegularExpression = ""
    """One file per channel: a regular expression in the key with the groups sample and channel, as
    (?P<sample>.*)-ch(?P<channel>[0-9]+).*; each sample becomes one image.
    """
    missing_channels: Literal["skip", "mean"] = setting("skip", needs="channel_pattern")
    """What a sample without a file for each channel is: skip, a bad image; mean, an image whose other channels are read
    as their mean.
    """
    pages: Literal["", "first", "channels", "samples"] = ""
    """What the pages of a TIFF, or the frames of a DICOM, are: channels of one image, samples, or all but the first are
    not used.
    """
    to_rgb8: bool = False
    """Reduce images of more than 8 bits or more than three channels to 8-bit RGB: the range of their type becomes 0 to
    255. Channels named red, green and blue are kept, else the first three.
    """

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        for one, other in (
            ("group_column", "group_pattern"),
            ("holdout_per_class", "val_share"),
            ("holdout_per_class", "group_column"),  # It would divide groups.
            ("holdout_per_class", "group_pattern"),
        ):
            if getattr(self, one) and getattr(self, other):
                raise UserError(f"{one} and {other} cannot be used together: leave out one of them.")
        if self.to_rgb8 and self.missing_channels == "mean":
            raise UserError(
                "missing_channels=mean keeps the channels that a sample has, and to_rgb8 makes RGB of it: use one of"
                " them."
            )
        if self.channel_pattern:
            groups = re.compile(self.channel_pattern).groupindex
            if {"sample", "channel"} - groups.keys():
                raise UserError("channel_pattern must have the groups (?P<sample>...) and (?P<channel>...).")
        for name in ("val_share", "holdout_per_class"):
            if getattr(self, name) and "val" in self.splits:
                raise UserError(
                    f"{name} holds out images of 'train' as 'val', but splits = {quoted(self.splits)} already has a"
                    f" 'val'. Name the others alone (splits.train=...), or leave {name} out."
                )
        for name in ("val_share", "holdout_per_class", "min_images"):
            if getattr(self, name) and "train" not in self.splits:
                raise UserError(f"{name} needs a split 'train', but splits has only {', '.join(self.splits)}.")


class VtabPrepareConfig(JobConfig):
    """Preparation of VTAB-1k: a data set for each of the 19 tasks, from the original files."""

    originals: PathText = ""
    """Folder with one folder per source data set, which contains the files as published (docs/vtab.md)."""
    out: PathText = setting(output="folder or URL")
    """Folder or URL (s3://, gs://) of the tasks' data sets"""
    tasks: list[str] = []
    """Names of tasks; empty is all tasks whose files exist."""
    published: bool = True
    """Require the published file sizes, checksums and numbers of images."""
    prove: bool = False
    """Only read: compute the splits of the data sets in out again, and compare."""
    samples_per_shard: PositiveInt = 4096
    """Samples per tar, except a split's last."""

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: prove only reads."""
        return ("out",) if self.prove else ()

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        if not (self.prove or self.originals):
            raise UserError("Set where the images are: originals=... (docs/vtab.md).")


class IndexConfig(ImagesConfig):
    """A manifest for existing WebDataset shards, which are not copied."""

    source: PathText
    """Folder or URL (s3://, gs://) of tars, or one tar, with <key>.jpg and, if the images have labels, <key>.cls or
    <key>.json
    """
    out: PathText = setting("", output="folder or URL", holds="data set")
    """Folder or URL (s3://, gs://) of the manifest; empty is the folder of the tars."""
    splits: dict[SplitName, str] = setting({"train": ""}, min_items=1)
    """Mapping from split name to prefix of its tars' names ('' is all)."""
    label_names: PathText = ""
    """File of class names, one per line, by label; empty names classes by number."""
    pages: Literal["", "first", "channels"] = ""
    """What the pages of a TIFF are: channels of one image, or all but the first are not used."""


class VerifyConfig(JobConfig):
    """A check of every byte of a data set."""

    data: PathText
    """Folder or URL (s3://, gs://) of a data set, made by launch/shard.py"""
    out: PathText = setting("", output="folder or URL", holds="verification")
    """Folder of report.json and damage.csv; empty is <data>/verify."""


class ExcludeConfig(Settings):
    """A list of samples to exclude from training and evaluation, from a table."""

    data: PathText
    """Folder or URL (s3://, gs://) of a data set, made by launch/shard.py"""
    samples: PathText
    """CSV with a line for each sample: columns split and key, or those of mistakes.csv, whose row tells samples with
    one key apart; the other columns are kept as the reason
    """
    name: str = setting("wrong_labels", pattern=r"^\w[\w.-]*$")
    """Name of the list, exclude/NAME.parquet of the data set. Samples are added to one that exists."""


class StatsConfig(ValuesConfig, MlflowConfig):
    """Statistics and figures of a data set."""

    data: PathText
    """Folder or URL (s3://, gs://) of a data set, made by launch/shard.py"""
    out: PathText = setting("", output="folder or URL", holds="statistics")
    """Folder of stats.json, tables and figures; empty is <data>/stats."""
    sheet: NonNegativeInt = 60
    """Images on the contact sheet; 0 makes none and reads no shard."""
    values: ValueRange = []
    """Measure the range of the values again, and record it in the data set: full (the range of the type), percentiles
    (0.1 and 99.9 of the training split, per channel), or [low,high] for all channels, [low,high,low,high,...] for each.
    Default: full for 8 bits, else percentiles.
    """


class DedupConfig(JobConfig):
    """A search for images of a data set that are near copies of test images, or of one another."""

    data: PathText
    """Folder or URL (s3://, gs://) of the data set in which copies are marked"""
    split: str = "train"
    """Split that is searched and marked."""
    against: list[PathText] = []
    """Data sets of test images, which are only read: as [datasets/pets,datasets/dtd:test], a folder for all of its
    splits, folder:split for one
    """
    within_split: bool = False
    """Instead, search the split for near copies of its own images: of those that are alike, the largest is kept (by
    pixels, then by bytes), and the others are marked.
    """
    max_distance: float = setting(0.14, min=0, max=0.5)
    """Largest distance of a copy: 1 - agreement of small image parts, so 0 is equal. docs/dedup.md has the error rates.
    """
    max_bad_share: Share = 0.001
    """Share of unreadable images above which the job stops."""

    def check(self) -> None:
        """Check what is compared. Raises UserError."""
        if bool(self.against) == self.within_split:
            raise UserError(
                "Set what the images are compared with: against=[...], data sets of test images, or within_split=true,"
                " one another. For both, run the command twice."
            )
