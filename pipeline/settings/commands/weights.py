"""The settings of commands on trained weights: scores, export, predictions and explanations."""

from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import NonNegativeInt, PositiveInt

from pipeline.base.errors import UserError
from pipeline.process.outputs import kind_of
from pipeline.settings.quantities import Batch, ImageSize, PathText, Seed, Share, ShareBelow1, Side, Threads
from pipeline.settings.run import Precision, ProbeConfig
from pipeline.settings.schema import Settings, setting
from pipeline.settings.shared import MlflowConfig
from pipeline.settings.yaml_reader import as_typed

TrainedLoss = Literal["auto", "softmax", "sigmoid"]
Drawing = Literal[
    "attention",
    "rollout",
    "distance",
    "components",
    "reconstruction",
    "predictions",
    "positions",
    "filters",
]
# For launch/choose.py: with 40,000 images, the similarities of all pairs take 6.4 GB.
MAX_CANDIDATES = 40_000
# Formats of export that are one file.
_OF_ONE_FILE = ("safetensors", "onnx")
DRAWINGS: tuple[Drawing, ...] = get_args(Drawing)


class LossConfig(Settings):
    """How a command computes probabilities."""

    loss: TrainedLoss = "auto"
    """Loss that the weights were trained with, which determines probabilities; auto is the weights' own, or softmax if
    they have none.
    """


class WeightsConfig(Settings):
    """Weights and how they compute; shared by all commands that apply them to images."""

    weights: PathText
    """Weights: a run, a checkpoint, other projects', or OWNER/NAME on the Hugging Face hub (docs/weights.md)"""
    image_size: ImageSize | None = None
    """Size of the input images in pixels: a side, or height x width; null is the weights' own."""
    resize_filter: Literal["auto", "linear", "antialias", "bilinear", "bicubic"] = "auto"
    """linear: area to make images smaller, bilinear to enlarge them; antialias: Pillow's bilinear; bilinear: without
    antialias; bicubic: Pillow's bicubic. auto is the weights' own.
    """
    # How many unreadable images are allowed whatever their share, unless that is 0.
    least_bad: ClassVar[int] = 1
    max_bad_share: Share = 0.001
    """Share of unreadable images above which the command stops; predict, features, choose, explain and segment's apply
    allow at least 10, unless it is 0.
    """
    batch: Batch = 64
    """Images per forward pass."""
    threads: Threads = 2
    """Decoding threads."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto is a GPU if available."""
    precision: Precision = "fp32"
    """Precision of weights and activations; bf16 is for GPUs."""


class ViewConfig(WeightsConfig):
    """Weights that see an image as one input: all of it, or its centre."""

    eval_resize: Side = setting(0, needs="eval_crop=auto,center,resize_center")
    """Size before the central crop; 0 is the weights' own, or 8/7 of image_size if they have none."""
    eval_crop: Literal["auto", "center", "resize", "resize_center"] = "auto"
    """Resize the short side and crop the centre (center); resize the whole image (resize); or resize the whole image
    and crop the centre (resize_center). auto is the weights' own.
    """


class ScoreConfig(LossConfig, ViewConfig, ProbeConfig, MlflowConfig):
    """Scores of trained weights on a split of a data set, with a report."""

    data: PathText
    """Folder or URL (s3://, gs://) of a data set, made by launch/shard.py"""
    split: str = "val"
    """Split to score."""
    exclude: str = "all"
    """Lists of excluded samples (exclude/*.parquet) to apply: all, none, or names separated by commas."""
    out: PathText = setting("", output="folder", holds="evaluation")
    """Folder of the report; empty is <run>/evaluate/<data>-<split>, <run>/evaluate/<step>-... for one of its
    checkpoints, and runs/evaluate/<weights>-... for others (refused if it holds those of other weights of this name).
    """
    classify: bool = True
    """Score the weights' own head; false scores only features (for other classes)."""
    match_classes: bool = True
    """Match classes by name, and refuse data with one that the weights do not have; false: by number."""
    folds: NonNegativeInt = 0
    """To find wrong labels, in place of all other scores: predict each image of split by a linear layer on the features
    that is fitted to the images of the other folds (5, say); 0: off.
    """

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        if self.folds == 1:
            raise UserError("folds = 1 leaves no image to fit the linear layer to: use 2 or more, or 0 for none.")
        if self.folds:
            return
        self.check_splits("", self.split)
        if not self.classify and not self.probes:
            raise UserError(
                "classify=false with shots=0, neighbours=0 and rankme_images=0 leaves nothing to score: set one of"
                " them."
            )


class ExportConfig(Settings):
    """Conversion of weights to or from the format of another project."""

    weights: PathText
    """Weights: a run, a checkpoint, other projects', or OWNER/NAME on the Hugging Face hub (docs/weights.md)"""
    format: Literal["auto", "safetensors", "timm", "huggingface", "onnx", "huggingface_mae"] = "auto"
    """safetensors: our format; timm, huggingface: folders that these libraries load; onnx: a graph, with a script that
    predicts classes by it; huggingface_mae: MAE with its decoder, as transformers loads it. auto: by the suffix of out
    (.safetensors, .onnx)
    """
    out: PathText = setting(output="new")
    """File (.safetensors, .onnx), or for timm, huggingface and huggingface_mae a new folder"""
    image_size: ImageSize | None = None
    """Size of the input images in pixels: a side, or height x width; null is the weights' own."""
    head: bool = True
    """Include the head and the representation layer; false exports only the features."""
    tolerance: ShareBelow1 = 1e-4
    """Largest accepted difference of logits after conversion, as a share of the largest logit."""

    @property
    def written_format(self) -> str:
        """`format`, or what the suffix of out says. Raises UserError if it says nothing."""
        if self.format != "auto":
            return self.format
        if (suffix := Path(self.out).suffix[1:]) in _OF_ONE_FILE:
            return suffix
        raise UserError(
            f"out = {as_typed(self.out)} does not say the format. Set format=timm, huggingface or huggingface_mae for a"
            " folder, or end the name of a file in .safetensors or .onnx."
        )

    def check(self) -> None:
        """Check the suffix of out. Raises UserError."""
        form = self.written_format
        if form in _OF_ONE_FILE and Path(self.out).suffix != f".{form}":
            raise UserError(f"out = {as_typed(self.out)} of format = {form} must end in .{form}.")
        if form == "huggingface_mae" and (self.image_size or not self.head):
            raise UserError(f"format = {form} writes MAE as it was trained: leave out image_size and head.")


class GivenConfig(Settings):
    """The images that are given to a command."""

    needs_images: ClassVar[bool] = True
    source: list[PathText] = []
    """Images: image files and folders."""
    data: PathText = ""
    """In place of source: folder or URL (s3://, gs://) of a data set, made by launch/shard.py."""
    exclude: str = setting("all", needs="data")
    """Of a data set: lists of excluded samples (exclude/*.parquet) to apply: all, none, or names separated by commas.
    """

    @property
    def images(self) -> list[str]:
        """Where the images are: the places of source, or the data set."""
        return [self.data] if self.data else self.source

    @property
    def places(self) -> str:
        """`images` in words."""
        return ", ".join(self.images)

    def setting_of(self, name: str) -> str:
        """The setting that gives the places which the attribute `name` has."""
        return name if name != "images" else "data" if self.data else "source"

    def check(self) -> None:
        """Check that images are named, by the right setting. Raises UserError."""
        if self.needs_images and not self.images:
            raise UserError("source is not set. Set source=FOLDER of image files, or data=FOLDER of a data set.")
        if self.source and self.data:
            raise UserError("source and data both say where the images are: set one of them.")
        for place in self.source:
            if "://" in place or kind_of(Path(place)) == "data set":
                raise UserError(f"source = {place} is a data set, and source is for image files. Set data={place}")


class LookConfig(GivenConfig, ViewConfig):
    """Weights and the images that they are applied to."""

    # A folder of photographs has some that cannot be read. Each is reported with its reason, and none changes what is
    # said of the others.
    least_bad: ClassVar[int] = 10
    split: str = setting("val", needs="data")
    """Split of the data set."""
    class_names: PathText = ""
    """File of class names, one per line in the order of the head, for weights without class names."""


class PredictConfig(LossConfig, LookConfig):
    """The most likely classes of images."""

    top: PositiveInt = 5
    """Number of classes per image, the most likely first."""
    out: PathText = setting("", output="file", pattern=r"^$|\.(csv|parquet)$")
    """File for the whole table, .csv or .parquet; empty prints its first rows."""


class FeaturesConfig(LookConfig):
    """The features of images: what the head reads, or would read."""

    tokens: Literal["image", "patches"] = "image"
    """image: a vector for each image, what the head reads. patches: one for each patch, after the last norm."""
    out: PathText = setting(output="new")
    """File for the table, .parquet; for tokens=patches a new folder: a .npy for each image, and index.parquet"""

    def check(self) -> None:
        """Check that out suits what is written. Raises UserError."""
        super().check()
        if self.out.endswith(".parquet") != (self.tokens == "image"):
            raise UserError(f"out = {as_typed(self.out)}: tokens=image writes a .parquet, tokens=patches a folder.")


class ChooseConfig(LookConfig):
    """The images that are worth labelling first."""

    num: int = setting(min=1, max=MAX_CANDIDATES)
    """Number of images to choose; the first of more are the same."""
    candidates: int = setting(10_000, min=1, max=MAX_CANDIDATES)
    """Images that are looked at and chosen from, a random part of more. All are compared with each other: 0.4 GB of
    memory for 10,000, four times as much for twice as many.
    """
    seed: Seed = 0
    """Seed of the random part."""
    out: PathText = setting(output="new")
    """New folder for the chosen images, their table and their sheet"""

    def check(self) -> None:
        """Check the number of images. Raises UserError."""
        super().check()
        if self.num > self.candidates:
            raise UserError(f"num = {self.num:,} is more than candidates = {self.candidates:,}. Raise candidates, too.")


class ExplainConfig(LossConfig, LookConfig, MlflowConfig):
    """Figures that explain weights and their predictions; without images, those that need none."""

    needs_images: ClassVar[bool] = False

    draw: list[Drawing] = []
    """Figures to draw, as [attention,rollout]; empty is all that the model has."""
    layer: str = setting("all", pattern="^(all|[1-9][0-9]*)$", needs="draw=attention")
    """attention: block, a number from 1, or all."""
    head: str = setting("mean", pattern="^(all|mean|[1-9][0-9]*)$", needs="draw=attention")
    """attention: head, a number from 1, all, or mean."""
    normalise: bool | None = setting(None, needs="draw=reconstruction")
    """reconstruction: whether MAE's decoder predicts normalised pixels; null is what the weights say, or true."""
    num_drawn: PositiveInt = 6
    """Number of images that are drawn, chosen at random."""
    seed: Seed = 0
    """Seed of the choice of images; a larger choice contains a smaller one."""
    out: PathText = setting("", output="folder", holds="explanation")
    """Folder of the figures; empty is <run>/explain, <run>/explain/<step> for one of its checkpoints, and
    runs/explain/<weights> for others (refused if it holds those of other weights of this name).
    """
