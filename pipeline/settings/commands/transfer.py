"""The settings of VTAB-1k: a protocol, and a sweep over tasks by it.

A protocol fixes everything that makes two scores comparable; `configs/vtab/` has the published ones.
"""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from pipeline.base.errors import UserError
from pipeline.settings.quantities import (
    MAX_SIDE,
    Batch,
    PathText,
    PositiveLength,
    PositiveShare,
    ShareBelow1,
    Side,
    Tasks,
    Threads,
)
from pipeline.settings.run import AugmentConfig, Precision, ScheduleConfig, check_augment
from pipeline.settings.schema import Seeds, Settings, setting


class ProtocolConfig(Settings):
    """How a model is adapted to a task and scored. All combinations of the lists are tried on train800 and val200."""

    name: str = setting(pattern="^[a-z0-9_]+$")
    """Name in results, as vit_paper"""
    image_size: int = setting(min=1, max=MAX_SIDE)
    """Side of the square input images in pixels"""
    small_image_size: Side = 0
    """image_size for tasks whose images have fewer than 96 x 96 pixels (BiT), for which augment.eval_resize is scaled
    with it; 0 is image_size.
    """
    small_resize_to: Side = setting(0, needs="small_image_size")
    """augment.resize_to for these tasks."""
    pixels: Literal["weights", "imagenet"] = "weights"
    """Pixel normalisation: [-1, 1], which our weights and converted ones expect (docs/weights.md); or ImageNet's mean
    and standard deviation.
    """
    augment: AugmentConfig = setting(AugmentConfig, needs="method=finetune")
    batch: Batch = setting(needs="method=finetune")
    """Samples per optimizer step"""
    length: list[PositiveLength] = setting(needs="method=finetune")
    """Training lengths to try, as [2500 steps, 10000 steps]"""
    optimizer: Literal["sgd", "adam"] = setting("sgd", needs="method=finetune")
    """SGD with momentum, or Adam with decoupled weight decay."""
    lr: list[PositiveFloat] = setting(needs="method=finetune")
    """Peak learning rates to try, as [0.1, 0.01]"""
    momentum: ShareBelow1 = setting(0.9, needs="optimizer=sgd")
    """SGD: momentum."""
    weight_decay: list[NonNegativeFloat] = setting([0.0], min_items=1, needs="method=finetune")
    """Weight decays of dense kernels to try; each is multiplied by the learning rate."""
    clip: NonNegativeFloat = setting(0.0, needs="method=finetune")
    """Clip gradients to this global norm; 0 turns clipping off."""
    dropout: ShareBelow1 = setting(0.0, needs="method=finetune")
    """Dropout (0.1 for L/16 and H/14 in the ViT paper's code)."""
    schedule: ScheduleConfig = setting(ScheduleConfig, needs="method=finetune")
    l2: list[PositiveFloat] = setting([16.0, 128.0, 1024.0, 8192.0, 65536.0], min_items=1, needs="method=linear")
    """method=linear: strengths of ridge regression on whitened features to try."""

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        if shares := [str(length) for length in self.length if length.unit == "%"]:
            raise UserError(
                f"protocol.length = {', '.join(shares)} must be in steps, epochs or samples: a share needs another"
                " length."
            )
        check_augment(self.augment, "protocol.augment.", "protocol.image_size", self.image_size)
        if 0 < self.small_resize_to < self.small_image_size:
            raise UserError(
                f"protocol.small_resize_to = {self.small_resize_to} is smaller than protocol.small_image_size ="
                f" {self.small_image_size}."
            )
        self.schedule.check_decay("protocol.schedule.")
        self.check_pairs("protocol.batch", self.batch)

    def check_pairs(self, name: str, batch: int) -> None:
        """Raise UserError for an odd batch if images are mixed in pairs. name: of the batch's setting."""
        if batch % 2 and self.augment.mixes_pairs:
            raise UserError(f"{name} = {batch} must be even: Mixup and CutMix mix images in pairs.")


class VtabConfig(Settings):
    """A sweep that scores weights on VTAB-1k's tasks by a protocol."""

    # Printed when it begins: as in a run, an override may turn off what the protocol's file configures, and a sweep
    # keeps its protocol.
    notes_without_effect = True

    weights: PathText
    """Weights: a run, a checkpoint, other projects', or OWNER/NAME on the Hugging Face hub (docs/weights.md)"""
    data: PathText = "datasets/vtab"
    """Folder of the tasks' data sets, made by launch/vtab_prepare.py"""
    out: PathText = setting("", output="folder", holds="experiment")
    """Folder of results; empty is <run>/vtab/<protocol>-<method>, <run>/vtab/<step>-... for one of its checkpoints, and
    runs/vtab/<weights>-... for others.
    """
    method: Literal["finetune", "linear"] = "finetune"
    """finetune: train all weights; linear (cheap): ridge regression on the features of the unchanged weights."""
    tasks: list[str] = []
    """Names of tasks; empty is all tasks whose data sets exist."""
    seeds: Seeds = setting([0], needs="method=finetune")
    """Seeds of sample order and augmentation; each gives a score. Settings are chosen with the first; linear does not
    depend on seeds.
    """
    protocol: ProtocolConfig = setting(ProtocolConfig)
    micro_batch: Batch = 64
    """Images per forward pass, with gradient accumulation over a batch. It affects the random numbers of dropout, so
    use one value in a sweep.
    """
    precision: Precision = "fp32"
    """Precision of activations; bf16 is autocast on GPUs, and weights stay fp32."""
    threads: Threads = 2
    """Decoding threads of a cell; without a GPU, also its computing threads and its number of CPUs."""
    gpu_share: PositiveShare = 1.0
    """Share of a GPU for each cell: 0.25 runs four on one GPU."""
    num_tasks: Tasks = 0
    """Number of cells that run at the same time; 0 is as many as fit."""
    mlflow: str = ""
    """MLflow tracking URI of the sweep (docs/vtab.md); none sends nothing. Empty is MLFLOW_TRACKING_URI, else
    sqlite:///mlflow.db in the folder of `out` (without out, in runs).
    """
    plan: bool = False
    """Only list the cells and their cost."""

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: plan only prints."""
        return ("out",) if self.plan else ()

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        self.protocol.check()
        self.protocol.check_pairs("micro_batch", self.micro_batch)
