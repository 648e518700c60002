"""Gradients in 16 bits: summed over micro-batches and ranks as exactly as fp32 allows, then clipped."""

import json
from typing import Any

import torch
from fake_gpu import TINY
from forked import Forge

CLIP = 0.1
SGD = ["optimizer.name=sgd", "optimizer.weight_decay=0", f"optimizer.clip={CLIP}"]
# Stage, precision, micro-batches a step.
REDUCED = [(1, "bf16", 2), (1, "fp16", 2), (2, "bf16", 2), (3, "bf16", 2), (1, "bf16", 1)]


def print_errors(nothing: Any) -> None:
    """In a rank: of each case, the largest error of this rank's part of the reduced and clipped gradient, relative to
    the largest gradient, and that of its norm; rank 0 prints the largest of the ranks.
    """
    from rank_memory import get_accelerator, make_engine, noise

    from pipeline import objectives
    from pipeline.model import build
    from pipeline.objectives.objective import stored_name
    from pipeline.process.distributed import from_environment
    from pipeline.settings import schema
    from pipeline.settings.run import RunConfig
    from pipeline.train.loop import training_step
    from pipeline.train.zero.engine import start_ranks

    get_accelerator().is_fp16_supported = lambda: True
    ranks = from_environment()
    start_ranks(ranks)
    found = []
    for stage, precision, count in REDUCED:
        given = [f"engine.zero_stage={stage}", f"engine.precision={precision}", f"train.global_batch={6 * count}"]
        config = schema.load(RunConfig, None, [*TINY, *SGD, *given])
        engine, plan = make_engine(config, 4, ranks, fused=True)
        assert plan.accumulation == count
        # The same objective without DeepSpeed, in the precision of training.
        twin = objectives.create(config, build(objectives.new_backbone(config, 4), seed=0)).to(engine.dtype)
        batches = [noise(2, (16, 16), 4, 10 * ranks.rank + i) for i in range(count)]
        result = training_step(engine, batches, 0, 0.0)
        counters = engine.counters()
        scale = counters.loss_scale["cur_scale"] if counters.loss_scale else 1
        exact = {name: torch.zeros(p.numel(), dtype=torch.double) for name, p in twin.named_parameters()}
        for batch in batches:
            twin.zero_grad(set_to_none=True)
            views, facts = twin.inputs(batch, torch.device("cpu"), None)
            loss, _ = twin(tuple(view.to(engine.dtype) for view in views), facts)
            (loss * (scale / count)).backward()
            for name, parameter in twin.named_parameters():
                exact[name] += parameter.grad.double().view(-1) / scale
        for gradient in exact.values():
            torch.distributed.all_reduce(gradient)
            gradient /= ranks.world_size
        exact = {stored_name(name): gradient for name, gradient in exact.items()}
        norm = float(torch.cat(list(exact.values())).norm())
        assert norm > 2 * CLIP
        part = engine.part()  # SGD's momentum is that of the first gradient.
        errors = [
            float((momentum - exact[name][start : start + length] * CLIP / norm).abs().max()) * norm / CLIP
            for (name, start, length), momentum in zip(part.ranges, part.tensors["momentum_buffer"], strict=True)
        ]
        largest = max(float(gradient.abs().max()) for gradient in exact.values())
        found.append([max(errors) / largest, abs(float(result.grad_norm) / norm - 1)])
    of_ranks = ranks.gather(found)
    if ranks.is_main:
        print("found", json.dumps([list(map(max, *errors)) for errors in zip(*of_ranks, strict=True)]))


def test_accumulated_gradients_are_reduced_in_fp32(forge: Forge) -> None:
    """Those of a micro-batch alone have 16 bits, and so has their sum: at stages 2 and 3, and without accumulation."""
    said = forge.start_work(3, "test_bf16_gradients:print_errors", None).finish()
    found = json.loads(next(line for line in said.splitlines() if line.startswith("found "))[6:])
    errors, of_norms = zip(*found, strict=True)
    assert max(errors[:2]) < 2e-6
    assert all(1e-5 < error < 2**-7 for error in errors[2:])
    assert max(of_norms) < 1e-3
