"""A cluster, and the best layout of a run on it: ZeRO stage, micro-batch, accumulation, activation checkpointing."""

import math
import re
from dataclasses import dataclass, replace
from typing import TypeVar

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.estimate.memory import Memory, largest_micro_batch, moments, rank_memory
from pipeline.model import Config, ViTConfig
from pipeline.monitor.gpus import Gpu, find_gpu, known_gpus
from pipeline.settings.objective_checks import OF_WHOLE_BATCH
from pipeline.settings.run import RunConfig

# Largest share of a GPU's nominal memory that a layout may fill: the prediction may be off by 10 %.
HEADROOM = 0.9
# Tokens per forward pass that keep a large GPU busy. A rule of thumb, not measured.
_BUSY_TOKENS = 4096
_GIB = 2**30
_Run = TypeVar("_Run", bound=RunConfig)


@dataclass(frozen=True)
class Cluster:
    """nodes x gpus_per_node GPUs of one kind."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Parse "8x8xH100-80GB", 8 nodes of 8 GPUs. Raises UserError for anything else."""
        match = re.fullmatch(r"(\d+)x(\d+)x(.+)", text)
        if match is None or int(match[1]) < 1 or int(match[2]) < 1:
            raise UserError(f"cluster = {text}: write nodes x GPUs x kind, as 8x8xH100-80GB or 1x4xA100-40GB.")
        gpu = find_gpu(match[3])
        if gpu is None:
            raise UserError(f"cluster = {text}: {match[3]!r} is not a known GPU. Known: {known_gpus()}.")
        return cls(int(match[1]), int(match[2]), gpu)

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Choice:
    """The chosen layout. reasons: (setting=value, reason) of each chosen setting."""

    zero_stage: int
    activation_checkpointing: bool
    micro_batch: int
    accumulation: int
    memory: Memory
    reasons: list[tuple[str, str]]

    @property
    def overrides(self) -> list[str]:
        return [override for override, _ in self.reasons]


def choose(config: RunConfig, model: Config, cluster: Cluster) -> Choice:
    """Choose the layout that should train fastest. Raises UserError if none fits.

    Preferred are no recomputation, then the lowest stage, then the largest micro-batch, among layouts that fill at most
    `HEADROOM` of the memory with a micro-batch that keeps a GPU busy. If there are none, the largest micro-batch decides.
    """
    world_size = cluster.num_gpus
    share = config.train.global_batch // world_size
    limit = HEADROOM * cluster.gpu.memory
    is_whole = config.train.loss in OF_WHOLE_BATCH
    busy = share if is_whole else min(share, math.ceil(_BUSY_TOKENS / _places(model)))
    stages = [stage for stage in config.zero_stages if stage]
    passed: list[str] = []
    fallback: tuple[int, RunConfig] | None = None
    for checkpointing in (False, True):
        for stage in stages:
            trial = lay_out(config, stage, checkpointing)
            micro_batch = largest_micro_batch(trial, model, share, world_size, limit)
            if micro_batch >= busy:
                return _explain(trial, model, cluster, micro_batch, busy, passed)
            passed.append(_name(stage, checkpointing))
            if micro_batch and not is_whole and (fallback is None or micro_batch > fallback[0]):
                fallback = micro_batch, trial
    if fallback is None:
        trial = lay_out(config, stages[-1], True)
        smallest = share if is_whole else 1
        least = rank_memory(model, trial, smallest, share // smallest, world_size).total
        of_batch = f", which train.loss={config.train.loss} cannot divide," if is_whole else ""
        raise UserError(
            f"this model does not fit {world_size} x {cluster.gpu.kind}: even with engine.zero_stage={stages[-1]}, "
            f"engine.activation_checkpointing=true and train.micro_batch={smallest}{of_batch} a rank needs {least / _GIB:.1f} GiB of "
            f"{limit / _GIB:.1f} ({HEADROOM:.0%} of {cluster.gpu.memory / 1e9:.0f} GB). Use more or larger GPUs, or a "
            "smaller model.image_size."
        )
    return _explain(fallback[1], model, cluster, fallback[0], busy, passed)


def lay_out(config: _Run, stage: int, checkpointing: bool) -> _Run:
    """Returns the same run at another ZeRO stage, with or without activation checkpointing."""
    engine = replace(config.engine, zero_stage=stage, activation_checkpointing=checkpointing)
    return replace(config, engine=engine)


def _explain(
    config: RunConfig, model: Config, cluster: Cluster, micro_batch: int, busy: int, passed: list[str]
) -> Choice:
    world_size, stage = cluster.num_gpus, config.engine.zero_stage
    share = config.train.global_batch // world_size
    accumulation = share // micro_batch
    memory = rank_memory(model, config, micro_batch, accumulation, world_size)
    limit = HEADROOM * cluster.gpu.memory / _GIB
    if stage == 1 and not passed:
        why_stage = "the lowest stage that shards the optimizer; it fits, and higher stages communicate more"
    elif micro_batch >= busy:
        why_stage = f"these do not fit micro_batch {busy}, which keeps a GPU busy: {', '.join(passed)}"
    else:
        why_stage = f"no layout fits micro_batch {busy}, which would keep a GPU busy; this one fits the largest"
    activations = moments(model, config, micro_batch, accumulation, world_size)[0].activations / _GIB
    if config.engine.activation_checkpointing:
        plain = lay_out(config, stage, False)
        without = moments(model, plain, micro_batch, accumulation, world_size)[0].total / _GIB
        why_checkpointing = (
            f"activations take {activations:.1f} GiB; without it the rank would need {without:.1f} of {limit:.1f} GiB. "
            "A step takes about 1/3 longer"
        )
    else:
        why_checkpointing = f"activations take {activations:.1f} GiB, which fits without recomputation"
    part = "all of" if accumulation == 1 else "the largest that fits and divides"
    why_micro_batch = (
        f"{part} a rank's {counted(share, 'sample')}; the peak memory of a rank is "
        f"{memory.total / _GIB:.1f} of {limit:.1f} GiB ({HEADROOM:.0%} of {cluster.gpu.memory / 1e9:.0f} GB); "
        f"accumulation {accumulation} follows"
    )
    reasons = [
        (f"engine.zero_stage={stage}", why_stage),
        (f"engine.activation_checkpointing={str(config.engine.activation_checkpointing).lower()}", why_checkpointing),
        (f"train.micro_batch={micro_batch}", why_micro_batch),
    ]
    return Choice(stage, config.engine.activation_checkpointing, micro_batch, accumulation, memory, reasons)


def _places(model: Config) -> int:
    """Positions per image that are computed in parallel: a ViT's tokens, or places of a ResNet's feature map at stride 16."""
    return model.num_tokens if isinstance(model, ViTConfig) else model.image_size[0] * model.image_size[1] // 16**2


def _name(stage: int, checkpointing: bool) -> str:
    return f"stage {stage}{' with checkpointing' if checkpointing else ''}"
