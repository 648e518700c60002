"""The settings of work with trained weights: scores, export, and looks at what they say of images, and why."""

from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.errors import UserError
from pipeline.settings.quantities import MAX_SIDE
from pipeline.settings.run import MAX_BATCH, MAX_SEED, MAX_THREADS, Precision, ProbeConfig
from pipeline.settings.schema import REQUIRED, setting, typed

_IMAGES = "image files, folders, tars of samples (* and ? stand for any), or one data set, a folder or URL"
Drawing = Literal[
    "attention", "rollout", "distance", "gradcam", "predictions", "patches", "positions", "filters", "cost"
]
DRAWINGS: tuple[Drawing, ...] = get_args(Drawing)


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Weights that look at images, and how: what evaluating, predicting and explaining have in common."""

    weights: str = setting(REQUIRED, "Weights: a run, a checkpoint, our .pt, or those of others (docs/weights.md)")
    image_size: int = setting(0, "Side in pixels of the images the model sees; 0 is the weights' own.", most=MAX_SIDE)
    eval_resize: int = setting(
        0,
        "Short side, or square, before the central crop; 0 is as the weights say, else 8/7 of image_size.",
        most=MAX_SIDE,
    )
    eval_crop: Literal["auto", "center", "resize", "resize_center"] = setting(
        "auto",
        "Short side resized and central crop; the whole image resized; or that and its central crop; auto is as the weights "
        "say.",
    )
    resize_filter: Literal["auto", "linear", "antialias", "bilinear"] = setting(
        "auto",
        "Bilinear, smaller by area; Pillow's bilinear; or bilinear without antialias; auto is as the weights say.",
    )
    loss: Literal["auto", "softmax", "sigmoid"] = setting(
        "auto", "Loss of the weights, and so what probabilities are; auto is the weights' own, else softmax."
    )
    batch: int = setting(64, "Images per forward pass.", most=MAX_BATCH)
    threads: int = setting(2, "Decoding threads.", most=MAX_THREADS)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model computes; auto is a GPU if there is one.")
    precision: Precision = setting("fp32", "Of weights and activations; bf16 is for GPUs.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        for name, value in {"batch": self.batch, "threads": self.threads}.items():
            if value < 1:
                raise UserError(f"{name} = {value} must be at least 1.")
        for name, value in {"image_size": self.image_size, "eval_resize": self.eval_resize}.items():
            if value < 0:
                raise UserError(f"{name} = {value} must not be negative.")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(WeightsConfig, ProbeConfig):
    """Scores of trained weights on a split of a data set, and a report of them."""

    data: str = setting(REQUIRED, "Folder or URL (s3://, gs://) of a data set, made by launch/shard.py")
    split: str = setting("val", "Split to score.")
    exclude: str = setting("all", "Lists of samples to leave out (exclude/*.parquet): all, none, or names with commas.")
    out: str = setting(
        "",
        "Folder of the report; empty is <run>/evaluate/<data>-<split>, or runs/evaluate/... for a file.",
        output="folder",
    )
    classify: bool = setting(True, "Score the weights' own head; false when it is of other classes: features only.")
    match_classes: bool = setting(True, "Refuse data whose class names are not those that the weights were trained on.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        super().check()
        self.check_probe("", self.split)
        if not self.classify and not self.probes:
            raise UserError("classify=false with shots=0 and neighbours=0 leaves nothing to score: set one of them.")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Weights written for another program, or from one of its formats into ours."""

    weights: str = setting(
        REQUIRED, "Any that we read: a run, a checkpoint, .pt, .npz, or of timm, Hugging Face, DINOv2"
    )
    format: Literal["safetensors", "timm", "huggingface", "npz", "big_vision", "onnx", "torch_export"] = setting(
        REQUIRED,
        "safetensors: ours; timm, huggingface: folders that they load; npz: vision_transformer's, BiT's; big_vision's",
    )
    out: str = setting(
        REQUIRED, "File (.safetensors, .npz, .onnx, .pt2), or for timm and huggingface a new folder", output="new"
    )
    image_size: int = setting(
        0, "Side in pixels of the images that it will read; 0 is the weights' own.", most=MAX_SIDE
    )
    kernel: Literal["zoom", "bicubic", "bicubic_antialias"] = setting(
        "zoom", "With image_size: how positions are resampled; the official code's, Hugging Face's, timm's."
    )
    head: bool = setting(True, "false: the features alone, without head and representation layer.")
    tolerance: float = setting(
        1e-4, "Largest difference of logits between ours and the other side, as a share of the largest; else refused."
    )

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        suffixes = {
            "safetensors": ".safetensors",
            "npz": ".npz",
            "big_vision": ".npz",
            "onnx": ".onnx",
            "torch_export": ".pt2",
        }
        if not self.out.endswith(suffixes.get(self.format, "")):
            raise UserError(f"out = {typed(self.out)} of format = {self.format} must end in {suffixes[self.format]}.")
        if self.image_size < 0:
            raise UserError(f"image_size = {self.image_size} must not be negative.")
        if not 0 <= self.tolerance < 1:
            raise UserError(f"tolerance = {self.tolerance} must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class LookConfig(WeightsConfig):
    """Weights and images, wherever these lie."""

    images: list[str] = setting(REQUIRED, f"What they look at: {_IMAGES}")
    split: str = setting("val", "Of a data set: its split.")
    exclude: str = setting("all", "Of a data set: lists of samples to leave out: all, none, or names with commas.")
    class_names: str = setting("", "File with one class name a line, for weights that do not bring them.")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(LookConfig):
    """The most likely classes of images."""

    top: int = setting(5, "How many classes of each image are told, the most likely first.")
    out: str = setting(
        "", "File for the whole table, .csv or .parquet; empty prints its beginning only.", output="file"
    )

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        super().check()
        if self.top < 1:
            raise UserError(f"top = {self.top} must be at least 1.")
        if self.out and not self.out.endswith((".csv", ".parquet")):
            raise UserError(f"out = {typed(self.out)} must end with .csv or .parquet.")


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(LookConfig):
    """Pictures of what is inside weights."""

    images: list[str] = setting(list, f"What they look at: {_IMAGES}. None: only the drawings that need no image.")
    draw: list[Drawing] = setting(list, "Which drawings, as [attention,rollout]; empty is all that this model has.")
    layer: str = setting("all", "Of attention: a block's number from 1, all, or mean.")
    head: str = setting("mean", "Of attention: a head's number from 1, all, or mean.")
    num_drawn: int = setting(6, "Images that are drawn, chosen at random.")
    num_averaged: int = setting(128, "Images that the attention distance is the mean of (the paper's is of 128).")
    num_predicted: int = setting(1000, "Images among which the sheet of predictions looks for the worst mistakes.")
    seed: int = setting(0, "Which images are chosen; a smaller choice lies in a larger one.", most=MAX_SEED)
    out: str = setting(
        "", "Folder of the drawings; empty is <run>/explain, or runs/explain/... for a file.", output="folder"
    )
    mlflow: str = setting("", "MLflow tracking URI that the numbers and pictures are sent to; empty sends nothing.")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        super().check()
        for name in ("num_drawn", "num_averaged", "num_predicted"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1.")
        if self.seed < 0:
            raise UserError(f"seed = {self.seed} must not be negative.")
        for name, value in {"layer": self.layer, "head": self.head}.items():
            if value not in ("all", "mean") and not (value.isascii() and value.isdigit() and int(value) > 0):
                raise UserError(f"{name} = {typed(value)} must be a number from 1, all, or mean.")
