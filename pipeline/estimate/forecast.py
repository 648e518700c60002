"""Predicts a run before it is queued, as launch/plan.py prints it: steps, FLOPs, memory, checkpoints, hours from a
measured speed, and the best layout on a cluster (ZeRO stage, micro-batch, accumulation, activation checkpointing).

Everything is computed from the settings and the manifest; no GPU is needed.
"""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.objectives import OBJECTIVES
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.progress import duration
from pipeline.base.words import aligned, counted, of_classes, si, significant
from pipeline.data.mixture.run_data import open_run_data
from pipeline.estimate.memory import (
    Memory,
    checkpoint_bytes,
    largest_micro_batch,
    most_images,
    rank_memory,
    refuse_too_large,
)
from pipeline.estimate.plan import Plan, make_plan
from pipeline.model import Config, ViTConfig
from pipeline.monitor.gpus import Gpu, find_gpu, known_gpus
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import EngineConfig, RunConfig

# Largest share of a GPU's nominal memory that a layout may fill: the prediction may be off by 10 %.
HEADROOM = 0.9
# Tokens per forward pass that keep a large GPU busy. A rule of thumb, not measured.
_BUSY_TOKENS = 4096
_GIB = 2**30


# ---------------------------------------------------------------------- layout on a cluster
@dataclass(frozen=True)
class Cluster:
    """nodes x gpus_per_node GPUs of one kind."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Parse "8x8xH100-80GB", 8 nodes of 8 GPUs. Raises UserError for anything else."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x(.+)", text)
        if match is None:
            raise UserError(f"cluster = {text}: write nodes x GPUs x kind, as 8x8xH100-80GB or 1x4xA100-40GB.")
        gpu = find_gpu(match[3])
        if gpu is None:
            raise UserError(f"cluster = {text}: {match[3]!r} is not a known GPU. Known: {known_gpus()}.")
        return cls(int(match[1]), int(match[2]), gpu)

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class EngineLayout:
    """A layout. memory: of a rank at its peak. micro_batch: the chosen one, or the largest that fits; None without a
    cluster.
    """

    engine: EngineConfig
    memory: Memory
    micro_batch: int | None

    @property
    def overrides(self) -> list[str]:
        return [
            f"engine.zero_stage={self.engine.zero_stage}",
            f"engine.activation_checkpointing={str(self.engine.activation_checkpointing).lower()}",
            f"train.micro_batch={self.micro_batch}",
        ]


def choose(config: RunConfig, model: Config, cluster: Cluster) -> EngineLayout:
    """Choose the layout that should train fastest. Raises UserError if none fits.

    Prefers no recomputation, then the lowest stage, then the largest micro-batch, among layouts that fill at most
    `HEADROOM` of the memory with a micro-batch that keeps a GPU busy. If there are none, the largest micro-batch
    decides.
    """
    world_size = cluster.num_gpus
    share = config.train.global_batch // world_size
    limit = HEADROOM * cluster.gpu.memory
    smallest = share if OBJECTIVES[config.train.loss].of_whole_batch else 1
    busy = max(smallest, min(share, math.ceil(_BUSY_TOKENS / _places(model))))
    layouts = [layout for layout in layouts_of(config) if layout.engine.zero_stage]
    largest, chosen = 0, layouts[-1]
    for layout in layouts:
        micro_batch = largest_micro_batch(layout, model, share, world_size, limit)
        if micro_batch > largest:
            largest, chosen = micro_batch, layout
        if micro_batch >= busy:
            break
    if largest < smallest:
        raise UserError(
            f"this model does not fit {world_size} x {cluster.gpu.kind}: even with"
            f" engine.zero_stage={config.zero_stages[-1]}, engine.activation_checkpointing=true and"
            f" train.micro_batch={smallest} a rank needs more than {limit / _GIB:.1f} GiB. Use more or larger GPUs,"
            " or a smaller model.image_size."
        )
    memory = rank_memory(model, chosen, largest, share // largest, world_size)
    return EngineLayout(chosen.engine, memory, largest)


def layouts_of(config: RunConfig) -> list[RunConfig]:
    """The same run at each ZeRO stage that fits it, without and with activation checkpointing."""
    return [
        replace(config, engine=replace(config.engine, zero_stage=stage, activation_checkpointing=again))
        for again in (False, True)
        for stage in config.zero_stages
    ]


def _places(model: Config) -> int:
    """Positions per image that are computed in parallel: a ViT's tokens, or places of a ResNet's feature map at stride
    16.
    """
    return model.num_tokens if isinstance(model, ViTConfig) else model.image_size[0] * model.image_size[1] // 16**2


# ---------------------------------------------------------------------- the figures
@dataclass(frozen=True)
class Data:
    """Size of the data: of all sets of a mixture. epoch_samples: see `RunData`.

    notes: on the splits, and on labels that are not used.
    """

    samples: int
    epoch_samples: int
    classes: int
    notes: list[str] = field(default_factory=list)
    pixels: Pixels = RGB8


@dataclass(frozen=True)
class Forecast:
    """All figures of a run, in bytes and FLOPs."""

    config: PlanConfig
    cluster: Cluster | None
    data: Data
    model: Config
    plan: Plan
    layouts: list[EngineLayout]
    choice: EngineLayout | None  # None without a cluster

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
    def kept(self) -> int:
        """Most checkpoints that exist at a time, beside one that is being written."""
        plan = self.plan
        for_good = plan.steps // plan.keep_every if plan.keep_every else 0
        return self.config.checkpoint.keep + for_good + bool(plan.best_from)

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
    plan = make_plan(config, data.epoch_samples, num_gpus).measuring(config, data.classes)
    layouts = []
    for trial in layouts_of(config):
        memory = rank_memory(model, trial, plan.micro_batch, plan.accumulation, num_gpus)
        largest = most_images(trial, model, 2, num_gpus, HEADROOM * cluster.gpu.memory) if cluster else None
        layouts.append(EngineLayout(trial.engine, memory, largest))
    choice = choose(config, model, cluster) if cluster else None
    return Forecast(config, cluster, data, model, plan, layouts, choice)


def _data(config: PlanConfig) -> tuple[PlanConfig, Data, Sequence[str]]:
    """Returns (the settings, with an empty data.eval_split if there is no held-out split; the data; names of the
    classes, if known).
    """
    if config.samples:
        return config, Data(config.samples, config.samples, config.classes), ()
    found = open_run_data(config.data, config.seed, config.labels)
    split = found.split
    config = replace(config, data=replace(config.data, eval_split=found.eval_split, targets=found.targets))
    classes = found.dataset.num_classes
    data = Data(len(split), found.epoch_samples, classes, found.notes(), split.pixels)
    return config, data, found.dataset.classes


def _model(config: PlanConfig, num_classes: int, names: Sequence[str], pixels: Pixels = RGB8) -> Config:
    """Returns the architecture: from the settings, or from init.weights."""
    objectives.check(config, num_classes, names)
    objectives.check_pixels(config, pixels)
    if not config.init.weights:
        return objectives.new_backbone(config, num_classes, pixels)
    found = models.read_weights(weights_path(config.init.weights, config.track.uri, out=config.out)).config
    return models.adapted(found, config.init.weights, **objectives.adaptation(config, num_classes, pixels))


# ---------------------------------------------------------------------- as text
def run(config: PlanConfig) -> Forecast:
    """Print the forecast of a run. Raises UserError for what training would refuse; memory errors follow the output."""
    forecast = make_forecast(config)
    print("\n".join(describe(forecast)))
    sys.stdout.flush()
    if forecast.cluster:
        refuse_too_large(config, forecast.plan, forecast.model, forecast.cluster.gpu.memory)
    return forecast


def describe(forecast: Forecast) -> list[str]:
    """The forecast as lines of text."""
    model, plan, config, data = forecast.model, forecast.plan, forecast.config, forecast.data
    name = config.model.name or config.init.weights
    notes = [*data.notes, *objectives.without_effect(config)]
    time = "needs cluster=... and measured=..., the images/s of one GPU in launch/bench.py gpu or in a short run"
    if forecast.hours is not None and forecast.cluster:
        gpu_hours = significant(forecast.hours * forecast.cluster.num_gpus)
        time = f"{duration(3600 * forecast.hours)} = {gpu_hours} GPU hours at the measured speed, without evaluation"
    parameters = significant(models.num_parameters(model) / 1e6)
    advice = []
    if choice := forecast.choice:
        needed = f"Advice for {config.cluster}: {choice.memory.total / _GIB:.1f} GiB a rank"
        advice = [needed, f"  {' '.join(choice.overrides)}", ""]
    return [
        (
            f"{config.name}: {name} at {ImageSize.parse(model.image_size)} px, {parameters} M parameters,"
            f" {config.engine.precision}"
        ),
        *filter(None, notes),
        "",
        f"  data         {counted(data.samples, 'sample')} {of_classes(data.classes)}",
        f"  plan         {plan.describe()}",
        (f"  arithmetic   {si(forecast.flops_per_image, 'FLOP')} per image, {si(forecast.flops, 'FLOP')} in total"),
        f"  checkpoint   {si(forecast.checkpoint_bytes, 'B')}, of which {forecast.kept + 1:,} need room on the disk",
        f"  time         {time}",
        "",
        *_describe_memory(forecast),
        *advice,
        "Predicted, not measured: memory counts tensors, without the CUDA context and NCCL.",
    ]


def _describe_memory(forecast: Forecast) -> list[str]:
    cluster = forecast.cluster
    limit = cluster.gpu.memory if cluster else math.inf
    rows = [["ZeRO", "checkpointing", *Memory._fields[1:], "peak", "peak at", f"micro_batch for {HEADROOM:.0%}"]]
    for layout in forecast.layouts:
        m, engine = layout.memory, layout.engine
        rows.append(
            [
                f"{'*' if engine == forecast.config.engine else ' '} {engine.zero_stage}",
                "yes" if engine.activation_checkpointing else "no",
                *(f"{part / _GIB:.2f}" for part in m[1:]),
                f"{m.total / _GIB:.2f}{' !' if m.total > limit else ''}",
                m.when,
                "-" if layout.micro_batch is None else str(layout.micro_batch),
            ]
        )
    return [
        f"Peak memory of a rank in GiB, at micro_batch {forecast.plan.micro_batch} (* as configured, ! too large)",
        *(f"  {line}" for line in aligned(rows, 0)),
        "",
    ]
