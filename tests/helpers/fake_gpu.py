"""Training steps on a GPU that does not exist: fake tensors, which have a device, a shape and a number type, but no
values.

The real engine with DeepSpeed, as rank 0 of two; collectives do nothing (torch's "fake" backend). Prints what each case
found as JSON. Must be the first to import torch: started by tests/train/test_fake_gpu.py.

    python fake_gpu.py LIBRARY '{"name": ["model.name=...", ...], ...}'

LIBRARY: fake_gpu.cpp, compiled. A case is a name and the overrides of a RunConfig.
"""

import ctypes
import gc
import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

RANKS, CLASSES = 2, 4
TINY = [
    "name=x",
    "data.path=x",
    "data.streams=2",
    "train.length=10 steps",
    "schedule.warmup=0 steps",
    "train.loss=softmax",
    "train.micro_batch=2",
    "train.global_batch=8",
    "model.name=ViT-Ti/8",
    "model.image_size=16",
    "model.width=32",
    "model.depth=1",
    "model.mlp_width=64",
    "model.num_heads=2",
]


def load_library(path: str) -> None:
    """Load a library ahead of torch's own, of which it only needs c10."""
    spec = importlib.util.find_spec("torch")
    assert "torch" not in sys.modules
    for library in (f"{spec.submodule_search_locations[0]}/lib/libc10.so", path):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def pretend() -> None:
    """Make torch and DeepSpeed believe in the GPU where they ask for more than a tensor's device, and in the other
    rank.
    """
    import torch
    import torch.distributed as dist
    from torch import library
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pipeline.train.zero.internals import deepspeed  # noqa: F401

    # isort: split
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator

    class Gpu(CPU_Accelerator):
        """Streams, events and pinned memory are those of a CPU: none."""

        def device_name(self, device_index: int | None = None) -> str:
            return "cuda" if device_index is None else f"cuda:{device_index}"

        def current_device_name(self) -> str:
            return "cuda:0"

        def current_device(self) -> int:
            return 0

        def is_fp16_supported(self) -> bool:
            return True

        def communication_backend_name(self) -> str:
            return "fake"

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "cuda"

    for name in ("Byte", "Int", "Long", "Half", "BFloat16", "Float", "Double"):
        dtype = getattr(torch, f"{name}Storage").dtype
        of_dtype = property(lambda self, dtype=dtype: lambda data: torch.tensor(data, dtype=dtype, device="cuda:0"))
        setattr(Gpu, f"{name}Tensor", of_dtype)
    set_accelerator(Gpu())
    # Compares lists of numbers between the ranks, once for each new order of the modules; here rank 0 would receive
    # zeros.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: Mock()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.Tensor.record_stream = lambda tensor, stream: None
    # torch has one of AdamW's. It changes tensors in place, whose values are not there.
    library.register_fake(torch.ops.aten._fused_sgd_.default, lambda *tensors, **settings: None)
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(RANKS), LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())


def move(model: Any, gpu: Any) -> None:
    """As `model.to(gpu)`, which cannot move fake parameters."""
    import torch

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty_like(parameter, device=gpu))
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device=gpu)
    model.to = lambda *_: model


def step(overrides: list[str]) -> dict[str, Any]:
    """The last of a few steps that log nothing: host synchronisations, devices and number types."""
    import torch
    from host_syncs import HostSyncs
    from rank_memory import noise
    from torch._subclasses import FakeTensorMode

    from pipeline import objectives
    from pipeline.data.loading.mix import draw_mixing
    from pipeline.estimate.plan import make_plan
    from pipeline.model import build
    from pipeline.monitor.profile import StepClock
    from pipeline.objectives.parameters import optimizers
    from pipeline.process.distributed import Ranks
    from pipeline.settings import schema
    from pipeline.settings.quantities import ImageSize
    from pipeline.settings.run import RunConfig
    from pipeline.train.loop import training_step
    from pipeline.train.zero.engine import Engine

    # isort: split
    from deepspeed.accelerator import get_accelerator

    config = schema.load(RunConfig, None, overrides)
    gpu = torch.device("cuda", 0)
    ranks, plan, syncs = Ranks(0, 0, RANKS, gpu), make_plan(config, 1000, RANKS), HostSyncs()
    # So DeepSpeed waits for all work of the GPU.
    get_accelerator().synchronize = lambda *_: syncs.note("synchronize")
    FakeTensorMode.__deepcopy__ = lambda mode, memo: mode  # A teacher is a copy, whose tensors are of the same mode.
    with FakeTensorMode(), syncs:
        with torch.device("meta"):  # Initial values are drawn until they are in range, and fake ones never are.
            model = build(objectives.new_backbone(config, CLASSES))
        model.activation_checkpointing = config.engine.activation_checkpointing
        objective = objectives.create(config, model)
        objective.num_steps = plan.steps
        move(objective, gpu)
        fused = optimizers.is_fused(config.engine, gpu)
        optimizer = optimizers.build(objective, objective.decayed(), config.optimizer, fused)
        # CUDA's events cannot be faked: timed as on a CPU.
        clock = StepClock(torch.device("cpu"))
        engine = Engine(objective, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock)
        # The first step makes the optimizer's state, and DeepSpeed traces its first micro-batch at stage 3. Its timers,
        # which are those of any precision, would begin at the third step.
        for number in range(3 if (config.engine.zero_stage, config.engine.precision) == (3, "fp32") else 2):
            batch = noise(plan.micro_batch, config.model.image_size, CLASSES, 0)
            shapes = [
                (group.count, plan.micro_batch, *ImageSize.parse(group.size), 3) for group in objective.views(config)
            ]
            views = tuple(torch.zeros(shape, dtype=torch.uint8).pin_memory() for shape in shapes)
            batch.drawn.update(objective.draw(batch, training=True))
            batches = [replace(batch, views=views)] * plan.accumulation  # As `Loader` with pin=True.
            if not number:  # One micro-batch does that: DeepSpeed steps where this counter reaches a multiple.
                engine.engine.micro_steps, batches = plan.accumulation - 1, batches[:1]
            mixing = draw_mixing(config.augment, config.model.image_size, config.seed, number)
            syncs.found.clear()
            syncs.products.clear()
            result = training_step(engine, batches, number, 1e-3, mixing)
    states = [value for state in engine.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "syncs": dict(syncs.found),
        "products": sorted(syncs.products),
        "skipped": engine.skipped_steps,
        "loss": [str(result.loss.device), str(result.loss.dtype)],
        "states": sorted({f"{state.device.type} {state.dtype}" for state in states}),
    }


def main() -> None:
    load_library(sys.argv[1])
    pretend()
    for name, overrides in json.loads(sys.argv[2]).items():
        # As the start of a run does: DeepSpeed looks for garbage dozens of times, each time among all that is there.
        gc.freeze()
        print("found", json.dumps([name, step(overrides)]), flush=True)


if __name__ == "__main__":
    main()
