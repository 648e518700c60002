"""The settings of transfer to many tasks: a protocol, and a sweep by it. As in `run.py`, every field is explained.

A protocol is all that makes two scores on VTAB-1k comparable; `configs/vtab/` has the published ones.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import UserError
from pipeline.json_record import quoted
from pipeline.settings.quantities import MAX_SIDE, Length
from pipeline.settings.run import MAX_BATCH, MAX_SEED, MAX_THREADS, AugmentConfig, Precision, ScheduleConfig
from pipeline.settings.schema import REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class ProtocolConfig:
    """How a model is adapted to a task and scored. Lists are tried, each with each, on train800 and val200."""

    name: str = setting(REQUIRED, "What results call it, as vit_paper: lower-case letters, digits and _")
    image_size: int = setting(REQUIRED, "Side in pixels of the square images the model sees", most=MAX_SIDE)
    small_image_size: int = setting(
        0, "The same for tasks whose images have fewer than 96 x 96 pixels (BiT); 0 is image_size.", most=MAX_SIDE
    )
    small_resize_to: int = setting(0, "Of these tasks: augment.resize_to.", most=MAX_SIDE)
    pixels: Literal["weights", "imagenet"] = setting(
        "weights",
        "What the model reads: [-1, 1], as our weights and those that were folded to it (docs/weights.md); or less ImageNet's "
        "mean, over its deviation.",
    )
    augment: AugmentConfig = setting(AugmentConfig, "")
    batch: int = setting(REQUIRED, "Samples of an optimizer step", most=MAX_BATCH)
    length: list[Length] = setting(REQUIRED, "Lengths tried, as [2500 steps, 10000 steps]")
    optimizer: Literal["sgd", "adam"] = setting("sgd", "SGD with momentum, or Adam with decoupled weight decay.")
    lr: list[float] = setting(REQUIRED, "Peak learning rates tried, as [0.1, 0.01]")
    momentum: float = setting(0.9, "SGD: momentum.")
    weight_decay: list[float] = setting([0.0], "Weight decays tried: of dense kernels, times the learning rate.")
    clip: float = setting(0.0, "Largest global gradient norm; 0 is no clipping.")
    dropout: float = setting(0.0, "Dropout while it is adapted (the ViT paper's code: 0.1 for L/16 and H/14).")
    schedule: ScheduleConfig = setting(ScheduleConfig, "")
    l2: list[float] = setting(
        [16.0, 128.0, 1024.0, 8192.0, 65536.0], "method=linear: strengths tried of the ridge on whitened features."
    )
    neighbours: list[int] = setting([1, 5, 20], "method=knn: numbers of neighbours tried.")
    temperature: float = setting(0.07, "method=knn: a neighbour's vote is exp(cosine / temperature).")

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            raise UserError(f"protocol.name = {quoted(self.name)} must be of lower-case letters, digits and _.")
        tried: dict[str, Sequence[float]] = {"lr": self.lr, "length": [length.amount for length in self.length], "l2": self.l2, "neighbours": self.neighbours,
                 "image_size": [self.image_size], "batch": [self.batch], "temperature": [self.temperature]}  # fmt: skip
        for name, values in tried.items():
            if not values or min(values) <= 0:
                raise UserError(f"protocol.{name} must be greater than 0, and there must be one: {quoted(values)}.")
        not_negative = {"weight_decay": min(self.weight_decay, default=-1.0), "clip": self.clip, "small_image_size": self.small_image_size,
                        "small_resize_to": self.small_resize_to}  # fmt: skip
        for name, value in not_negative.items():
            if value < 0:
                raise UserError(f"protocol.{name} = {value} must not be negative (of weight decays there must be one).")
        for name, value in {"momentum": self.momentum, "dropout": self.dropout}.items():
            if not 0 <= value < 1:
                raise UserError(f"protocol.{name} = {value} must be at least 0 and below 1.")
        if any(length.unit == "%" for length in self.length):
            raise UserError("protocol.length must be in steps, epochs or samples: a share has no whole here.")
        for name, side, size in (
            ("augment.resize_to", self.augment.resize_to, self.image_size),
            ("augment.eval_resize", self.augment.eval_resize, self.image_size),
            ("small_resize_to", self.small_resize_to, self.small_image_size),
        ):
            if 0 < side < size:
                raise UserError(f"protocol.{name} = {side} is smaller than the image of {size} pixels.")
        drops = self.schedule.drops
        if (self.schedule.decay == "drops") != bool(drops) or not all(0 < drop < 1 for drop in drops):
            raise UserError(
                f"protocol.schedule.decay = {self.schedule.decay} with drops = {quoted(drops)}: decay=drops needs shares of the run "
                "between 0 and 1, as [0.3,0.6,0.9], and no other decay takes any."
            )
        if self.batch % 2 and (self.augment.mixup or self.augment.cutmix):
            raise UserError(f"protocol.batch = {self.batch} must be even: Mixup and CutMix mix images in pairs.")


@dataclass(frozen=True, kw_only=True)
class VtabConfig:
    """Scores of weights on VTAB-1k's tasks by a protocol."""

    weights: str = setting(REQUIRED, "Weights: a run, a checkpoint, our .pt, or those of others (docs/weights.md)")
    data: str = setting("datasets/vtab", "Folder of the tasks' data sets, made by launch/vtab_prepare.py")
    out: str = setting(
        "", "Folder of cells and results; empty is <run>/vtab/<protocol>-<method>, or runs/vtab/...", output="folder"
    )
    method: Literal["finetune", "linear", "knn"] = setting(
        "finetune",
        "All weights are trained; or, cheap, the features of the weights as they are: ridge regression, nearest neighbours.",
    )
    tasks: list[str] = setting(list, "Names of tasks; empty is all whose data sets are there.")
    seeds: list[int] = setting(
        [0],
        "Of order and augmentation: a score for each. Settings are chosen with the first; linear and knn need none.",
        most=MAX_SEED,
    )
    protocol: ProtocolConfig = setting(ProtocolConfig, "")
    pretrained_on: str = setting(
        "", "Data set that the weights were trained on: how many copies of test images launch/dedup.py marked in it."
    )
    micro_batch: int = setting(
        64,
        "Images per forward pass; a batch's gradient is summed over these. Dropout is drawn for each, so a sweep keeps to one.",
        most=MAX_BATCH,
    )
    precision: Precision = setting("fp32", "Of the arithmetic; bf16 is autocast on GPUs, and weights stay fp32.")
    threads: int = setting(
        2, "Decoding threads of a cell; on a CPU, its computing threads and CPUs too.", most=MAX_THREADS
    )
    gpu_share: float = setting(1.0, "Of a GPU for each cell, on a cluster with GPUs: 0.25 runs four on one.")
    num_tasks: int = setting(0, "Cells at the same time; 0 is as many as there is room for.", most=1_000_000)
    plan: bool = setting(False, "Only list the cells and what they cost.")

    def not_written(self) -> tuple[str, ...]:
        """Outputs that are not tried: --plan only prints."""
        return ("out",) if self.plan else ()

    def check(self) -> None:
        """Refuse what cannot work. Raises UserError."""
        self.protocol.check()
        for name in ("micro_batch", "threads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} must be at least 1.")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds = {quoted(self.seeds)} must be different numbers of 0 and more.")
        if not 0 < self.gpu_share <= 1:
            raise UserError(f"gpu_share = {self.gpu_share} must be above 0 and at most 1.")
        if self.num_tasks < 0:
            raise UserError(f"num_tasks = {self.num_tasks} must not be negative.")
        if self.micro_batch % 2 and (self.protocol.augment.mixup or self.protocol.augment.cutmix):
            raise UserError(f"micro_batch = {self.micro_batch} must be even: Mixup and CutMix mix images in pairs.")
