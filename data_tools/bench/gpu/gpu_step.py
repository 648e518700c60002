"""One training step in many configurations, each checked and timed on one device: what `gpu_bench.py` runs in processes of their own.

Every function that `gpu_bench.py` calls is a generator of rows (dicts for JSON), and may choose the kernels of its process. Models start from the same weights, and see one batch.
"""

import copy
import gc
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from data_tools.bench.apart import Row
from data_tools.bench.corpus import NUM_CLASSES, noise_batch, noise_of, objective_run
from data_tools.bench.record import machine
from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.pixels import RGB8
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch, normalise
from pipeline.estimate.memory import rank_memory
from pipeline.estimate.plan import Plan
from pipeline.model.layers import kernel_names
from pipeline.monitor.metrics_file import read_metrics
from pipeline.monitor.profile import StepClock, device_memory, peak_memory
from pipeline.objectives import Objective
from pipeline.objectives.classification import Classification
from pipeline.objectives.parameters import optimizers
from pipeline.process.distributed import from_environment, use_exact_arithmetic
from pipeline.settings import schema
from pipeline.settings.run import EngineConfig, OptimizerConfig, RunConfig

if TYPE_CHECKING:
    from pipeline.train.zero.engine import Engine

Step = Callable[[], Tensor]
_LR = 1e-4
_CHECKED_STEPS, _MIN_ROUNDS = 5, 3
# Metrics of a run.
_OF_A_RUN = ("images_per_second", "mfu", "data_wait", "peak_memory_gib", "checkpoint_blocked_seconds")


@dataclass(frozen=True)
class Case:
    """A model and a batch size. seconds: for which each configuration is timed."""

    model: str
    pixels: int
    batch: int
    seconds: float
    device: str = "cuda"

    @property
    def name(self) -> str:
        return f"{self.model}@{self.pixels}"

    @property
    def config(self) -> models.ViTConfig:
        """The model's architecture. Raises UserError for an unknown name, and for a ResNet."""
        config = models.configure(self.model, self.pixels, NUM_CLASSES)
        if not isinstance(config, models.ViTConfig):
            raise UserError(f"models: {self.model} is not a Vision Transformer.")
        return config


@dataclass(frozen=True)
class Setup:
    """One way to compute the step; the default is plain PyTorch, with torch's choice of kernels.

    engine: DeepSpeed's engine at ZeRO stage 1, and the batch copied from host memory, as in training. compile, fused: as the engine's
    settings, of the engine alone. deterministic: as `engine.deterministic`, of both.
    """

    engine: bool = False
    compile: bool = False
    fused: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        chosen = [name for name, on in asdict(self).items() if on and name != "engine"]
        return ("engine: " if self.engine else "") + (", ".join(chosen) or "eager")


# As a run on a GPU has it.
DEFAULTS = Setup(engine=True, fused=True, deterministic=True)


def matrix_product(device: str, side: int) -> Iterator[Row]:
    """Facts about the device, and TFLOP/s of a plain bf16 product of two (side, side) matrices."""
    is_gpu = device == "cuda"
    gpu = torch.cuda.get_device_name() if is_gpu else ""
    memory = device_memory(torch.device(device, 0)) if is_gpu else None
    yield {"machine": machine(gpu), "device_memory": memory}
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = _times(lambda: torch.mm(a, b, out=out), 2.0 if is_gpu else 0.2, is_gpu)
    yield {"side": side, "tflops": 2 * side**3 / statistics.median(times) / 1e12}


def measure(case: Case, setup: Setup) -> Iterator[Row]:
    """One row: speed, memory, and losses of the first steps."""
    begin = time.perf_counter()
    if setup.deterministic:
        use_exact_arithmetic(torch.device(case.device))
    step = _engine_step(case, setup) if setup.engine else _plain_step(case)
    losses = [float(step()) for _ in range(_CHECKED_STEPS)]
    ready = time.perf_counter() - begin
    times = _times(step, case.seconds, case.device == "cuda")
    yield _speed(case, times) | {
        "setup": asdict(setup), "losses": losses, "seconds_to_ready": ready,
        "peak_memory_gib": peak_memory(torch.device(case.device)) / 2**30,
    }  # fmt: skip


def fits(case: Case, sizes: Sequence[int]) -> Iterator[Row]:
    """Rows of the engine's peak memory at growing micro-batches, until one does not fit: {"too_large": size}."""
    step = _engine_step(case, Setup(engine=True), sizes)
    for size in sizes:
        try:
            for _ in range(2):
                step()
            _synchronize(case)
        except torch.OutOfMemoryError:
            yield {"too_large": size}
            return
        yield {"fits": size, "peak_memory_gib": peak_memory(torch.device(case.device)) / 2**30}


def objective(case: Case, loss: str) -> Iterator[Row]:
    """One row of the engine's step of an objective, `train.loss`, with as many of the case's images as are predicted to fit a GPU."""
    from pipeline.train.loop import training_step  # Late, as in `pipeline_engine`.

    run = objective_run(loss, case.model, case.pixels, case.batch)
    config = objectives.new_backbone(run, NUM_CLASSES)
    most = device_memory(torch.device(case.device, 0)) or math.inf
    while case.batch > 1 and rank_memory(config, run, case.batch, 1, 1).total > most:
        case = replace(case, batch=case.batch // 2)
    use_exact_arithmetic(torch.device(case.device))
    trained = objectives.create(run, models.build(config)).to(case.device)
    trained.num_steps = 100
    optimizer = optimizers.build(trained, trained.decayed(), run.optimizer, DEFAULTS.fused)
    engine = pipeline_engine(trained, optimizer, EngineConfig(precision="bf16"), case.batch)
    batch = _pinned(noise_of(run, case.batch), case.device)
    numbers = itertools.count()

    def step() -> Tensor:
        return training_step(engine, [batch], next(numbers), _LR).loss

    losses = [float(step()) for _ in range(_CHECKED_STEPS)]
    times = _times(step, case.seconds, case.device == "cuda")
    flops = objectives.training_flops(run, config)
    yield _speed(case, times, flops) | {
        "setup": asdict(DEFAULTS), "first_losses": losses, "arithmetic": flops / models.training_flops_per_image(case.config),
        "peak_memory_gib": peak_memory(torch.device(case.device)) / 2**30,
        "predicted_gib": rank_memory(config, run, case.batch, 1, 1).total / 2**30,
    }  # fmt: skip


def from_shards(case: Case, data: str, steps: int, log_every: int, decoders: int, peak_tflops: float) -> Iterator[Row]:
    """One row: medians over the two rounds of a run on a data set, each of `steps` steps with a checkpoint, after one round more.

    log_every: steps between log lines; 0 is one in each round. decoders: threads. peak_tflops: 0 looks it up.
    The last log line precedes the evaluation at the end of the run.
    """
    from pipeline.train.run import run_training  # Late, as in `pipeline_engine`.

    with tempfile.TemporaryDirectory() as folder:
        given = {
            "name": "bench",
            "out": folder,
            "model": {"name": case.model, "image_size": case.pixels},
            "data": {"path": data, "threads": decoders, "streams": math.gcd(case.batch, 16)},
            "train": {
                "length": f"{3 * steps} steps", "log_every": log_every or steps, "loss": "softmax",
                "global_batch": case.batch, "micro_batch": case.batch,
            },
            "schedule": {"warmup": "0 steps"},
            "engine": {"precision": "bf16", "peak_tflops": peak_tflops},
            "evaluate": {"every": "100%", "batch": case.batch},
            "checkpoint": {"every": f"{steps} steps", "keep": 1},
            "track": {"enabled": False, "figures": False},
        }  # fmt: skip
        settings = schema.build(RunConfig, given, "the benchmark")
        settings.check()
        run_training(settings)
        records, _ = read_metrics(Path(folder) / "bench/metrics.jsonl")
    lines = [record.metrics for record in records if record.step > steps and "images_per_second" in record.metrics]
    found = {name: statistics.median(line[name] for line in lines if name in line) for name in _OF_A_RUN}
    # Of a minute with one checkpoint.
    yield {**found, "checkpoint_share_at_one_a_minute": found["checkpoint_blocked_seconds"] / 60}


# ---------------------------------------------------------------------- steps
def _plain_step(case: Case) -> Step:
    """A step that returns its loss: bf16 weights, fp32 master weights."""
    device = torch.device(case.device)
    master = _vit(case).train()
    model = copy.deepcopy(master).to(torch.bfloat16)
    optimizer = optimizers.build(master, kernel_names(master), OptimizerConfig(lr=_LR))
    _choose_optimizer(optimizer, fused=False)
    weights: list[Tensor] = list(model.parameters())
    masters: list[Tensor] = list(master.parameters())
    for weight in masters:
        weight.grad = torch.zeros_like(weight)
    grads = [weight.grad for weight in masters if weight.grad is not None]
    batch = noise_batch(case.batch, case.pixels)
    images, labels = normalise(batch.images, device, torch.bfloat16, RGB8), batch.labels[:, 0].to(device)
    images = images.contiguous()

    def step() -> Tensor:
        for weight in weights:
            weight.grad = None
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(grads, [weight.grad for weight in weights if weight.grad is not None])
            torch.nn.utils.clip_grad_norm_(masters, OptimizerConfig().clip)
            optimizer.step()
            torch._foreach_copy_(weights, masters)
        return loss.detach().clone()

    return step


def _engine_step(case: Case, setup: Setup, sizes: Sequence[int] = ()) -> Step:
    """Like `_plain_step`, of the engine. sizes: two steps of each in turn, at first."""
    from pipeline.train.loop import training_step  # Late, as in `pipeline_engine`.

    model = _vit(case)
    optimizer = optimizers.build(model, kernel_names(model), OptimizerConfig(lr=_LR))
    _choose_optimizer(optimizer, setup.fused)
    settings = EngineConfig(precision="bf16", compile=setup.compile)
    engine = pipeline_engine(Classification(model, "softmax"), optimizer, settings, case.batch)
    whole = _pinned(noise_batch(max(sizes or [case.batch]), case.pixels), case.device)
    batches = [
        Batch(
            (whole.views[0][:, :size],), whole.labels[:size], whole.valid[:size], whole.rows[:size], whole.epochs[:size]
        )
        for size in sizes or [case.batch]
    ]
    numbers = itertools.count()

    def step() -> Tensor:
        number = next(numbers)
        batch = batches[min(number // 2, len(batches) - 1)]
        return training_step(engine, [batch], number, _LR).loss

    return step


def pipeline_engine(
    objective: Objective, optimizer: torch.optim.Optimizer, config: EngineConfig, batch: int
) -> "Engine":
    """The engine of a run without end on one rank, with `batch` images in a step."""
    # Late: imports DeepSpeed, which may use CUDA, and processes are forked from one that has imported this file.
    from pipeline.train.zero.engine import Engine, start_ranks

    start_ranks(ranks := from_environment(), timeout_minutes=10)
    plan = Plan(steps=10**6, warmup=0, evaluate_every={}, checkpoint_every=10**6, keep_every=0, accumulation=1, micro_batch=batch,
                num_samples=10**6, global_batch=batch, world_size=1)  # fmt: skip
    return Engine(objective, optimizer, config, OptimizerConfig(), plan, ranks, 0, StepClock(ranks.device))


def _choose_optimizer(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """AdamW's implementation: one fused kernel, or torch's default of kernels over lists of tensors (foreach)."""
    for group in optimizer.param_groups:
        group.update(fused=fused, foreach=not fused)


def _vit(case: Case) -> models.VisionTransformer:
    """With random weights drawn on the device, which is faster than the model's own."""
    with torch.device("meta"):
        model = models.build(case.config)
    assert isinstance(model, models.VisionTransformer)
    model.to_empty(device=case.device)
    generator = torch.Generator(case.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    assert not list(model.buffers()), "they would be uninitialised"
    return model


# ---------------------------------------------------------------------- timing
def _times(step: Callable[[], object], seconds: float, on_gpu: bool) -> list[float]:
    """Seconds of a step, of each of several rounds that take `seconds` together; a round is at least one step."""

    def round_of(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    if on_gpu:
        torch.cuda.synchronize()
    first = round_of(2)
    count = max(1, round(seconds / 5 / first))
    gc.collect()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < _MIN_ROUNDS or time.perf_counter() < end:
        found.append(round_of(count))
    return found


def _pinned(batch: Batch, device: str) -> Batch:
    return replace(batch, views=tuple(view.pin_memory() for view in batch.views)) if device == "cuda" else batch


def _speed(case: Case, times: Sequence[float], flops_per_image: float = 0.0) -> Row:
    """flops_per_image: 0 is classification's."""
    seconds = statistics.median(times)
    flops = (flops_per_image or models.training_flops_per_image(case.config)) * case.batch / seconds
    return {"model": case.name, "batch": case.batch, "ms": 1e3 * seconds, "slowest_ms": 1e3 * max(times),
            "images_per_second": case.batch / seconds, "tflops": flops / 1e12}  # fmt: skip


def _synchronize(case: Case) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()
