"""Real steps of DeepSpeed engines, and the bytes of their live tensors.

Rank 0 prints what was found. Started by test_rank_memory.py.
"""

import contextlib
import json
from typing import Any

import torch
from live_tensors import LiveTensors, operators_of_a_gpu

from data_tools.bench.noise import noise_views
from pipeline import objectives
from pipeline.data.loading.loader import Batch
from pipeline.estimate import memory
from pipeline.estimate.plan import Plan, make_plan
from pipeline.model import build
from pipeline.monitor.profile import StepClock
from pipeline.objectives.parameters import optimizers
from pipeline.process.distributed import Ranks, from_environment
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig
from pipeline.train.loop import training_step
from pipeline.train.zero.engine import Engine, start_ranks

# isort: split
# After pipeline.train, which imports DeepSpeed without what takes seconds.
from deepspeed.accelerator import get_accelerator


def make_engine(config: RunConfig, num_classes: int, ranks: Ranks, fused: bool = False) -> tuple[Engine, Plan]:
    plan = make_plan(config, 1000, ranks.world_size)
    model = build(objectives.new_backbone(config, num_classes), seed=0)
    model.activation_checkpointing = config.engine.activation_checkpointing
    objective = objectives.create(config, model)
    objective.num_steps = plan.steps
    optimizer = optimizers.build(objective, objective.decayed(), config.optimizer, fused)
    clock = StepClock(ranks.device)
    return Engine(objective, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock), plan


def noise(count: int, size: tuple[int, int], num_classes: int, seed: int) -> Batch:
    return noise_views([(1, *size)], count, num_classes, seed)


def measure(overrides: list[str], num_classes: int, bucket: int, ranks: Ranks) -> dict[str, Any]:
    """Of rank 0: the peak of a step, what is left between two steps, and the bytes that it copies for a checkpoint."""
    memory.REDUCE_BUCKET = bucket
    config = schema.load(RunConfig, None, overrides)
    live = LiveTensors()
    fused = config.engine.fused is not False
    engine, plan = make_engine(config, num_classes, ranks, fused)
    if not fused:  # As torch chooses on a GPU.
        for group in engine.optimizer.param_groups:
            group["foreach"] = True
    shapes = [(group.count, *ImageSize.parse(group.size)) for group in type(engine.objective).views(config)]
    batches = [noise_views(shapes, plan.micro_batch, num_classes, seed) for seed in range(plan.accumulation)]
    for batch in batches:
        batch.drawn.update(engine.objective.draw(batch, training=True))
    with live if ranks.is_main else contextlib.nullcontext(), operators_of_a_gpu():  # To count takes half of a step.
        training_step(engine, batches, 0, 1e-3)  # The optimizer makes its state.
        between = live.bytes
        peaks = []
        for step in range(1, 4):
            live.restart()
            training_step(engine, batches, step, 1e-3)
            peaks.append(live.peak)
    if not ranks.is_main:
        return {}
    part = engine.part()
    saved = sum(4 * tensor.numel() for tensors in part.tensors.values() for tensor in tensors)
    # The least: gloo's thread may let go of a bucket late.
    return {"peak": min(peaks), "between": between, "saved": saved}


def main(cases: list[list[Any]]) -> None:
    """cases: of each, the arguments of `measure`."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks a CPU whether it is fast at it; any is able to.
    torch.set_num_threads(1)
    ranks = from_environment()
    start_ranks(ranks)
    found = [measure(*case, ranks) for case in cases]
    if ranks.is_main:
        print("found", json.dumps(found))
