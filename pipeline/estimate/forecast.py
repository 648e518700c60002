"""Predicts a run before it is queued: steps, FLOPs, memory, time on 1 to 128 nodes, checkpoints, data reading, cost.

Everything is computed from the settings and the manifest; nothing is measured, and no GPU is needed.
"""

import bisect
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.dataset.subset import run_splits
from pipeline.data.storage.atomic import replacing
from pipeline.estimate.cluster import HEADROOM, Choice, Cluster, choose, lay_out
from pipeline.estimate.measured import Measured, measured_mfu, read_measured
from pipeline.estimate.memory import Memory, checkpoint_bytes, copied_bytes, rank_memory, refuse_too_large
from pipeline.estimate.network import Network, find_network
from pipeline.estimate.plan import Plan, make_plan, overrides_of_name
from pipeline.estimate.scaling import ScalingRow, advice, scaling
from pipeline.estimate.step_time import StepTime, is_predictable, step_time
from pipeline.model import Config, ViTConfig
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.settings.operate import PlanConfig
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

_GIB = 2**30
_MAX_IMAGES = 10**6
_COLUMNS = ("weights", "optimizer", "gradients", "activations", "inputs", "buffers")


@dataclass(frozen=True)
class Data:
    """Size of the data set. shards, bytes: 0 if it does not exist yet."""

    samples: int
    classes: int
    shards: int
    bytes: int
    source: str


@dataclass(frozen=True)
class LayoutMemory:
    """Memory of one layout. micro_batch: as planned. largest: largest micro-batch that fits, None without a cluster."""

    zero_stage: int
    activation_checkpointing: bool
    micro_batch: int
    memory: Memory
    largest: int | None


@dataclass(frozen=True)
class Forecast:
    """All figures of a run, in bytes, seconds and FLOPs. Without a cluster, network, time, hours and cost are None."""

    config: PlanConfig
    cluster: Cluster | None
    data: Data
    model: Config
    plan: Plan
    layouts: list[LayoutMemory]
    choice: Choice | None
    planned: PlanConfig  # the run as chosen, or as configured when there is nothing to choose for
    network: Network | None
    time: StepTime | None  # also None if the speed of a GPU is not known
    scaling: list[ScalingRow]
    measured: Measured | None  # with config.bench

    @property
    def flops_per_image(self) -> int:
        return models.training_flops_per_image(self.model)

    @property
    def flops(self) -> float:
        return self.flops_per_image * float(self.plan.steps) * self.plan.global_batch

    @property
    def step_seconds(self) -> float | None:
        """Duration of an optimizer step in the advised layout."""
        return self.time.total if self.time else None

    @property
    def mfu(self) -> float | None:
        """The MFU that follows from step_seconds."""
        if self.time is None or self.cluster is None or not self.peak:
            return None
        return self.flops_per_image * self.plan.global_batch / (self.time.total * self.cluster.num_gpus * self.peak)

    @property
    def peak(self) -> float:
        """Peak FLOP/s of a GPU; 0 if it is not known."""
        config = self.config.engine
        assert self.cluster
        return 1e12 * (config.peak_tflops or (self.cluster.gpu.tflops if config.precision != "fp32" else 0.0))

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.model, self.planned)

    @property
    def num_checkpoints(self) -> int:
        return math.ceil(self.plan.steps / self.plan.checkpoint_every)

    @property
    def write_seconds(self) -> float:
        """Duration of writing a checkpoint, while training continues."""
        return self.checkpoint_bytes / (self.config.save_rate * 1e9)

    @property
    def stall_seconds(self) -> float:
        """Time that training waits per checkpoint: for the copy to host memory, and for an unfinished previous checkpoint."""
        return self._stall(self.planned, self.plan.world_size, self.step_seconds or math.inf)

    @property
    def hours(self) -> float | None:
        """Hours of training, including waiting for checkpoints, without evaluation."""
        if self.time is None:
            return None
        return self.hours_of(self.planned, self.plan.world_size, self.time.total)

    @property
    def cost(self) -> float | None:
        """Cost of all GPUs for all hours; None without a price."""
        hours = self.hours
        if hours is None or self.cluster is None or not self.config.price:
            return None
        return hours * self.cluster.num_gpus * self.config.price

    def hours_of(self, planned: PlanConfig, ranks: int, step_seconds: float) -> float:
        """As `hours`, of the run in another layout on another number of ranks."""
        stall = self._stall(planned, ranks, step_seconds)
        return (self.plan.steps * step_seconds + self.num_checkpoints * stall) / 3600

    def _stall(self, planned: PlanConfig, ranks: int, step_seconds: float) -> float:
        copying = copied_bytes(self.model, planned, ranks) / (self.config.copy_rate * 1e9)
        return copying + max(0.0, self.write_seconds - self.plan.checkpoint_every * step_seconds)


def run(config: PlanConfig) -> Forecast:
    """Print the forecast of a run. Raises UserError for what training would refuse; memory errors follow the output."""
    forecast = make_forecast(config)
    if config.json:
        text = json.dumps(to_dict(forecast), indent=1)
        if config.json == "-":
            print(text)
        else:
            with replacing(Path(config.json)) as file:
                file.write(as_bytes(text))
    if config.json != "-":
        print("\n".join(describe(forecast)))
        sys.stdout.flush()
    if forecast.cluster:
        refuse_too_large(config, forecast.plan, forecast.model, forecast.cluster.gpu.memory)
    return forecast


def make_forecast(config: PlanConfig) -> Forecast:
    """Compute all figures. Raises UserError for an impossible batch, length or cluster."""
    cluster = Cluster.parse(config.cluster) if config.cluster else None
    data = _data(config)
    model = _model(config, data.classes)
    measured = read_measured(config, model, cluster) if cluster and config.bench else None
    if cluster and measured:
        config = replace(config, mfu=measured_mfu(config, model, cluster, measured))
    num_gpus = cluster.num_gpus if cluster else 1
    plan = make_plan(config, data.samples, num_gpus)
    stages = (1, 2, 3) if config.engine.precision != "fp32" else (0, 1, 2, 3)
    layouts = []
    for checkpointing in (False, True):
        for stage in stages:
            trial = lay_out(config, stage, checkpointing)
            memory = rank_memory(model, trial, plan.micro_batch, plan.accumulation, num_gpus)
            largest = _most_images(trial, model, num_gpus, HEADROOM * cluster.gpu.memory) if cluster else None
            layouts.append(LayoutMemory(stage, checkpointing, plan.micro_batch, memory, largest))
    choice = choose(config, model, cluster) if cluster else None
    planned = config
    network = find_network(config.network, cluster.gpu, config.link) if cluster else None
    time, rows = None, []
    if choice:
        chosen = lay_out(config, choice.zero_stage, choice.activation_checkpointing)
        planned = replace(config, engine=chosen.engine, train=replace(config.train, micro_batch=choice.micro_batch))
        advised = make_plan(planned, data.samples, num_gpus)  # Raises if training would refuse the advice.
    if cluster and network and is_predictable(config):
        time = step_time(
            planned,
            model,
            cluster.gpu,
            network,
            cluster.nodes,
            cluster.gpus_per_node,
            advised.micro_batch,
            advised.accumulation,
        )
        rows = scaling(config, model, cluster, network)
    return Forecast(config, cluster, data, model, plan, layouts, choice, planned, network, time, rows, measured)


def _most_images(config: RunConfig, model: Config, world_size: int, limit: float) -> int:
    """Returns the largest micro-batch of any size that fits `limit` bytes with gradient accumulation."""

    def too_many(images: int) -> bool:
        return rank_memory(model, config, images, 2, world_size).total > limit

    return bisect.bisect_left(range(1, _MAX_IMAGES), True, key=too_many)


def _data(config: PlanConfig) -> Data:
    if config.samples:
        return Data(config.samples, config.classes, 0, 0, "given in the settings")
    try:
        dataset = open_dataset(config.data.path)
    except UserError as error:
        raise UserError(f"{error} Or plan without it: samples=14.2e6 classes=21841.") from None
    split, _ = run_splits(dataset, config.data, config.seed)
    used = int(np.count_nonzero(split.shard_sizes))
    return Data(len(split), dataset.num_classes, used, int(split.shard_bytes.sum()), f"manifest of {config.data.path}")


def _model(config: PlanConfig, num_classes: int) -> Config:
    """Returns the architecture: from the settings, from `variant`, or from init.weights."""
    objectives.check(config)
    if not config.init.weights:
        return objectives.new_backbone(config, num_classes)
    if config.variant:
        named = replace(config.model, name=config.variant, representation=False)
        return objectives.new_backbone(replace(config, model=named), num_classes, covered=False)
    try:
        found = models.read_weights(weights_path(config.init.weights, config.track.uri))[0]
    except UserError as error:
        raise UserError(f"{error} Or plan without them: variant=ViT-L/16.") from None
    changes: dict[str, Any] = {"image_size": config.model.image_size}
    if config.init.new_head:
        changes["num_classes"] = num_classes
    if isinstance(found, ViTConfig):
        changes |= {"dropout": config.model.dropout, "drop_path": config.model.drop_path}
        changes |= {"representation": False} if config.init.new_head else {}
    return replace(found, **changes)


def describe(forecast: Forecast) -> list[str]:
    """The forecast as lines of text."""
    return [
        *_describe_run(forecast),
        *_describe_memory(forecast),
        *_describe_time(forecast),
        *_describe_readers(forecast),
        *_describe_choice(forecast),
    ]


def _describe_run(forecast: Forecast) -> list[str]:
    model, plan, config, data = forecast.model, forecast.plan, forecast.config, forecast.data
    name = config.model.name or config.variant or config.init.weights
    tokens = f"{counted(model.num_tokens, 'token')}, " if isinstance(model, ViTConfig) else ""
    return [
        f"{config.name}: {name} at {ImageSize.parse(model.image_size)} px, {models.num_parameters(model) / 1e6:.1f} M parameters, "
        f"{tokens}{config.engine.precision}",
        *filter(None, [overrides_of_name(config.model)]),
        "",
        f"  data         {counted(data.samples, 'sample')} of {counted(data.classes, 'class')} ({data.source})",
        f"  length       {counted(plan.steps, 'step')} = {plan.epochs:.1f} epochs; warm-up {plan.warmup:,}, "
        f"evaluation every {plan.eval_every:,}",
        f"  batch        {plan.global_batch:,} = {counted(plan.world_size, 'rank')} x {plan.accumulation} x {plan.micro_batch} as configured",
        f"  arithmetic   {forecast.flops_per_image / 1e9:.1f} GFLOP per image, "
        f"{forecast.flops_per_image * plan.global_batch / 1e15:.2f} PFLOP per step, {forecast.flops / 1e18:,.4g} exaFLOP in total",
        "",
    ]


def _describe_memory(forecast: Forecast) -> list[str]:
    cluster, config = forecast.cluster, forecast.config
    limit = f"; a GPU has {cluster.gpu.memory / _GIB:.1f}" if cluster else ""
    titles = ["ZeRO", "checkpointing", *_COLUMNS, "peak", "peak at", f"micro_batch for {HEADROOM:.0%}"]
    rows = []
    for layout in forecast.layouts:
        m = layout.memory
        is_configured = (layout.zero_stage, layout.activation_checkpointing) == (
            config.engine.zero_stage, config.engine.activation_checkpointing,
        )  # fmt: skip
        too_large = cluster is not None and m.total > cluster.gpu.memory
        rows.append([
            f"{'*' if is_configured else ' '} {layout.zero_stage}",
            "yes" if layout.activation_checkpointing else "no",
            *(f"{getattr(m, column) / _GIB:.2f}" for column in _COLUMNS),
            f"{m.total / _GIB:.2f}{' !' if too_large else ''}",
            m.when,
            "-" if layout.largest is None else str(layout.largest or "none"),
        ])  # fmt: skip
    if not cluster:
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    return [
        f"Peak memory of a rank in GiB, at micro_batch {forecast.plan.micro_batch} (* as configured, "
        f"! too large{limit})",
        *_table(titles, rows),
        "",
    ]


def _describe_time(forecast: Forecast) -> list[str]:
    config, cluster, plan, network = forecast.config, forecast.cluster, forecast.plan, forecast.network
    time, hours = forecast.time, forecast.hours
    every = f"every {counted(plan.checkpoint_every, 'step')}"
    lines = [f"  checkpoint   {forecast.checkpoint_bytes / _GIB:.2f} GiB {every}, {config.checkpoint.keep} kept"]
    if cluster is None or network is None:
        return ["Time and cost: give --cluster (8x8xH100-80GB)", *lines, ""]
    if time is None or hours is None:
        return ["Time and cost: fp32 peaks are not in the table: give engine.peak_tflops", *lines, ""]
    rate = plan.global_batch / time.total
    interval = plan.checkpoint_every * time.total
    stall = forecast.stall_seconds
    gpu_hours = hours * cluster.num_gpus
    cost = f", {forecast.cost:,.0f} at {config.price:g} per hour" if forecast.cost else " (price=... for the cost)"
    mfu = f", MFU {forecast.mfu:.0%} of {forecast.peak / 1e12:,.0f} TFLOP/s" if forecast.mfu else ""
    return [
        "Time and cost as advised below",
        f"  one GPU      {forecast.measured or _speed_of_a_gpu(config)}",
        f"  network      {network.name}: {network.link / 1e9:,.0f} GB/s between GPUs, {network.cards / 1e9:,.0f} GB/s between nodes "
        f"({network.source})",
        f"  step         {time.total:.3f} s = {time.compute:.3f} forward and backward + {time.exposed:.3f} waiting for communication "
        f"+ {time.optimizer:.3f} optimizer",
        f"  speed        {rate:,.0f} images/s, {rate / cluster.num_gpus:,.0f} per GPU{mfu}",
        *lines,
        f"  stall        {stall:.2f} s per checkpoint at {config.copy_rate:g} GB/s: {stall / (interval + stall):.1%} of the time",
        f"  saved        {forecast.write_seconds:.0f} s later at {config.save_rate:g} GB/s; a crash loses "
        f"{(interval + forecast.write_seconds) / 60:.1f} minutes at most",
        f"  in total     {hours:,.1f} hours = {gpu_hours:,.0f} GPU hours{cost}; evaluation not included",
        "",
        *_describe_scaling(forecast),
    ]


def _speed_of_a_gpu(config: PlanConfig) -> str:
    if config.measured:
        return f"{config.measured:,.0f} images/s measured (measured=...), optimizer added"
    measure = "not measured (bench=FILE of launch/bench.py gpu, or measured=... images/s of one GPU)"
    if config.mfu:
        return f"{measure}; an MFU of {config.mfu:.0%} is given"
    return f"{measure}; kernels are assumed to reach {config.efficiency:.0%} of the data sheet (efficiency=...)"


def _describe_scaling(forecast: Forecast) -> list[str]:
    """The run on other numbers of nodes, with the same global batch."""
    config = forecast.config
    titles = [
        "nodes",
        "GPUs",
        "ZeRO",
        "images a GPU",
        "step s",
        "compute",
        "communication",
        "optimizer",
        "images/s",
        "efficiency",
    ]
    titles += ["hours", *(["cost"] if config.price else [])]
    rows = []
    for row in forecast.scaling:
        mark = "*" if forecast.cluster and row.nodes == forecast.cluster.nodes else " "
        if row.time is None:
            cells = [f"{mark} {row.nodes}", f"{row.num_gpus:,}", "-", row.why]
            rows.append(cells + ["-"] * (len(titles) - len(cells)))
            continue
        chosen = lay_out(config, row.zero_stage, row.activation_checkpointing)
        hours = forecast.hours_of(chosen, row.num_gpus, row.time.total)
        rows.append([
            f"{mark} {row.nodes}",
            f"{row.num_gpus:,}",
            f"{row.zero_stage}{' ckpt' if row.activation_checkpointing else ''}",
            f"{row.accumulation} x {row.micro_batch}",
            f"{row.time.total:.3f}",
            *(f"{part / row.time.total:.0%}" for part in (row.time.compute, row.time.exposed, row.time.optimizer)),
            f"{row.images_per_second:,.0f}",
            f"{row.efficiency:.0%}",
            f"{hours:,.1f}",
            *([f"{hours * row.num_gpus * config.price:,.0f}"] if config.price else []),
        ])  # fmt: skip
    return [
        f"The same run, {counted(forecast.plan.global_batch, 'image')} a step, on other numbers of nodes (* as given)",
        *_table(titles, rows),
        f"  {advice(forecast.scaling)}",
        "",
    ]


def _describe_readers(forecast: Forecast) -> list[str]:
    return ["Readers", *(f"  {line}" for line in readers(forecast)), ""]


def readers(forecast: Forecast) -> list[str]:
    """Lines about the data that ranks read, and whether there are enough streams and shards."""
    config, data, plan = forecast.config, forecast.data, forecast.plan
    streams, ranks = config.data.streams, plan.world_size
    lines = []
    if streams >= ranks:
        lines.append(
            f"{counted(streams, 'stream')} for {counted(ranks, 'rank')}: each reads {math.ceil(streams / ranks)} at a time"
        )
    else:
        better = math.gcd(plan.global_batch, ranks)
        lines.append(
            f"LOW: {counted(streams, 'stream')} for {counted(ranks, 'rank')}: {counted(math.ceil(ranks / streams), 'rank')} read the same shards at a time. "
            f"Use data.streams={better}."
        )
    if not data.shards:
        lines.append(
            f"shards: not known yet; use at least {streams}, of at most {counted(data.samples // streams, 'sample')}"
        )
    elif data.shards < streams:
        lines.append(
            f"LOW: {counted(data.shards, 'shard')} for {counted(streams, 'stream')}: several read the same shard, which shuffles less. Shard again with "
            f"samples_per_shard={max(1, data.samples // (4 * streams))}, or use fewer data.streams."
        )
    else:
        lines.append(f"{counted(data.shards, 'shard')}: {data.shards / streams:.1f} per stream")
    if forecast.step_seconds:
        rate = plan.global_batch / forecast.step_seconds
        per_thread = rate / ranks / config.data.threads
        text = f"{rate:,.0f} images/s in total: {per_thread:,.0f} per second for each of {counted(config.data.threads, 'decoding thread')}"
        if data.bytes:
            text += f", {rate * data.bytes / data.samples / 1e9:.2f} GB/s from storage"
        lines.append(text)
    return lines


def _describe_choice(forecast: Forecast) -> list[str]:
    choice = forecast.choice
    if choice is None:
        return ["Predicted, not measured."]
    width = max(len(override) for override in choice.overrides)
    return [
        f"Advice for {forecast.config.cluster}",
        *(f"  {override.ljust(width)}   {why}" for override, why in choice.reasons),
        "  to paste:",
        f"  {' '.join(choice.overrides)}",
        "",
        "Predicted, not measured: memory counts tensors, without the CUDA context and NCCL; for time see docs/plan.md.",
    ]


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in [titles, *rows]
    ]


def to_dict(forecast: Forecast) -> dict[str, Any]:
    """All figures as plain JSON data, in bytes, seconds, FLOPs and hours."""
    choice = forecast.choice
    return {
        "name": forecast.config.name,
        "cluster": asdict(forecast.cluster) if forecast.cluster else None,
        "data": asdict(forecast.data),
        "model": {**forecast.model.to_dict(), "parameters": models.num_parameters(forecast.model)},
        "plan": {**asdict(forecast.plan), "epochs": forecast.plan.epochs},
        "flops_per_image": forecast.flops_per_image,
        "flops": forecast.flops,
        "layouts": [{**asdict(layout), "peak": layout.memory.total} for layout in forecast.layouts],
        "choice": {**asdict(choice), "peak": choice.memory.total} if choice else None,
        "overrides": choice.overrides if choice else [],
        "network": asdict(forecast.network) if forecast.network else None,
        "step_seconds": forecast.step_seconds,
        "step": asdict(forecast.time) if forecast.time else None,
        "mfu": forecast.mfu,
        "measured": asdict(forecast.measured) if forecast.measured else None,
        "scaling": [asdict(row) for row in forecast.scaling],
        "checkpoint_bytes": forecast.checkpoint_bytes,
        "checkpoints": forecast.num_checkpoints,
        "stall_seconds": forecast.stall_seconds,
        "write_seconds": forecast.write_seconds,
        "hours": forecast.hours,
        "cost": forecast.cost,
        "readers": readers(forecast),
    }
