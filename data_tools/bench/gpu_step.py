"""One training step in many configurations, each checked and timed on one device: what `gpu_bench.py` runs in processes
of their own.

Every function that `gpu_bench.py` calls is a generator of rows (dicts for JSON), and may choose the kernels of its
process. Models start from the same weights, and see one batch.
"""

import copy
import hashlib
import itertools
import math
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data_tools.bench.apart import Row
from data_tools.bench.noise import NUM_CLASSES, noise_views
from pipeline import model as models
from pipeline import objectives
from pipeline.architecture.pixels import RGB8
from pipeline.base.errors import UserError
from pipeline.base.words import on_one_line
from pipeline.data.loading.loader import normalise
from pipeline.estimate.memory import most_images, rank_memory
from pipeline.estimate.plan import make_plan
from pipeline.model.layers import kernel_names
from pipeline.monitor.metrics_file import read_metrics
from pipeline.monitor.profile import StepClock, device_memory, peak_memory
from pipeline.objectives import Objective
from pipeline.objectives.parameters import optimizers
from pipeline.process.distributed import from_environment, use_exact_arithmetic
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import OptimizerConfig, RunConfig

Step = Callable[[], Tensor]
_LR, _MAX_BATCH = 1e-4, 16_384
_CHECKED_STEPS, _PROFILED_STEPS = 5, 5
_SHOWN_KERNELS, _NAME_LENGTH = 25, 90
# Words in the names of kernels; the first kind that fits counts.
_KINDS = {
    "attention": r"flash|fmha|sdpa|attention|softmax",
    "norms": r"norm",
    "optimizer and gradients": r"adam|multi_tensor|foreach",
    "products": r"gemm|cutlass|nvjet|xmma|addmm|::mm|bmm|conv|linear",
    "copies": r"memcpy|memset|copy|cat|fill|zero_|contiguous",
    "elementwise and sums": r"elementwise|triton|reduce|gelu|::(add|mul|div|sub|sum|mean)|normal",
}


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

    engine: DeepSpeed's engine at ZeRO stage 1, and the batch copied from host memory, as in training. compile, fused:
    as the engine's settings, of the engine alone. deterministic: as `engine.deterministic`, of both.
    """

    engine: bool = False
    compile: bool = False
    fused: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        chosen = [name for name, on in asdict(self).items() if on and name != "engine"]
        return ("engine: " if self.engine else "") + (", ".join(chosen) or "eager")


# As in a run on a GPU.
DEFAULTS = Setup(engine=True, fused=True, deterministic=True)


def settings(case: Case, *overrides: str) -> RunConfig:
    """A run of the case, with the defaults."""
    return schema.load(
        RunConfig,
        None,
        [
            "name=bench",
            "data.path=none",
            "data.streams=1",
            "train.length=1000000 steps",
            "schedule.warmup=0 steps",
            "train.loss=softmax",
            f"model.name={case.model}",
            f"model.image_size={case.pixels}",
            f"train.global_batch={case.batch}",
            f"train.micro_batch={case.batch}",
            *overrides,
        ],
    )


def matrix_product(device: str) -> Iterator[Row]:
    """Facts about the device, and TFLOP/s of a plain bf16 product of two square matrices."""
    side, timed = 256, 0.2
    if device == "cuda":
        side, timed = 8192, 2.0
        yield {"gpu": torch.cuda.get_device_name(), "clocks": _clocks()}
    yield {"side": side, "tflops": _product_tflops(side, side, side, device, timed)}


def _clocks() -> str:
    """Clocks and power of the GPU now, and their limits, as nvidia-smi names them."""
    query = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_event_reasons.active"
    try:
        return subprocess.check_output(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not measured: {error}"


def _product_tflops(rows: int, inner: int, columns: int, device: str, seconds: float) -> float:
    a, b = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((rows, inner), (inner, columns)))
    return 2 * rows * inner * columns / _median_seconds(lambda: torch.mm(a, b), seconds) / 1e12


def block_products(case: Case) -> Iterator[Row]:
    """A row for each dense layer of a block, in TFLOP/s: its product, and those of its two gradients."""
    rows, D, M = case.batch * case.config.num_tokens, case.config.width, case.config.mlp_width
    for name, (inner, columns) in {"qkv": (D, 3 * D), "out": (D, D), "up": (D, M), "down": (M, D)}.items():
        shapes = {"forward": (rows, inner, columns), "input": (rows, columns, inner), "weight": (columns, rows, inner)}
        seconds = case.seconds / 10
        found = {f"{of}_tflops": _product_tflops(*shape, case.device, seconds) for of, shape in shapes.items()}
        yield {"layer": name, "rows": rows, **found}


def attention_kernels(case: Case, deterministic: bool) -> Iterator[Row]:
    """A row for each kernel of attention and number of tokens: forward and backward pass of one layer in bf16.

    197 and 257 are the tokens of L/16 and H/14, 256 those of H/14 without a class token, 37 those of a small view.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention

    if deterministic:
        use_exact_arithmetic(torch.device(case.device))
    flex: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    tiles = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32)
    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    kernels = dict.fromkeys(names, F.scaled_dot_product_attention)
    kernels |= {"flex": flex, "flex, tiles of 32": partial(flex, kernel_options=tiles)}
    for tokens, width in ((197, 64), (257, 80), (256, 80), (37, 64)):
        shape = (case.batch, case.config.num_heads, tokens, width)
        inputs = [torch.randn(shape, device=case.device).to(torch.bfloat16).requires_grad_() for _ in range(3)]
        for name, attend in kernels.items():
            row = {"tokens": tokens, "head_dim": width, "kernel": name, "deterministic": deterministic}
            step = partial(_forward_and_backward, attend, inputs)
            try:
                with sdpa_kernel(getattr(SDPBackend, name, SDPBackend.MATH)):
                    step()
                    seconds = _median_seconds(step, case.seconds / (4 if case.device == "cuda" else 40))
            except Exception as error:  # What this machine or this mode does not have.
                yield row | {"refused": f"{type(error).__name__}: {on_one_line(error)}"[:200]}
                continue
            yield row | {"ms": 1e3 * seconds, "tflops": 14 * math.prod(shape) * tokens / seconds / 1e12}


def _forward_and_backward(attend: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    torch.autograd.grad(attend(*inputs).sum(), inputs)


def profile(case: Case, setup: Setup) -> Iterator[Row]:
    """One row of a step: ms of its parts by the engine's clock, the share of each kind of kernel in their time, and the
    slowest kernels. "other" kernels are those of no known name.
    """
    engine, steps = _engine(case, setup)
    step = steps(case.batch)

    def some_steps() -> None:
        for _ in range(_PROFILED_STEPS):
            float(step())

    some_steps()
    engine.clock.read()
    some_steps()
    parts = {f"{name}_ms": 1e3 * value / _PROFILED_STEPS for name, value in engine.clock.read().items()}
    with torch.profiler.profile() as profiler:
        some_steps()
    found: dict[str, float] = {
        event.key: (event.self_device_time_total or event.self_cpu_time_total) / 1e3 / _PROFILED_STEPS
        for event in profiler.key_averages()
        if event.device_type.name.lower() == case.device  # With a GPU, its kernels alone.
    }
    kinds: dict[str, float] = defaultdict(float)
    for name, ms in found.items():
        kinds[kind_of(name)] += ms
    total = sum(found.values())
    slowest = sorted(found, key=lambda name: -found[name])[:_SHOWN_KERNELS]
    yield {
        "setup": asdict(setup),
        "kernels_ms": total,
        **parts,
        **{f"{kind}_share": ms / total for kind, ms in kinds.items()},
        "attention_kernels": sorted(name[:_NAME_LENGTH] for name in found if kind_of(name) == "attention"),
        "slowest_ms": {name[:_NAME_LENGTH]: found[name] for name in slowest},
    }


def kind_of(kernel: str) -> str:
    """What a kernel of a GPU, or an operator of a CPU, computes: a key of `_KINDS`, or "other"."""
    return next((kind for kind, words in _KINDS.items() if re.search(words, kernel, re.IGNORECASE)), "other")


def measure(case: Case, setup: Setup) -> Iterator[Row]:
    """One row: speed, memory and losses of the first steps."""
    step = _engine(case, setup)[1](case.batch) if setup.engine else _plain_step(case, setup)
    flops = models.training_flops_per_image(case.config)
    losses, speed = _timed(case, step, flops)
    yield speed | {"setup": asdict(setup), "losses": losses, "gflops": flops / 1e9}


def bits(case: Case, setup: Setup) -> Iterator[Row]:
    """One row: a hash of the weights after the first steps, in a process that begins with an empty cache of compiled
    code.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        engine, steps = _engine(case, setup)
        step, digest = steps(case.batch), hashlib.sha256()
        for _ in range(_CHECKED_STEPS):
            digest.update(step().cpu().numpy().tobytes())
        for shard in engine.shards:
            digest.update(shard.weights.detach().cpu().numpy().tobytes())
        yield {"setup": asdict(setup), "sha256": digest.hexdigest()}


def fits(case: Case) -> Iterator[Row]:
    """Rows of the engine's peak memory at growing micro-batches, until one does not fit: around the largest that
    `pipeline/estimate` expects to fit this GPU.
    """
    sizes, most = [case.batch, 2 * case.batch], 0  # A CPU has no limit that may be tried.
    if memory := device_memory(torch.device(case.device, 0)):
        most = most_images(settings(case), case.config, 1, 1, memory, _MAX_BATCH)
        sizes = [max(1, round(most * share)) for share in (0.7, 0.8, 0.9, 1, 1.025, 1.05, 1.1, 1.2, 1.35, 1.5)]
    _, steps = _engine(case, Setup(engine=True))
    for size in sizes:
        is_fit = True
        try:
            step = steps(size)
            float(step()), float(step())
        except torch.OutOfMemoryError:
            is_fit = False
        yield {"micro_batch": size, "predicted": most, "fits": is_fit, "peak_memory_gib": _peak_gib(case)}
        if not is_fit:
            return


def objective(case: Case, loss: str) -> Iterator[Row]:
    """One row of the engine's step of an objective, `train.loss`, with as many of the case's images as are predicted to
    fit a GPU.
    """
    # For each objective the defaults are those of its recipe for ImageNet-1k.
    run = settings(case, f"train.loss={loss}", "model.representation=false", "augment.crop=random_resized")
    config = objectives.new_backbone(run, NUM_CLASSES)
    most = device_memory(torch.device(case.device, 0)) or math.inf
    while case.batch > 1 and rank_memory(config, run, case.batch, 1, 1).total > most:
        case = replace(case, batch=case.batch // 2)
    flops = objectives.training_flops(run, config)
    losses, speed = _timed(case, _engine(case, DEFAULTS, run, models.build(config))[1](case.batch), flops)
    yield speed | {
        "setup": asdict(DEFAULTS),
        "first_losses": losses,
        "arithmetic": flops / models.training_flops_per_image(case.config),
        "predicted_gib": rank_memory(config, run, case.batch, 1, 1).total / 2**30,
    }


def from_shards(case: Case, data: str, steps: int, log_every: int, decoders: int) -> Iterator[Row]:
    """One row: medians over the two rounds of a run on a data set, each of `steps` steps with a checkpoint, after one
    round more.

    log_every: steps between log lines. decoders: threads.
    The last log line precedes the evaluation at the end of the run.
    """
    from pipeline.train.start import run_training  # Late, as in `pipeline_engine`.

    with tempfile.TemporaryDirectory() as folder:
        run = settings(
            case,
            f"out={folder}",
            f"data.path={data}",
            f"data.threads={decoders}",
            f"train.length={3 * steps} steps",
            f"train.log_every={log_every}",
            "evaluate.every=100%",
            f"evaluate.batch={case.batch}",
            f"checkpoint.every={steps} steps",
            "checkpoint.keep=1",
            "track.enabled=false",
            "track.figures=false",
        )
        run_training(run)
        records, _ = read_metrics(Path(folder) / "bench/metrics.jsonl")
    lines = [record.metrics for record in records if record.step > steps and "images_per_second" in record.metrics]
    metrics = ("images_per_second", "mfu", "data_wait", "peak_memory_gib", "checkpoint_blocked_seconds")
    found = {name: [line[name] for line in lines if name in line] for name in metrics}
    yield {name: statistics.median(values) for name, values in found.items() if values}  # A CPU has no mfu.


# ---------------------------------------------------------------------- steps
def _plain_step(case: Case, setup: Setup) -> Step:
    """A step that returns its loss: bf16 weights, fp32 master weights."""
    device = _device(case, setup)
    master = _vit(case).train()
    model = copy.deepcopy(master).to(torch.bfloat16)
    optimizer = optimizers.build(master, kernel_names(master), OptimizerConfig(lr=_LR), fused=False)
    weights: list[Tensor] = list(model.parameters())
    masters: list[Tensor] = list(master.parameters())
    grads = [torch.zeros_like(weight) for weight in masters]
    for weight, grad in zip(masters, grads, strict=True):
        weight.grad = grad
    batch = noise_views([(1, case.pixels, case.pixels)], case.batch)
    # As the engine gets them: channels last.
    images, labels = normalise(batch.images, device, torch.bfloat16, RGB8), batch.labels[:, 0].to(device)

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


def _device(case: Case, setup: Setup) -> torch.device:
    """The case's device, with kernels as the setup chooses for this process."""
    device = torch.device(case.device)
    if setup.deterministic:
        use_exact_arithmetic(device)
    return device


def _engine(
    case: Case, setup: Setup, run: RunConfig | None = None, model: models.Model | None = None
) -> tuple[Any, Callable[[int], Step]]:
    """The engine, and a function from a number of images to its step on so much noise, of the run's objective."""
    from pipeline.train.loop import training_step  # Late, as in `pipeline_engine`.

    device, run = _device(case, setup), run or settings(case)
    trained = objectives.create(run, model or _vit(case)).to(device)
    run = replace(run, engine=replace(run.engine, compile=setup.compile, deterministic=setup.deterministic))
    engine = pipeline_engine(run, trained, optimizers.build(trained, trained.decayed(), run.optimizer, setup.fused))
    shapes = [(group.count, *ImageSize.parse(group.size)) for group in objectives.kind(run.train.loss).views(run)]
    numbers = itertools.count()

    def of(size: int) -> Step:
        batch = noise_views(shapes, size)
        batch.drawn.update(trained.draw(batch, training=True))
        if device.type == "cuda":
            batch = replace(batch, views=tuple(view.pin_memory() for view in batch.views))
        return lambda: training_step(engine, [batch], next(numbers), _LR).loss

    return engine, of


def pipeline_engine(run: RunConfig, objective: Objective, optimizer: torch.optim.Optimizer) -> Any:
    """The engine of a run on one rank."""
    # Late: imports DeepSpeed, which may use CUDA, and processes are forked from one that has imported this file.
    from pipeline.train.zero.engine import Engine, start_ranks

    start_ranks(ranks := from_environment())
    plan = make_plan(run, 10**6, 1)
    objective.num_steps = plan.steps
    return Engine(objective, optimizer, run.engine, run.optimizer, plan, ranks, 0, StepClock(ranks.device))


def _vit(case: Case) -> models.Model:
    """A model with random weights drawn on the device, which is faster than its own initialisation."""
    with torch.device("meta"):
        model = models.build(case.config)
    model.to_empty(device=case.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(name.endswith("norm.weight"))
    return model


# ---------------------------------------------------------------------- timing
def _timed(case: Case, step: Step, flops: float) -> tuple[list[float], Row]:
    """Losses of the first steps; speed and memory. flops: of training on an image."""
    begin = time.perf_counter()
    losses = [float(step()) for _ in range(_CHECKED_STEPS)]
    ready = time.perf_counter() - begin
    seconds = _median_seconds(step, case.seconds)
    return losses, {
        "model": case.name,
        "batch": case.batch,
        "ms": 1e3 * seconds,
        "images_per_second": case.batch / seconds,
        "tflops": flops * case.batch / seconds / 1e12,
        "peak_memory_gib": _peak_gib(case),
        "seconds_of_first_steps": ready,
    }


def _median_seconds(step: Callable[[], object], seconds: float) -> float:
    """Median time of a step, of those that take `seconds` together; of a GPU, until it is done."""
    from torch.utils.benchmark import Timer  # Late: it uses CUDA, and processes are forked.

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


def _peak_gib(case: Case) -> float:
    return peak_memory(torch.device(case.device)) / 2**30
