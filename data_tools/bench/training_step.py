"""Benchmark of the training step, beside a plain PyTorch loop with the same model, batch and optimizer; or of a short run.

Both loops alternate in one process, so that other load on the machine affects both.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from data_tools.bench.corpus import NUM_CLASSES, noise_batch
from data_tools.bench.record import BenchRecord, machine
from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch, normalise
from pipeline.estimate.plan import Plan
from pipeline.monitor.metrics_file import read_metrics
from pipeline.monitor.profile import Meter, StepClock, peak_flops, peak_memory
from pipeline.objectives import Objective, optimizers
from pipeline.objectives.classification import Classification
from pipeline.process.distributed import Ranks, from_environment
from pipeline.settings import schema
from pipeline.settings.commands.operate import TrainBenchConfig
from pipeline.settings.run import EngineConfig, OptimizerConfig, RunConfig
from pipeline.train.loop import training_step
from pipeline.train.run import run_training
from pipeline.train.zero.engine import Engine, start_ranks

_LR = 1e-3
_OF_A_RUN = ("images_per_second", "mfu", "data_wait", "peak_memory_gib", "checkpoint_blocked_seconds")


def run(config: TrainBenchConfig) -> None:
    """Print the speed of a step and of a plain loop, or of a short run from shards if `config.data` is set."""
    record = BenchRecord("train", config)
    if from_environment().world_size > 1:
        raise UserError("this benchmark runs on one rank. Start it with python, without a launcher.")
    if config.threads:
        torch.set_num_threads(config.threads)
    record.facts["model"] = f"{config.model} at {config.image_size} px, batch {config.batch}, {config.precision}"
    if torch.cuda.is_available():
        record.facts["machine"] = machine(torch.cuda.get_device_name())
    if config.data:
        record.add("from shards", **from_shards(config))
    else:
        against_a_bare_loop(config, record)
    record.finish()


def from_shards(config: TrainBenchConfig) -> dict[str, float]:
    """Train on real data, with a log line and a checkpoint per round; prints and returns medians over rounds.

    The first round is a warm-up and is ignored. The last log line precedes the evaluation at the end of the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "name": "bench",
            "out": folder,
            "model": {"name": config.model, "image_size": config.image_size},
            "data": {"path": config.data, "threads": config.decoders, "streams": math.gcd(config.batch, 16)},
            "train": {
                "length": f"{config.steps * (config.rounds + 1)} steps", "log_every": config.log_every or config.steps,
                "global_batch": config.batch, "micro_batch": config.batch, "loss": "softmax",
            },
            "schedule": {"warmup": "0 steps"},
            "engine": {
                "zero_stage": config.zero_stage, "precision": config.precision, "peak_tflops": config.peak_tflops,
                "compile": config.compile, "deterministic": config.deterministic,
            },
            "evaluate": {"every": "100%", "batch": config.batch},
            "checkpoint": {"every": f"{config.steps} steps", "keep": 1},
            "track": {"enabled": False, "figures": False},
        }  # fmt: skip
        settings = schema.build(RunConfig, given, "the benchmark")
        settings.check()
        run_training(settings)
        records, _ = read_metrics(Path(folder) / "bench/metrics.jsonl")
    lines = [
        record.metrics for record in records if record.step > config.steps and "images_per_second" in record.metrics
    ]
    found = {name: statistics.median(line[name] for line in lines if name in line) for name in _OF_A_RUN}
    print(
        f"{config.model} at {config.image_size} px, batch {config.batch}, {config.precision}, ZeRO stage {config.zero_stage}, "
        f"{counted(config.decoders, 'decoding thread')}, median of {counted(config.rounds, 'round')} of {counted(config.steps, 'step')}: "
        f"{found['images_per_second']:,.1f} images/s, MFU {found['mfu']:.1%}, data wait {found['data_wait']:.1%} of the time, "
        f"peak memory {found['peak_memory_gib']:.2f} GiB, "
        f"stalled {found['checkpoint_blocked_seconds']:.2f} s by a checkpoint"
    )
    return found


def against_a_bare_loop(config: TrainBenchConfig, record: BenchRecord) -> None:
    """Print the speed of both, and the relative overhead of the pipeline's step in wall-clock time, the median over rounds.

    On a CPU the overhead in CPU seconds is printed as well, which is more reliable on a machine with other load.
    """
    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=10)
    batch = noise_batch(config.batch, config.image_size)
    contestants = {"pipeline": _pipeline_step(config, ranks, batch), "bare PyTorch": _bare_step(config, ranks, batch)}
    print(f"{config.model} at {config.image_size} px, batch {config.batch}, {config.precision}, on {ranks.device}; "
          f"ZeRO stage {config.zero_stage}, {counted(torch.get_num_threads(), 'thread')}", flush=True)  # fmt: skip
    first = {name: step(0) for name, step in contestants.items()}
    print("loss of the first step: " + ", ".join(f"{name} {loss:.5f}" for name, loss in first.items()), flush=True)

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(1, config.rounds + 1):
        for name, step in contestants.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for i in range(config.steps):
                step(1 + (round_number - 1) * config.steps + i)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begin) / config.steps)
            cpu_seconds[name].append((time.process_time() - cpu_begin) / config.steps)
        told = ", ".join(f"{name} {taken[-1] * 1e3:,.1f} ms a step" for name, taken in seconds.items())
        print(f"round {round_number} of {config.rounds}: {told}", flush=True)

    overhead, cpu_overhead = (
        statistics.median(ours / bare - 1 for ours, bare in zip(*taken.values(), strict=True))
        for taken in (seconds, cpu_seconds)
    )
    per_image = models.training_flops_per_image(models.configure(config.model, config.image_size, NUM_CLASSES))
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    peak, source = peak_flops(ranks.device, dtype, config.peak_tflops)
    for name, taken in seconds.items():
        rate = config.batch / statistics.median(taken)
        record.add(name, seconds=statistics.median(taken), images_per_second=rate, mfu=per_image * rate / peak)
        print(f"{name:12}  {rate:10,.1f} images/s  MFU {per_image * rate / peak:.1%}")
    print(f"peak {peak / 1e12:.2f} TFLOP/s ({source}), {peak_memory(ranks.device) / 2**30:.2f} GiB with both in memory")
    in_cpu_seconds = "" if ranks.device.type == "cuda" else f", {cpu_overhead:+.1%} in CPU seconds"
    print(f"the pipeline's step takes {overhead:+.1%}{in_cpu_seconds} (median of {counted(config.rounds, 'round')})")
    record.add("overhead", seconds=overhead, cpu_seconds=cpu_overhead)


def _pipeline_step(config: TrainBenchConfig, ranks: Ranks, batch: Batch) -> Callable[[int], float]:
    """A step as in `loop.py`, with its clock, meter and mean loss of all ranks."""
    model, optimizer = _model_and_optimizer(config)
    engine_config = EngineConfig(zero_stage=config.zero_stage, precision=config.precision)
    engine = pipeline_engine(Classification(model, "softmax"), optimizer, engine_config, config.batch, ranks)
    meter = Meter(ranks, engine.clock, flops_per_image=[1.0], peak=1.0)

    def step(number: int) -> float:
        result = training_step(engine, [batch], number, _LR)
        meter.step(config.batch)
        if (number + 1) % config.steps == 0:
            meter.read()
            ranks.mean(result.loss)
        return float(result.loss) if number == 0 else 0.0

    return step


def pipeline_engine(
    objective: Objective, optimizer: torch.optim.Optimizer, config: EngineConfig, batch: int, ranks: Ranks
) -> Engine:
    """The engine of a run without end on one rank, with `batch` images in a step."""
    start_ranks(ranks, timeout_minutes=10)
    plan = Plan(steps=10**6, warmup=0, evaluate_every={}, checkpoint_every=10**6, keep_every=0, accumulation=1, micro_batch=batch,
                num_samples=10**6, global_batch=batch, world_size=1)  # fmt: skip
    return Engine(objective, optimizer, config, OptimizerConfig(), plan, ranks, 0, StepClock(ranks.device))


def _bare_step(config: TrainBenchConfig, ranks: Ranks, batch: Batch) -> Callable[[int], float]:
    """A plain step: forward, loss, backward, clip, step."""
    model, _ = _model_and_optimizer(config)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model.to(ranks.device, dtype)
    optimizer = optimizers.build(model, model.weight_decay_mask(), OptimizerConfig(lr=_LR))

    def step(number: int) -> float:
        images = normalise(batch.images, ranks.device, dtype)
        labels = batch.labels[:, 0].to(ranks.device)
        loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().clip)
        optimizer.step()
        return float(loss.detach()) if number == 0 else 0.0

    return step


def _model_and_optimizer(config: TrainBenchConfig) -> tuple[models.Model, torch.optim.Optimizer]:
    model = models.create(config.model, config.image_size, NUM_CLASSES, seed=0)
    model.train()
    return model, optimizers.build(model, model.weight_decay_mask(), OptimizerConfig())
