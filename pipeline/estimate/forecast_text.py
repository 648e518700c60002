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
from pipeline.base.progress import duration
from pipeline.base.words import aligned, counted, of_classes
from pipeline.data.storage.atomic import replacing
from pipeline.estimate.cluster import HEADROOM
from pipeline.estimate.forecast import Forecast, make_forecast
from pipeline.estimate.memory import refuse_too_large
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.quantities import ImageSize

_GIB = 2**30
_COLUMNS = ("weights", "optimizer", "gradients", "activations", "inputs", "buffers")


def run(config: PlanConfig) -> Forecast:
    """Print the forecast of a run. Raises UserError for what training would refuse; memory errors follow the output."""
    forecast = make_forecast(config)
    if config.json:
        with replacing(Path(config.json)) as file:
            file.write(as_bytes(json.dumps(to_dict(forecast), indent=1)))
    print("\n".join(describe(forecast)))
    sys.stdout.flush()
    if forecast.cluster:
        refuse_too_large(config, forecast.plan, forecast.model, forecast.cluster.gpu.memory)
    return forecast


def describe(forecast: Forecast) -> list[str]:
    """The forecast as lines of text."""
    model, plan, config, data = forecast.model, forecast.plan, forecast.config, forecast.data
    name = config.model.name or config.variant or config.init.weights
    notes = [*data.notes, *objectives.without_effect(config)]
    kept = f"{config.checkpoint.keep} kept, {forecast.kept_for_good:,} for good{', the best' * bool(plan.best_from)}"
    return [
        (
            f"{config.name}: {name} at {ImageSize.parse(model.image_size)} px, {models.num_parameters(model) / 1e6:.1f}"
            f" M parameters, {config.engine.precision}"
        ),
        *filter(None, notes),
        "",
        f"  data         {counted(data.samples, 'sample')} {of_classes(data.classes)} ({data.source})",
        f"  plan         {plan.describe()}",
        (
            f"  arithmetic   {forecast.flops_per_image / 1e9:.1f} GFLOP per image, {forecast.flops / 1e18:,.4g} exaFLOP"
            " in total"
        ),
        (
            f"  checkpoint   {forecast.checkpoint_bytes / _GIB:.2f} GiB, {kept}: at most"
            f" {forecast.disk_bytes / _GIB:,.1f} GiB on disk"
        ),
        f"  time         {_time(forecast)}",
        *(f"  {line}" for line in objectives.describe_groups(config, model, plan.steps)),
        *(f"  {line}" for line in readers(forecast)),
        "",
        *_describe_memory(forecast),
        *_describe_choice(forecast),
        "Predicted, not measured: memory counts tensors, without the CUDA context and NCCL.",
    ]


def _time(forecast: Forecast) -> str:
    if forecast.hours is None or forecast.cluster is None:
        return "needs cluster=... and measured=..., the images/s of one GPU in launch/bench.py gpu or in a short run"
    gpu_hours = forecast.hours * forecast.cluster.num_gpus
    return f"{duration(3600 * forecast.hours)} = {gpu_hours:,.1f} GPU hours at the measured speed, without evaluation"


def readers(forecast: Forecast) -> list[str]:
    """Lines about too few streams or shards for the ranks that read them."""
    streams, ranks, data = forecast.config.data.streams, forecast.plan.world_size, forecast.data
    lines = []
    if streams < ranks:
        lines.append(f"LOW: {counted(streams, 'stream')} for {counted(ranks, 'rank')}. Use data.streams={ranks}.")
    # In a window that holds a whole stream, samples are shuffled together however few shards there are.
    if 0 < data.shards < streams and data.samples > streams * forecast.config.data.window:
        lines.append(
            f"LOW: {counted(data.shards, 'shard')} for {counted(streams, 'stream')}, which shuffles less. Shard again"
            f" with samples_per_shard={max(1, data.samples // (4 * streams))}, or use fewer data.streams."
        )
    return lines


def _describe_memory(forecast: Forecast) -> list[str]:
    cluster, engine = forecast.cluster, forecast.config.engine
    limit = cluster.gpu.memory if cluster else math.inf
    rows = [["ZeRO", "checkpointing", *_COLUMNS, "peak", "peak at", f"micro_batch for {HEADROOM:.0%}"]]
    for layout in forecast.layouts:
        m = layout.memory
        configured = (layout.zero_stage, layout.activation_checkpointing)
        is_configured = configured == (engine.zero_stage, engine.activation_checkpointing)
        rows.append(
            [
                f"{'*' if is_configured else ' '} {layout.zero_stage}",
                "yes" if layout.activation_checkpointing else "no",
                *(f"{getattr(m, column) / _GIB:.2f}" for column in _COLUMNS),
                f"{m.total / _GIB:.2f}{' !' if m.total > limit else ''}",
                m.when,
                "-" if layout.largest is None else str(layout.largest),
            ]
        )
    return [
        f"Peak memory of a rank in GiB, at micro_batch {forecast.plan.micro_batch} (* as configured, ! too large)",
        *(f"  {line}" for line in aligned(rows, 0)),
        "",
    ]


def _describe_choice(forecast: Forecast) -> list[str]:
    choice = forecast.choice
    if choice is None:
        return []
    return [
        f"Advice for {forecast.config.cluster}: {choice.memory.total / _GIB:.1f} GiB a rank",
        f"  {' '.join(choice.overrides)}",
        "",
    ]


def to_dict(forecast: Forecast) -> dict[str, Any]:
    """All figures as plain JSON data, in bytes, FLOPs and hours."""
    choice, plan = forecast.choice, forecast.plan
    return {
        "name": forecast.config.name,
        "cluster": asdict(forecast.cluster) if forecast.cluster else None,
        "data": asdict(forecast.data),
        "model": {**forecast.model.to_dict(), "parameters": models.num_parameters(forecast.model)},
        "plan": {**asdict(plan), "epochs": plan.epochs},
        "layouts": [{**asdict(layout), "peak": layout.memory.total} for layout in forecast.layouts],
        "choice": {**asdict(choice), "peak": choice.memory.total} if choice else None,
        **{
            name: getattr(forecast, name)
            for name in ("flops_per_image", "flops", "checkpoint_bytes", "disk_bytes", "hours")
        },
        "checkpoints": len(plan.saves),
    }
