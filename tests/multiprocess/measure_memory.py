"""Bytes of live tensors in real steps of DeepSpeed engines, on every rank; rank 0 prints them. Started by test_rank_memory.py."""

import json
from functools import partial
from typing import Any

import numpy as np
import torch
from live_tensors import LiveTensors, operators_of_a_gpu

from pipeline import memory, objective, optim, schema
from pipeline.config import RunConfig
from pipeline.data.loader import Batch
from pipeline.distributed import Ranks, from_environment
from pipeline.engine import Engine, start_ranks
from pipeline.model import VisionTransformer
from pipeline.plan import make_plan, new_model_config
from pipeline.profile import StepClock


def measure(overrides: list[str], num_classes: int, bucket: int, ranks: Ranks) -> dict[str, Any]:
    """The peak of a step, what is left between two steps, and the bytes that this rank copies for a checkpoint."""
    memory.REDUCE_BUCKET = bucket
    config = schema.load(RunConfig, None, overrides)
    plan = make_plan(config, 1000, ranks.world_size)
    model = VisionTransformer(new_model_config(config.model, num_classes))
    model.activation_checkpointing = config.engine.activation_checkpointing
    optimizer = optim.build(model, model.weight_decay_mask(), config.optimizer)
    for group in optimizer.param_groups:
        group["foreach"] = True  # what torch does on a GPU
    live = LiveTensors()
    engine = Engine(
        model, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, StepClock(ranks.device)
    )
    loss_of = partial(objective.batch_loss, kind=config.train.loss, label_smoothing=0.0)
    size, count = config.model.image_size, plan.micro_batch
    batches = [
        Batch(
            torch.zeros(count, size, size, 3, dtype=torch.uint8), torch.zeros(count, 1, dtype=torch.int64),
            torch.ones(count, dtype=torch.bool), np.arange(count), np.zeros(count, np.int64),
        )
        for _ in range(plan.accumulation)
    ]  # fmt: skip
    with live, operators_of_a_gpu():
        engine.train_step(0, batches, 1e-3, loss_of)  # The optimizer makes its state.
        between = live.bytes
        live.restart()
        engine.train_step(1, batches, 1e-3, loss_of)
    part = engine.part()
    saved = sum(4 * tensor.numel() for tensors in part.tensors.values() for tensor in tensors)
    return {"peak": live.peak, "between": between, "saved": saved}


def main(cases: str) -> None:
    """cases: JSON, a list of the arguments of `measure`."""
    torch.set_num_threads(1)
    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=5)
    results = [measure(*case, ranks) for case in json.loads(cases)]
    if ranks.is_main:
        print("measured", json.dumps(results))
