"""The collectives of a real training step, counted where torch dispatches them: bytes by kind, on this rank.

Rank 0 prints what it found. Started by test_rank_communication.py.
"""

import json
from collections import Counter
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from rank_memory import make_engine, noise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.estimate import memory
from pipeline.process.distributed import Ranks, from_environment
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train.loop import training_step
from pipeline.train.zero import engine

# Stage 3 shards tensors of at least this many elements; the tests' models have none of DeepSpeed's 100,000.
PERSISTENCE = 1000

# Merged into DeepSpeed's configuration. Its defaults would gather a small model once, and prefetch all of it.
REUSE: dict[str, int] = {}

# c10d's operators -> (kind, the argument that holds a rank's full tensor).
_KINDS = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
}


class Collectives(TorchDispatchMode):
    """bytes, calls: by kind of collective, counted at the full tensor (the output of an all-gather)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind, position = _KINDS.get(func._opname, (func._opname, 0))
            self.calls[kind] += 1
            self.bytes[kind] += sum(leaf.nbytes for leaf in tree_leaves(args[position]) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def count(overrides: list[str], num_classes: int, bucket: int, reuse: int, ranks: Ranks) -> dict[str, Any]:
    """Bytes and calls of the third step: stage 3 has traced the order of its parameters by then."""
    memory.REDUCE_BUCKET, memory.PERSISTENCE_THRESHOLD = bucket, PERSISTENCE
    REUSE.update(
        stage3_max_reuse_distance=reuse, stage3_prefetch_bucket_size=reuse // 20
    )  # The defaults are 1e9 and 5e7.
    config = schema.load(RunConfig, None, overrides)
    trained, plan = make_engine(config, num_classes, ranks)
    batches = [noise(plan.micro_batch, config.model.image_size, num_classes, seed) for seed in range(plan.accumulation)]
    for step in range(3):
        with Collectives() as found:
            training_step(trained, batches, step, 1e-3)
    return {"bytes": found.bytes, "calls": found.calls}


def _settings(*args: Any) -> dict[str, Any]:
    settings = _original_settings(*args)
    settings["zero_optimization"] |= REUSE
    return settings


_original_settings, engine.deepspeed_settings = engine.deepspeed_settings, _settings


def main(cases: list[list[Any]]) -> None:
    """cases: the arguments of `count`."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks a CPU whether it is fast at it; any is able to.
    torch.set_num_threads(1)
    ranks = from_environment()
    engine.start_ranks(ranks, timeout_minutes=5)
    found = [count(*case, ranks) for case in cases]
    if ranks.is_main:
        print("found", json.dumps(found))
