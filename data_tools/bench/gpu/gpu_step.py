"""One training step in many configurations, each checked and timed on one device: what `gpu_bench.py` runs in processes of their own.

Every function that `gpu_bench.py` calls is a generator of rows (dicts for JSON). Models start from the same weights, and see one batch.
"""

import contextlib
import copy
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_tools.bench.apart import Row
from data_tools.bench.corpus import NUM_CLASSES, noise_batch, noise_of, objective_run
from data_tools.bench.gpu import roofline
from data_tools.bench.record import machine
from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch, normalise
from pipeline.estimate.memory import rank_memory
from pipeline.model.layers import kernel_names
from pipeline.monitor.profile import device_memory, peak_memory
from pipeline.objectives import optimizers
from pipeline.objectives.classification import Classification
from pipeline.process.distributed import from_environment, use_exact_arithmetic
from pipeline.settings.run import EngineConfig, OptimizerConfig

Step = Callable[[], Tensor]
_LR = 1e-4
_CHECKED_STEPS, _WARM_UP_STEPS, _MIN_ROUNDS = 5, 3, 3
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
ATTENTIONS = tuple(_BACKENDS)


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
    """One way to compute the step; the default is plain PyTorch.

    compile: "", "blocks" (each encoder block by itself, which compiles one for all) or a mode of torch.compile. attention: a
    backend of scaled_dot_product_attention, empty for torch's choice. graph: the whole step, optimizer included, is one CUDA
    graph. deterministic: torch.use_deterministic_algorithms. engine: DeepSpeed's engine at ZeRO stage 1, and the batch copied
    from host memory, as in training.
    """

    compile: str = ""
    attention: str = ""
    fused_optimizer: bool = False
    channels_last: bool = False
    graph: bool = False
    deterministic: bool = False
    engine: bool = False

    def __str__(self) -> str:
        words = [f"compile {self.compile}"] if self.compile else []
        words += [f"attention {self.attention}"] if self.attention else []
        words += [name.replace("_", " ") for name, on in asdict(self).items() if on is True and name != "engine"]
        return ("engine: " if self.engine else "") + (", ".join(words) or "eager")


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
    """One row: speed, memory, losses of the first steps, and whether the steps repeat bit for bit."""
    begin = time.perf_counter()
    with _settings_of_torch(setup, case.device):
        step, reset, state = _engine_step(case, setup) if setup.engine else _plain_step(case, setup, _vit(case))
        losses, repeats = [float(step()) for _ in range(_CHECKED_STEPS)], None
        ready = time.perf_counter() - begin
        if setup.graph:
            step = _captured(step)
        if reset is not None:
            runs = []
            for _ in range(2):
                reset()
                losses = [float(step()) for _ in range(_CHECKED_STEPS)]
                runs.append((losses, [tensor.clone() for tensor in state()]))
            (first, before), (second, after) = runs
            repeats = first == second and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            del runs, before, after
        times = _times(step, case.seconds, case.device == "cuda")
        yield _speed(case, times) | {
            "setup": asdict(setup), "losses": losses, "repeats": repeats, "seconds_to_ready": ready,
            "peak_memory_gib": peak_memory(torch.device(case.device)) / 2**30,
        }  # fmt: skip


def profile(case: Case, setup: Setup) -> Iterator[Row]:
    """One row: seconds a step of each operation of `roofline.operations`, from torch.profiler."""
    steps = 3
    with _settings_of_torch(setup, case.device):
        step, _, _ = _plain_step(case, setup, _vit(case))
        for _ in range(_WARM_UP_STEPS):
            step()
        _synchronize(case)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if case.device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds, record_shapes=True) as profiler:
            for _ in range(steps):
                step()
            _synchronize(case)
    events = profiler.key_averages(group_by_input_shape=True)
    yield {"model": case.name, "batch": case.batch,
           "operations": roofline.measured_rows(events, case.config, case.batch, steps)}  # fmt: skip


def fits(case: Case, sizes: Sequence[int]) -> Iterator[Row]:
    """Rows of the engine's peak memory at growing micro-batches, until one does not fit: {"too_large": size}."""
    step, _, _ = _engine_step(case, Setup(engine=True), sizes)
    for size in sizes:
        try:
            for _ in range(2):
                step()
            _synchronize(case)
        except torch.OutOfMemoryError:
            yield {"too_large": size}
            return
        yield {"fits": size, "peak_memory_gib": peak_memory(torch.device(case.device)) / 2**30}


def objective(case: Case, setup: Setup, loss: str) -> Iterator[Row]:
    """One row of the engine's step of an objective, `train.loss`, with as many of the case's images as are predicted to fit a GPU."""
    from data_tools.bench.training_step import pipeline_engine  # Late, as in `_engine_step`.
    from pipeline.train.loop import training_step

    run = objective_run(loss, case.model, case.pixels, case.batch)
    config = objectives.new_backbone(run, NUM_CLASSES)
    most = device_memory(torch.device(case.device, 0)) or math.inf
    while case.batch > 1 and rank_memory(config, run, case.batch, 1, 1).total > most:
        case = replace(case, batch=case.batch // 2)
    with _settings_of_torch(setup, case.device):
        trained = objectives.create(run, models.build(config)).to(case.device)
        trained.num_steps = 100
        optimizer = optimizers.build(trained, trained.decayed(), run.optimizer, setup.fused_optimizer)
        settings = EngineConfig(precision="bf16", compile=bool(setup.compile))
        engine = pipeline_engine(trained, optimizer, settings, case.batch, from_environment())
        batch = _pinned(noise_of(run, case.batch), case.device)
        numbers = itertools.count()

        def step() -> Tensor:
            return training_step(engine, [batch], next(numbers), _LR).loss

        losses = [float(step()) for _ in range(_CHECKED_STEPS)]
        times = _times(step, case.seconds, case.device == "cuda")
    flops = objectives.training_flops(run, config)
    yield _speed(case, times, flops) | {
        "setup": asdict(setup), "first_losses": losses, "arithmetic": flops / models.training_flops_per_image(case.config),
        "peak_memory_gib": peak_memory(torch.device(case.device)) / 2**30,
        "predicted_gib": rank_memory(config, run, case.batch, 1, 1).total / 2**30,
    }  # fmt: skip


# ---------------------------------------------------------------------- steps
def _plain_step(
    case: Case, setup: Setup, model: nn.Module
) -> tuple[Step, Callable[[], None], Callable[[], list[Tensor]]]:
    """(a step that returns its loss, what returns to the start, what lists the weights): bf16 weights, fp32 master weights."""
    device = torch.device(case.device)
    if setup.graph and device.type != "cuda":
        raise ValueError("a CUDA graph needs a GPU")
    master = model.to(device, torch.float32).train()
    model = copy.deepcopy(master).to(torch.bfloat16)
    optimizer = optimizers.build(master, kernel_names(master), OptimizerConfig(lr=_LR))
    _choose_optimizer(optimizer, setup, capturable=setup.graph)
    weights: list[Tensor] = list(model.parameters())
    masters: list[Tensor] = list(master.parameters())
    start = [weight.detach().clone() for weight in weights]
    for weight in masters:
        weight.grad = torch.zeros_like(weight)
    grads = [weight.grad for weight in masters if weight.grad is not None]
    batch = noise_batch(case.batch, case.pixels)
    images, labels = normalise(batch.images, device, torch.bfloat16), batch.labels[:, 0].to(device)
    layout = torch.channels_last if setup.channels_last else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    forward = _compiled(model, setup)

    def step() -> Tensor:
        _begin_step(setup)
        for weight in weights:
            weight.grad = None
        loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(grads, [weight.grad for weight in weights if weight.grad is not None])
            torch.nn.utils.clip_grad_norm_(masters, OptimizerConfig().clip)
            optimizer.step()
            torch._foreach_copy_(weights, masters)
        return loss.detach().clone()

    @torch.no_grad()
    def reset() -> None:
        torch._foreach_copy_(masters, start)
        torch._foreach_copy_(weights, start)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    return step, reset, lambda: [*weights, *masters]


def _engine_step(case: Case, setup: Setup, sizes: Sequence[int] = ()) -> tuple[Step, None, Callable[[], list[Tensor]]]:
    """Like `_plain_step`, of the engine, which has no way back to the start. sizes: two steps of each in turn, at first."""
    # Late: imports DeepSpeed, which may use CUDA, and processes are forked from one that has imported this file.
    from data_tools.bench.training_step import pipeline_engine
    from pipeline.train.loop import training_step

    if setup.graph:
        raise ValueError("the engine's step cannot be captured in a CUDA graph")
    device = torch.device(case.device)
    model = _vit(case).to(device)
    if setup.compile == "blocks":
        for block in model.blocks:
            block.compile()
    optimizer = optimizers.build(model, kernel_names(model), OptimizerConfig(lr=_LR))
    _choose_optimizer(optimizer, setup)
    settings = EngineConfig(precision="bf16", compile=setup.compile == "default")
    engine = pipeline_engine(Classification(model, "softmax"), optimizer, settings, case.batch, from_environment())
    if setup.compile not in ("", "blocks", "default"):
        engine.engine.compile(compile_kwargs={"mode": setup.compile})
    whole = _pinned(noise_batch(max(sizes or [case.batch]), case.pixels), case.device)
    batches = [
        Batch(
            (whole.views[0][:, :size],), whole.labels[:size], whole.valid[:size], whole.rows[:size], whole.epochs[:size]
        )
        for size in sizes or [case.batch]
    ]
    numbers = itertools.count()

    def step() -> Tensor:
        _begin_step(setup)
        number = next(numbers)
        batch = batches[min(number // 2, len(batches) - 1)]
        return training_step(engine, [batch], number, _LR).loss

    return step, None, lambda: list(model.parameters())


def _begin_step(setup: Setup) -> None:
    if setup.compile:  # Otherwise it only imports Inductor, in each process.
        torch.compiler.cudagraph_mark_step_begin()


def _choose_optimizer(optimizer: torch.optim.Optimizer, setup: Setup, capturable: bool = False) -> None:
    """AdamW's implementation: one fused kernel, or torch's default of kernels over lists of tensors (foreach)."""
    for group in optimizer.param_groups:
        group.update(fused=setup.fused_optimizer, foreach=not setup.fused_optimizer, capturable=capturable)


def _compiled(model: nn.Module, setup: Setup) -> Callable[[Tensor], Tensor]:
    if setup.compile == "blocks":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
        return model
    return torch.compile(model, mode=setup.compile) if setup.compile else model


def _captured(step: Step) -> Step:
    """The step as one CUDA graph. It was called before, so that its memory and the optimizer's state exist."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


@contextlib.contextmanager
def _settings_of_torch(setup: Setup, device: str) -> Iterator[None]:
    with sdpa_kernel(_BACKENDS[setup.attention]) if setup.attention else contextlib.nullcontext():
        if setup.deterministic:
            use_exact_arithmetic(torch.device(device))
        else:
            torch.use_deterministic_algorithms(False)
        yield


# ---------------------------------------------------------------------- models
def _vit(case: Case) -> models.VisionTransformer:
    with torch.device("meta"):
        model = models.build(case.config)
    assert isinstance(model, models.VisionTransformer)
    return _filled(model, torch.device(case.device))


def _filled(model: Any, device: torch.device) -> Any:
    """A model from the meta device, with random weights drawn on the device, which is faster than the models' own."""
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
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
