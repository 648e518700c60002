"""One training step in many configurations, each checked and timed on one device: what `gpu_bench.py` runs in processes
of their own.

Every function that `gpu_bench.py` calls is a generator of rows (dicts for JSON), and may choose the kernels of its
process. Models start from the same weights, and see one batch.
"""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
from pipeline.data.loading.loader import normalise
from pipeline.estimate.memory import rank_memory
from pipeline.estimate.plan import make_plan
from pipeline.model.layers import kernel_names
from pipeline.monitor.profile import StepClock, device_memory, peak_memory
from pipeline.objectives import Objective
from pipeline.objectives.parameters import optimizers
from pipeline.process.distributed import from_environment, use_exact_arithmetic
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import OptimizerConfig, RunConfig

Step = Callable[[], Tensor]
_LR = 1e-4
_CHECKED_STEPS = 5


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
        yield {"gpu": torch.cuda.get_device_name()}
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in "ab")
    seconds = _median_seconds(lambda: torch.mm(a, b), timed)
    yield {"side": side, "tflops": 2 * side**3 / seconds / 1e12}


def measure(case: Case, setup: Setup) -> Iterator[Row]:
    """One row: speed, memory and losses of the first steps."""
    step = _engine_step(case, setup) if setup.engine else _plain_step(case, setup)
    flops = models.training_flops_per_image(case.config)
    losses, speed = _timed(case, step, flops)
    yield speed | {"setup": asdict(setup), "losses": losses, "gflops": flops / 1e9}


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
    losses, speed = _timed(case, _engine_step(case, DEFAULTS, run, models.build(config)), flops)
    yield speed | {
        "setup": asdict(DEFAULTS),
        "first_losses": losses,
        "arithmetic": flops / models.training_flops_per_image(case.config),
        "predicted_gib": rank_memory(config, run, case.batch, 1, 1).total / 2**30,
    }


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


def _engine_step(case: Case, setup: Setup, run: RunConfig | None = None, model: models.Model | None = None) -> Step:
    """The engine's step of the run's objective, on noise."""
    from pipeline.train.loop import training_step  # Late, as in `pipeline_engine`.

    device, run = _device(case, setup), run or settings(case)
    trained = objectives.create(run, model or _vit(case)).to(device)
    run = replace(run, engine=replace(run.engine, compile=setup.compile, deterministic=setup.deterministic))
    engine = pipeline_engine(run, trained, optimizers.build(trained, trained.decayed(), run.optimizer, setup.fused))
    shapes = [(group.count, *ImageSize.parse(group.size)) for group in objectives.kind(run.train.loss).views(run)]
    numbers = itertools.count()

    batch = noise_views(shapes, case.batch)
    batch.drawn.update(trained.draw(batch, training=True))
    if device.type == "cuda":
        batch = replace(batch, views=tuple(view.pin_memory() for view in batch.views))
    return lambda: training_step(engine, [batch], next(numbers), _LR).loss


def pipeline_engine(run: RunConfig, objective: Objective, optimizer: torch.optim.Optimizer) -> Any:
    """The engine of a run on one rank."""
    # Late: imports DeepSpeed, which may use CUDA, and processes are forked from one that has imported this file.
    from pipeline.train.zero.engine import Engine, start_ranks

    start_ranks(ranks := from_environment(), timeout_minutes=10)
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
