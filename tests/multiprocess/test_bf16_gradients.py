"""Gradients in 16 bits: summed over micro-batches and ranks as exactly as fp32 allows, moved as little as possible."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import TINY
from forked import Forge
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS = 3
SGD = ["optimizer.name=sgd", "optimizer.weight_decay=0", "optimizer.clip=0"]
DINO = ["train.loss=dino", "model.representation=false", "objective.prototypes=16", "objective.local_size=8"]
# Stage, precision, micro-batches a step.
REDUCED = [(1, "bf16", 2), (1, "fp16", 2), (2, "bf16", 2), (3, "bf16", 2), (1, "bf16", 1)]


class Counter(TorchDispatchMode):
    """Counts operators, and the bytes of the tensors that they read and write. Those of the optimizer itself do not
    count.
    """

    count = num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += 1
        if not function.is_view and "_fused_adam" not in str(function):
            self.num_bytes += sum(self._moved(function, args, kwargs or {}, result))
        return result

    @staticmethod
    def _moved(function: Any, args: Any, kwargs: Any, result: Any) -> Iterator[int]:
        only_writes = function.overloadpacket.__name__ in ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_")
        for number, argument in enumerate(function._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            times = is_written + (not is_written or not only_writes)
            yield from (times * leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        if not any(returned.alias_info for returned in function._schema.returns):
            yield from (leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


def make_engine_and_twin(ranks: Any, more: list[str]) -> tuple[Any, Any, int]:
    """(engine, its objective in the precision of training without DeepSpeed, micro-batches a step) of a tiny model."""
    import rank_memory

    from pipeline import objectives
    from pipeline.model import build
    from pipeline.settings import schema
    from pipeline.settings.run import RunConfig

    rank_memory.get_accelerator().is_fp16_supported = lambda: True
    config = schema.load(RunConfig, None, [*TINY, *more])
    engine, plan = rank_memory.make_engine(config, 4, ranks, fused=True)
    twin = objectives.create(config, build(objectives.new_backbone(config, 4), seed=0))
    return engine, twin.to(engine.dtype), plan.accumulation


def add_gradient(twin: Any, batch: Any, scale: float) -> None:
    """Backward pass of the loss times `scale`."""
    inputs = twin.inputs(batch, torch.device("cpu"), None)
    loss, _ = twin(tuple(view.to(next(twin.parameters()).dtype) for view in inputs.views), inputs.facts)
    (loss * scale).backward()


def print_bytes(nothing: Any) -> None:
    """In a rank: bytes a parameter that a step moves beside those of the passes and the optimizer, for 1 to 3
    micro-batches; and that the refresh of a teacher moves.
    """
    from rank_memory import noise

    from pipeline.process.distributed import from_environment
    from pipeline.train.loop import training_step
    from pipeline.train.zero.engine import start_ranks

    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=5)
    found = []
    for count in (1, 2, 3):
        given = [
            "engine.zero_stage=1",
            "engine.precision=bf16",
            "optimizer.clip=0.1",
            f"train.global_batch={2 * count}",
        ]
        engine, twin, accumulation = make_engine_and_twin(ranks, given)
        assert accumulation == count
        batches = [noise(2, (16, 16), 4, i) for i in range(count)]
        training_step(engine, batches, 0, 1e-2)  # Makes the optimizer's state.
        with Counter() as plain:
            for batch in batches:
                add_gradient(twin, batch, 1.0)
                twin.zero_grad(set_to_none=True)
        with Counter() as step:
            training_step(engine, batches, 1, 1e-2)
        found.append((step.num_bytes - plain.num_bytes) / sum(p.numel() for p in twin.parameters()))
    given = ["engine.zero_stage=1", "engine.precision=bf16", "train.global_batch=2", *DINO]
    engine, twin, _ = make_engine_and_twin(ranks, given)
    with Counter() as refresh:
        engine.teacher.refresh()
    found.append(refresh.num_bytes / sum(p.numel() for p in twin.parameters() if p.requires_grad))
    print("found", json.dumps(found))


def print_errors(nothing: Any) -> None:
    """In a rank: of each case, the largest error of this rank's part of the reduced gradient, relative to the largest
    gradient; rank 0 prints the largest of the ranks.
    """
    from rank_memory import noise

    from pipeline.objectives.objective import stored_name
    from pipeline.process.distributed import from_environment
    from pipeline.train.loop import training_step
    from pipeline.train.zero.engine import start_ranks

    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=5)
    found = []
    for stage, precision, count in REDUCED:
        given = [f"engine.zero_stage={stage}", f"engine.precision={precision}", *SGD]
        engine, twin, accumulation = make_engine_and_twin(ranks, [*given, f"train.global_batch={6 * count}"])
        assert accumulation == count
        batches = [noise(2, (16, 16), 4, 10 * ranks.rank + i) for i in range(count)]
        training_step(engine, batches, 0, 0.0)
        counters = engine.counters()
        scale = counters.loss_scale["cur_scale"] if counters.loss_scale else 1
        exact = {name: torch.zeros(p.numel(), dtype=torch.double) for name, p in twin.named_parameters()}
        for batch in batches:
            twin.zero_grad(set_to_none=True)
            add_gradient(twin, batch, scale / count)
            for name, parameter in twin.named_parameters():
                exact[name] += parameter.grad.double().view(-1) / scale
        for gradient in exact.values():
            torch.distributed.all_reduce(gradient)
            gradient /= ranks.world_size
        exact = {stored_name(name): gradient for name, gradient in exact.items()}
        part = engine.part()  # SGD's momentum is that of the first gradient.
        errors = [
            float((momentum - exact[name][start : start + length]).abs().max())
            for (name, start, length), momentum in zip(part.ranges, part.tensors["momentum_buffer"], strict=True)
        ]
        found.append(max(errors) / max(float(gradient.abs().max()) for gradient in exact.values()))
    of_ranks = ranks.gather(found)
    if ranks.is_main:
        print("found", json.dumps([max(errors) for errors in zip(*of_ranks, strict=True)]))


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
    flat: Callable[[Any], None] = internals.use_flat_gradients
    found = []
    for use in (lambda engine: None, flat):
        internals.use_flat_gradients = use
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


def found_by(forge: Forge, num_ranks: int, function: str) -> Any:
    said = forge.start_work(num_ranks, f"test_bf16_gradients:{function}", None).finish()
    return json.loads(next(line for line in said.splitlines() if line.startswith("found "))[6:])


def test_a_step_moves_few_bytes_on_one_rank(forge: Forge) -> None:
    """A copy to fp32 (6 bytes a parameter; each further micro-batch is added, 10), the norm (4), clipping (8) and the
    weights in 16 bits (6). A teacher is a copy of the fp32 average (6).
    """
    assert found_by(forge, 1, "print_bytes") == pytest.approx([24, 34, 44, 6], abs=0.5)


def test_accumulated_gradients_are_reduced_in_fp32(forge: Forge) -> None:
    """Those of a micro-batch alone have 16 bits, and so has their sum: at stages 2 and 3, and without accumulation."""
    errors = found_by(forge, 3, "print_errors")
    assert max(errors[:2]) < 1e-6
    assert all(1e-5 < error < 2**-7 for error in errors[2:])


def test_steps_are_those_of_deepspeed(forge: Forge) -> None:
    found = found_by(forge, 2, "train_both_ways")
    ((losses, norms, many, weights), (own_losses, own_norms, few, own_weights)), parameters = found
    assert min(norms) > 0.1, "they are clipped"
    # The norms of the parameters are put together in another way, so clipped weights can be rounded otherwise in bf16.
    assert all(abs(own - loss) <= 1e-3 * loss for own, loss in zip(own_losses, losses, strict=True))
    assert all(abs(own - norm) <= 1e-6 * norm for own, norm in zip(own_norms, norms, strict=True))
    assert all(abs(own - value) <= 1e-4 * abs(value) for own, value in zip(own_weights, weights, strict=True))
    # For each: two micro-batches converted and added, then measured and clipped.
    assert many - few > 4 * parameters
