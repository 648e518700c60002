"""Real steps of DeepSpeed engines: bytes of their live tensors, and what a rehearsal leaves behind.

Rank 0 prints what was found. Started by test_rank_memory.py.
"""

import contextlib
import dataclasses
import hashlib
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


def train(overrides: list[str], num_classes: int, rehearse: bool, ranks: Ranks) -> dict[str, Any]:
    """A few steps, after a rehearsal or without one: this rank's losses, and all that a checkpoint would hold."""
    config = schema.load(RunConfig, None, overrides)
    engine, plan = make_engine(config, num_classes, ranks)
    size = config.model.image_size
    drawn = torch.get_rng_state()
    if rehearse:
        micro_batches = [noise(plan.micro_batch, size, num_classes, 99)] * min(2, plan.accumulation)
        with engine.untouched(len(micro_batches)):
            training_step(engine, micro_batches, 0, 0.0)
        engine.forward(noise(5, size, num_classes, 98).images)
    untouched = torch.equal(drawn, torch.get_rng_state())
    results = []
    for step in range(3):
        seeds = range(plan.accumulation * step, plan.accumulation * (step + 1))
        batches = [noise(plan.micro_batch, size, num_classes, 10 * ranks.rank + seed) for seed in seeds]
        results.append(training_step(engine, batches, step, 1e-2))
    part, digest = engine.part(), hashlib.sha256()
    for tensors in part.tensors.values():
        for tensor in tensors:
            digest.update(tensor.contiguous().numpy().tobytes())
    return {
        "losses": [float(result.loss) for result in results],
        "norms": [float(result.grad_norm) for result in results],
        "states": sorted(part.tensors),
        "bits": digest.hexdigest(),
        "counters": dataclasses.asdict(engine.counters()),
        "untouched": untouched,
    }


def main(cases: list[list[Any]]) -> None:
    """cases: of each, a function's name and its arguments."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks a CPU whether it is fast at it; any is able to.
    torch.set_num_threads(1)
    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=5)
    does = {"measure": measure, "train": train}
    of_ranks = [ranks.gather(does[name](*arguments, ranks)) for name, *arguments in cases]
    if ranks.is_main:
        print("found", json.dumps(of_ranks))
