"""Predicts a run before it is queued: steps, FLOPs, memory, checkpoints, and hours from a measured speed.

Everything is computed from the settings and the manifest; no GPU is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.data.loading.balance import describe_balance
from pipeline.data.mixture.run_data import open_run_data
from pipeline.data.mixture.split import MixedSplit
from pipeline.estimate.cluster import HEADROOM, Choice, Cluster, choose, lay_out
from pipeline.estimate.memory import Memory, checkpoint_bytes, most_images, rank_memory
from pipeline.estimate.plan import Plan, make_plan
from pipeline.model import Config
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.objectives.parameters.freeze import ENCODER
from pipeline.settings.commands.operate import PlanConfig


@dataclass(frozen=True)
class Data:
    """Size of the data: of all sets of a mixture. shards: 0 if it does not exist yet. epoch_samples: see `RunData`.

    notes: on the balance of classes, and on labels that are not used.
    """

    samples: int
    epoch_samples: int
    classes: int
    shards: int
    source: str
    notes: list[str] = field(default_factory=list)
    pixels: Pixels = RGB8


@dataclass(frozen=True)
class LayoutMemory:
    """Memory of one layout. largest: largest micro-batch that fits, None without a cluster."""

    zero_stage: int
    activation_checkpointing: bool
    memory: Memory
    largest: int | None


@dataclass(frozen=True)
class Forecast:
    """All figures of a run, in bytes and FLOPs."""

    config: PlanConfig
    cluster: Cluster | None
    data: Data
    model: Config
    plan: Plan
    layouts: list[LayoutMemory]
    choice: Choice | None  # None without a cluster

    @property
    def flops_per_image(self) -> int:
        return objectives.training_flops(self.config, self.model)

    @property
    def flops(self) -> float:
        return self.flops_per_image * float(self.plan.steps) * self.plan.global_batch

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.model, self.config)

    @property
    def kept_for_good(self) -> int:
        """Checkpoints by keep_every, which nothing removes."""
        return sum(due.keep for due in self.plan.saves)

    @property
    def disk_bytes(self) -> int:
        """Most bytes of checkpoints that exist at a time, with one that is being written."""
        kept = self.config.checkpoint.keep + self.kept_for_good + bool(self.plan.best_from)
        return min(len(self.plan.saves), kept + 1) * self.checkpoint_bytes

    @property
    def hours(self) -> float | None:
        """Hours of training at the measured speed of a GPU, without evaluation; None without a measured speed."""
        if self.cluster is None or not self.config.measured:
            return None
        speed = self.config.measured * self.cluster.num_gpus
        return self.plan.steps * self.plan.global_batch / speed / 3600


def make_forecast(config: PlanConfig) -> Forecast:
    """Compute all figures. Raises UserError for an impossible batch, length or cluster."""
    cluster = Cluster.parse(config.cluster) if config.cluster else None
    config, data, names = _data(config)
    model = _model(config, data.classes, names, data.pixels)
    num_gpus = cluster.num_gpus if cluster else 1
    plan = make_plan(config, data.epoch_samples, num_gpus)
    plan = plan.measuring(objectives.metrics(config), objectives.measures_held_out(config))
    plan = replace(plan, best_from=objectives.best_from(config, data.classes))
    layouts = []
    for checkpointing in (False, True):
        for stage in config.zero_stages:
            trial = lay_out(config, stage, checkpointing)
            memory = rank_memory(model, trial, plan.micro_batch, plan.accumulation, num_gpus)
            largest = most_images(trial, model, 2, num_gpus, HEADROOM * cluster.gpu.memory) if cluster else None
            layouts.append(LayoutMemory(stage, checkpointing, memory, largest))
    choice = choose(config, model, cluster) if cluster else None
    return Forecast(config, cluster, data, model, plan, layouts, choice)


def _data(config: PlanConfig) -> tuple[PlanConfig, Data, Sequence[str]]:
    """Returns (the settings, with an empty data.eval_split if there is no held-out split; the data; names of the
    classes, if known).
    """
    if config.samples:
        return config, Data(config.samples, config.samples, config.classes, 0, "given in the settings"), ()
    try:
        found = open_run_data(config.data, config.seed, config.train.global_batch, config.labels)
    except UserError as error:
        raise UserError(f"{error} Or plan without it: samples=14.2e6 classes=21841.") from None
    split = found.split
    config = replace(config, data=replace(config.data, eval_split=found.eval_split))
    used = int(np.count_nonzero(split.shard_sizes))
    balance = describe_balance(split.parts[0], found.own.classes, config.data.balance)
    notes = [*([balance] if balance else []), *found.notes()]
    source = f"manifest of {config.data.path}"
    if isinstance(split, MixedSplit):
        source = f"manifests; {split.describe()}"
    data = Data(
        len(split),
        found.epoch_samples,
        found.dataset.num_classes,
        used,
        source,
        notes,
        split.pixels,
    )
    return config, data, found.dataset.classes


def _model(config: PlanConfig, num_classes: int, names: Sequence[str], pixels: Pixels = RGB8) -> Config:
    """Returns the architecture: from the settings, from `variant`, or from init.weights."""
    objectives.check(config, num_classes, names)
    objectives.check_pixels(config, pixels)
    if not config.init.weights:
        return objectives.new_backbone(config, num_classes, pixels)
    if config.variant:
        plain: dict[str, Any] = {"name": config.variant, "representation": False}
        if config.train.freeze == ENCODER and not config.init.attentive_pool:
            plain["pool"] = "map"  # Only weights with such a pool, as SigLIP's, can be trained so.
        named = replace(config.model, **plain)
        found = objectives.new_backbone(replace(config, model=named), num_classes, pixels, covered=False)
    else:
        try:
            found = models.read_weights(weights_path(config.init.weights, config.track.uri, out=config.out)).config
        except UserError as error:
            raise UserError(f"{error} Or plan without them: variant=ViT-L/16.") from None
    return models.adapted(found, config.init.weights, **objectives.adaptation(config, num_classes, pixels))
