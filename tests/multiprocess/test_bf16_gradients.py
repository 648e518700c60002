"""DeepSpeed's gradients of stage 1 in bf16, added, measured and clipped with few kernels: the same step."""

import json
from collections.abc import Callable
from typing import Any

import torch
from fake_gpu import TINY
from forked import Forge
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 3


class Counter(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def train_both_ways(nothing: Any) -> None:
    """In a rank: steps of two micro-batches, clipped, with DeepSpeed's own methods and with ours; rank 0 prints what it
    found.
    """
    from rank_memory import make_engine, noise

    from pipeline.process.distributed import from_environment
    from pipeline.settings import schema
    from pipeline.settings.run import RunConfig
    from pipeline.train.loop import training_step
    from pipeline.train.zero import internals
    from pipeline.train.zero.engine import start_ranks

    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=5)
    few: Callable[[Any], None] = internals.use_few_kernels
    found = []
    for use in (lambda optimizer: None, few):
        internals.use_few_kernels = use
        given = [*TINY, "engine.zero_stage=1", "engine.precision=bf16", "optimizer.clip=0.1"]
        engine, plan = make_engine(schema.load(RunConfig, None, given), 4, ranks)
        losses, norms = [], []
        for step in range(STEPS):
            batches = [noise(plan.micro_batch, (16, 16), 4, 10 * step + i + 5 * ranks.rank) for i in range(2)]
            with Counter() as counter:
                result = training_step(engine, batches, step, 1e-2)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        weights = torch.cat([weight.detach().float().view(-1) for weight in engine.objective.parameters()])
        found.append([losses, norms, counter.count, [float(weights.abs().sum()), float(weights[::7].sum())]])
    if ranks.rank == 0:
        print("found", json.dumps([found, len(list(engine.objective.parameters()))]))


def test_steps_are_those_of_deepspeed(forge: Forge) -> None:
    said = forge.start_work(2, "test_bf16_gradients:train_both_ways", None).finish()
    line = next(line for line in said.splitlines() if line.startswith("found "))
    ((losses, norms, many, weights), (own_losses, own_norms, few, own_weights)), parameters = json.loads(line[6:])
    assert min(norms) > 0.1, "they are clipped"
    # The norms of the parameters are put together in another way, so clipped weights can be rounded otherwise in bf16.
    assert all(abs(own - loss) <= 1e-3 * loss for own, loss in zip(own_losses, losses, strict=True))
    assert all(abs(own - norm) <= 1e-6 * norm for own, norm in zip(own_norms, norms, strict=True))
    assert all(abs(own - value) <= 1e-4 * abs(value) for own, value in zip(own_weights, weights, strict=True))
    # For each: two micro-batches converted and added, then measured and clipped.
    assert many - few > 4 * parameters
