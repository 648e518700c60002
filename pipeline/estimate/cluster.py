"""A cluster, and the best layout of a run on it: ZeRO stage, micro-batch, accumulation, activation checkpointing."""

import math
import re
from dataclasses import dataclass, replace
from typing import TypeVar

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.errors import UserError
from pipeline.estimate.memory import Memory, largest_micro_batch, rank_memory
from pipeline.model import Config, ViTConfig
from pipeline.monitor.gpus import Gpu, find_gpu, known_gpus
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
class Choice:
    """The chosen layout. memory: at the peak of a rank."""

    zero_stage: int
    activation_checkpointing: bool
    micro_batch: int
    accumulation: int
    memory: Memory

    @property
    def overrides(self) -> list[str]:
        return [
            f"engine.zero_stage={self.zero_stage}",
            f"engine.activation_checkpointing={str(self.activation_checkpointing).lower()}",
            f"train.micro_batch={self.micro_batch}",
        ]


def choose(config: RunConfig, model: Config, cluster: Cluster) -> Choice:
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
    layouts = [lay_out(config, stage, again) for again in (False, True) for stage in config.zero_stages if stage]
    largest, chosen = 0, layouts[-1]
    for layout in layouts:
        micro_batch = largest_micro_batch(layout, model, share, world_size, limit)
        if micro_batch > largest:
            largest, chosen = micro_batch, layout
        if micro_batch >= busy:
            break
    if largest < smallest:
        least = rank_memory(model, layouts[-1], smallest, share // smallest, world_size).total
        raise UserError(
            f"this model does not fit {world_size} x {cluster.gpu.kind}: even with"
            f" engine.zero_stage={config.zero_stages[-1]}, engine.activation_checkpointing=true and"
            f" train.micro_batch={smallest} a rank needs {least / _GIB:.1f} GiB of {limit / _GIB:.1f} ({HEADROOM:.0%}"
            f" of {cluster.gpu.memory / 1e9:.0f} GB). Use more or larger GPUs, or a smaller model.image_size."
        )
    memory = rank_memory(model, chosen, largest, share // largest, world_size)
    engine = chosen.engine
    return Choice(engine.zero_stage, engine.activation_checkpointing, largest, share // largest, memory)


def lay_out(config: _Run, stage: int, checkpointing: bool) -> _Run:
    """Returns the same run at another ZeRO stage, with or without activation checkpointing."""
    engine = replace(config.engine, zero_stage=stage, activation_checkpointing=checkpointing)
    return replace(config, engine=engine)


def _places(model: Config) -> int:
    """Positions per image that are computed in parallel: a ViT's tokens, or places of a ResNet's feature map at stride
    16.
    """
    return model.num_tokens if isinstance(model, ViTConfig) else model.image_size[0] * model.image_size[1] // 16**2
