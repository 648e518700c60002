"""The forecast of a run as text and as JSON: what `launch/plan.py` prints and writes."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import model as models
from pipeline import objectives
from pipeline.base.files import as_bytes
from pipeline.base.words import aligned, counted, of_classes
from pipeline.data.storage.atomic import replacing
from pipeline.estimate.cluster import HEADROOM
from pipeline.estimate.forecast import Forecast, make_forecast
from pipeline.estimate.memory import refuse_too_large
from pipeline.estimate.step_time import EFFICIENCY
from pipeline.model import ViTConfig
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.quantities import ImageSize

_GIB = 2**30
_COLUMNS = ("weights", "optimizer", "gradients", "activations", "inputs", "buffers")


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


def describe(forecast: Forecast) -> list[str]:
    """The forecast as lines of text."""
    return [
        *_describe_run(forecast),
        *_describe_memory(forecast),
        *_describe_time(forecast),
        *["Readers", *(f"  {line}" for line in readers(forecast)), ""],
        *_describe_choice(forecast),
    ]


def _describe_run(forecast: Forecast) -> list[str]:
    model, plan, config, data = forecast.model, forecast.plan, forecast.config, forecast.data
    name = config.model.name or config.variant or config.init.weights
    tokens = f"{counted(model.num_tokens, 'token')}, " if isinstance(model, ViTConfig) else ""
    return [
        f"{config.name}: {name} at {ImageSize.parse(model.image_size)} px, {models.num_parameters(model) / 1e6:.1f} M parameters, "
        f"{tokens}{config.engine.precision}",
        *filter(None, [data.balance, *data.label_notes, *objectives.without_effect(config)]),
        "",
        f"  data         {counted(data.samples, 'sample')} {of_classes(data.classes)} ({data.source})",
        f"  length       {counted(plan.steps, 'step')} = {plan.epochs:.1f} epochs; warm-up {plan.warmup:,}, "
        f"{plan.evaluations}",
        f"  batch        {plan.global_batch:,} = {counted(plan.world_size, 'rank')} x {plan.accumulation} x {plan.micro_batch} as configured",
        f"  arithmetic   {forecast.flops_per_image / 1e9:.1f} GFLOP per image, "
        f"{forecast.flops_per_image * plan.global_batch / 1e15:.2f} PFLOP per step, {forecast.flops / 1e18:,.4g} exaFLOP in total",
        *(f"  {line}" for line in objectives.describe_groups(config, model, plan.steps)),
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
            config.engine.zero_stage,
            config.engine.activation_checkpointing,
        )
        too_large = cluster is not None and m.total > cluster.gpu.memory
        rows.append(
            [
                f"{'*' if is_configured else ' '} {layout.zero_stage}",
                "yes" if layout.activation_checkpointing else "no",
                *(f"{getattr(m, column) / _GIB:.2f}" for column in _COLUMNS),
                f"{m.total / _GIB:.2f}{' !' if too_large else ''}",
                m.when,
                "-" if layout.largest is None else str(layout.largest or "none"),
            ]
        )
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
    kept = f"{config.checkpoint.keep} kept"
    kept += f", {forecast.kept_for_good:,} for good" * bool(forecast.kept_for_good) + ", the best" * bool(
        plan.best_from
    )
    lines = [
        f"  checkpoint   {forecast.checkpoint_bytes / _GIB:.2f} GiB {every}, {kept}: at most {forecast.disk_bytes / _GIB:,.1f} GiB on disk"
    ]
    if cluster is None or network is None:
        return ["Time: not predicted without cluster=NODESxGPUSxKIND, such as cluster=1x8xH100", *lines, ""]
    if time is None or hours is None:
        return [
            "Time: not predicted, because the table of GPUs has no fp32 peaks: set engine.peak_tflops",
            *lines,
            "",
        ]
    rate = plan.global_batch / time.total
    interval = min(plan.checkpoint_every, plan.steps) * time.total
    stall = forecast.stall_seconds
    mfu = f", MFU {forecast.mfu:.0%} of {forecast.peak / 1e12:,.0f} TFLOP/s" if forecast.mfu else ""
    return [
        "Time as advised below",
        f"  one GPU      {_speed_of_a_gpu(config)}",
        f"  network      {network.name}: {network.link / 1e9:,.0f} GB/s between GPUs, {network.cards / 1e9:,.0f} GB/s between nodes "
        f"({network.source})",
        f"  step         {time.total:.3f} s = {time.compute:.3f} forward and backward + {time.exposed:.3f} waiting for communication "
        f"+ {time.optimizer:.3f} optimizer",
        f"  speed        {rate:,.0f} images/s, {rate / cluster.num_gpus:,.0f} per GPU{mfu}",
        *lines,
        f"  stall        {stall:.2f} s per checkpoint: {stall / (interval + stall):.1%} of the time",
        f"  saved        {forecast.write_seconds:.0f} s later; a crash loses "
        f"{(interval + forecast.write_seconds) / 60:.1f} minutes at most",
        f"  in total     {_rounded(hours, 1)} hours = {_rounded(hours * cluster.num_gpus, 0)} GPU hours; evaluation not included",
        "",
    ]


def _rounded(amount: float, decimals: int) -> str:
    """An amount with this number of decimals, or two digits of less than one, so that a short run does not take 0.0."""
    if 0 < amount < 1:
        return f"{amount:.{1 - math.floor(math.log10(amount))}f}".rstrip("0").rstrip(".")
    return f"{amount:,.{decimals}f}"


def _speed_of_a_gpu(config: PlanConfig) -> str:
    if config.measured:
        return f"{config.measured:,.0f} images/s measured (measured=...), optimizer added"
    return f"not measured (measured=... images/s of one GPU); kernels are assumed to reach {EFFICIENCY:.0%} of the data sheet"


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
        lines.append(
            f"LOW: {counted(streams, 'stream')} for {counted(ranks, 'rank')}: {counted(math.ceil(ranks / streams), 'rank')} read the same shards at a time. "
            f"Use data.streams={ranks}."
        )
    if not data.shards:
        lines.append(
            f"shards: not known yet; use at least {streams}, of at most {counted(data.samples // streams, 'sample')}"
        )
    elif data.shards < streams and data.samples <= streams * config.data.window:
        # Only which samples are in a stream is always the same, and a batch has some of each stream.
        lines.append(
            f"{counted(data.shards, 'shard')} for {counted(streams, 'stream')}: enough, as samples are shuffled together in windows "
            f"(data.window = {config.data.window:,}) that hold a whole stream"
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
        workers, kind = config.data.threads, "thread"
        if config.data.processes:
            workers, kind = config.data.processes, "process"
        text = f"{rate:,.0f} images/s in total: {rate / ranks / workers:,.0f} per second for each of {counted(workers, f'decoding {kind}')}"
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
    return [f"  {line}" for line in aligned([titles, *rows], 0)]


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
        "checkpoint_bytes": forecast.checkpoint_bytes,
        "checkpoints": forecast.num_checkpoints,
        "disk_bytes": forecast.disk_bytes,
        "stall_seconds": forecast.stall_seconds,
        "write_seconds": forecast.write_seconds,
        "hours": forecast.hours,
        "readers": readers(forecast),
    }
