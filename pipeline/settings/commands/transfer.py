"""The settings of VTAB-1k: a protocol, and a sweep over tasks by it.

A protocol fixes everything that makes two scores comparable; `configs/vtab/` has the published ones.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.architecture.config import Kernel
from pipeline.base.errors import UserError
from pipeline.settings import effect
from pipeline.settings.quantities import MAX_TASKS, Length
from pipeline.settings.run import check_augment
from pipeline.settings.run_sections import AugmentConfig, Precision, ScheduleConfig
from pipeline.settings.schema import REQUIRED, TextForm, setting
from pipeline.settings.shared import batch_size, cpu_threads, kernel_setting, mlflow_uri, pixels, seeds


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How a model is adapted to a task and scored. All combinations of the lists are tried on train800 and val200."""

    name: str = setting(
        REQUIRED, "Name in results, as vit_paper", form=TextForm(r"[a-z0-9_]+", "of lower-case letters, digits and _")
    )
    image_size: int = pixels(REQUIRED, "Side of the square input images in pixels", 1)
    small_image_size: int = pixels(
        0,
        "image_size for tasks whose images have fewer than 96 x 96 pixels (BiT), for which augment.eval_resize is scaled with it; 0 is image_size.",
    )
    small_resize_to: int = pixels(0, "augment.resize_to for these tasks.", needs="small_image_size")
    pixels: Literal["weights", "imagenet"] = setting(
        "weights",
        "Pixel normalisation: [-1, 1], which our weights and converted ones expect (docs/weights.md); or ImageNet's mean and "
        "standard deviation.",
    )
    augment: AugmentConfig = setting(AugmentConfig, "", needs="method=finetune")
    batch: int = batch_size(REQUIRED, "Samples per optimizer step", needs="method=finetune")
    length: list[Length] = setting(
        REQUIRED,
        "Training lengths to try, as [2500 steps, 10000 steps]",
        above=0,
        distinct=True,
        needs="method=finetune",
    )
    optimizer: Literal["sgd", "adam"] = setting(
        "sgd", "SGD with momentum, or Adam with decoupled weight decay.", needs="method=finetune"
    )
    lr: list[float] = setting(
        REQUIRED,
        "Peak learning rates to try, as [0.1, 0.01]",
        above=0,
        distinct=True,
        needs="method=finetune",
    )
    momentum: float = setting(0.9, "SGD: momentum.", min=0, below=1, needs="optimizer=sgd")
    weight_decay: list[float] = setting(
        [0.0],
        "Weight decays of dense kernels to try; each is multiplied by the learning rate.",
        min=0,
        min_items=1,
        distinct=True,
        needs="method=finetune",
    )
    clip: float = setting(0.0, "Clip gradients to this global norm; 0 is no clipping.", min=0, needs="method=finetune")
    dropout: float = setting(
        0.0, "Dropout (0.1 for L/16 and H/14 in the ViT paper's code).", min=0, below=1, needs="method=finetune"
    )
    schedule: ScheduleConfig = setting(ScheduleConfig, "", needs="method=finetune")
    l2: list[float] = setting(
        [16.0, 128.0, 1024.0, 8192.0, 65536.0],
        "method=linear: strengths of ridge regression on whitened features to try.",
        above=0,
        min_items=1,
        needs="method=linear",
    )
    neighbours: list[int] = setting(
        [1, 5, 20], "method=knn: numbers of neighbours to try.", min=1, min_items=1, needs="method=knn"
    )
    temperature: float = setting(
        0.07, "method=knn: a vote's weight is exp(cosine similarity / temperature).", above=0, needs="method=knn"
    )

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        if shares := [str(length) for length in self.length if length.unit == "%"]:
            raise UserError(
                f"protocol.length = {', '.join(shares)} must be in steps, epochs or samples: a share needs another length."
            )
        check_augment(self.augment, "protocol.augment.", "protocol.image_size", self.image_size)
        if 0 < self.small_resize_to < self.small_image_size:
            raise UserError(
                f"protocol.small_resize_to = {self.small_resize_to} is smaller than protocol.small_image_size = {self.small_image_size}."
            )
        if self.augment.scaled_decoding:
            raise UserError("protocol.augment.scaled_decoding has no effect: each image is decoded once, whole.")
        self.schedule.check("protocol.schedule.")
        self.check_pairs("protocol.batch", self.batch)

    def check_pairs(self, name: str, batch: int) -> None:
        """Raise UserError for an odd batch if images are mixed in pairs. name: of the batch's setting."""
        if batch % 2 and self.augment.mixes_pairs:
            raise UserError(f"{name} = {batch} must be even: Mixup and CutMix mix images in pairs.")


@dataclass(frozen=True, kw_only=True)
class VtabConfig:
    """A sweep that scores weights on VTAB-1k's tasks by a protocol."""

    # Printed when it begins: as in a run, an override may turn off what the protocol's file configures, and a sweep keeps its protocol.
    notes_without_effect = True

    weights: str = setting(
        REQUIRED, "Weights: a run, a checkpoint, our .pt, or other projects' (docs/weights.md)", path=True
    )
    data: str = setting("datasets/vtab", "Folder of the tasks' data sets, made by launch/vtab_prepare.py", path=True)
    out: str = setting(
        "",
        "Folder of results; empty is <run>/vtab/<protocol>-<method>, <run>/vtab/<step>-... for one of its checkpoints, and "
        "runs/vtab/<weights>-... for others.",
        output="folder",
        holds="experiment",
    )
    method: Literal["finetune", "linear", "knn"] = setting(
        "finetune",
        "finetune: train all weights; linear, knn (cheap): ridge regression or nearest neighbours on the features of the "
        "unchanged weights.",
    )
    tasks: list[str] = setting(list, "Names of tasks; empty is all tasks whose data sets exist.")
    seeds: list[int] = seeds(
        [0],
        "Seeds of sample order and augmentation; each gives a score. Settings are chosen with the first; linear and knn do not "
        "depend on seeds.",
        needs="method=finetune",
    )
    protocol: ProtocolConfig = setting(ProtocolConfig, "")
    kernel: Kernel | None = kernel_setting()
    pretrained_on: list[str] = setting(
        list,
        "Data set that the weights were trained on, as folder or folder:split, or all of a mixture, as [datasets/a,datasets/b]; the "
        "results then include the number of copies of test images that launch/dedup.py marked in them. Without a split it is that of the "
        "weights' run, or train.",
        path=True,
        distinct=True,
    )
    micro_batch: int = batch_size(
        64,
        "Images per forward pass, with gradient accumulation over a batch. It affects the random numbers of dropout, so use "
        "one value in a sweep.",
    )
    precision: Precision = setting("fp32", "Precision of activations; bf16 is autocast on GPUs, and weights stay fp32.")
    threads: int = cpu_threads(
        2, "Decoding threads of a cell; without a GPU, also its computing threads and its number of CPUs."
    )
    gpu_share: float = setting(1.0, "Share of a GPU for each cell: 0.25 runs four on one GPU.", above=0, max=1)
    num_tasks: int = setting(0, "Number of cells that run at the same time; 0 is as many as fit.", min=0, max=MAX_TASKS)
    mlflow: str = mlflow_uri(
        "MLflow tracking URI of the sweep (docs/vtab.md); none sends nothing. Empty is MLFLOW_TRACKING_URI, else where the run of "
        "the weights was sent to, else sqlite:///mlflow.db in the folder of `out` (without out, in runs)."
    )
    plan: bool = setting(False, "Only list the cells and their cost.")

    def without_effect(self) -> list[str]:
        """A line for each reason for which settings have no effect."""
        protocol, crops = self.protocol, ("resize_crop", "resize_small_crop")
        lines = effect.without_effect(self)
        is_used = self.method == "finetune" and protocol.augment.crop in crops
        if protocol.small_image_size and protocol.small_resize_to and not is_used:
            lines.append(
                f"protocol.small_resize_to = {protocol.small_resize_to} has no effect without method = finetune and "
                f"protocol.augment.crop = {' or '.join(crops)}"
            )
        return lines

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: --plan only prints."""
        return ("out",) if self.plan else ()

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        self.protocol.check()
        self.protocol.check_pairs("micro_batch", self.micro_batch)
