"""Speed of the pipeline's training step beside a plain PyTorch loop with the same model, batch and optimizer.

    python tests/measure/measure_engine.py ViT-S/16 --threads 1
    python tests/measure/measure_engine.py ViT-L/16 --precision bf16 --steps 20

Both loops alternate in one process, so that other load on the machine affects both. On a busy machine, many short rounds give a more
reliable median than a few long ones.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data_tools.bench.corpus import NUM_CLASSES, noise_batch
from data_tools.bench.gpu.gpu_step import pipeline_engine
from pipeline import model as models
from pipeline.architecture.pixels import RGB8
from pipeline.base.words import counted
from pipeline.data.loading.loader import Batch, normalise
from pipeline.model.layers import kernel_names
from pipeline.monitor.profile import Meter, peak_flops, peak_memory
from pipeline.objectives.classification import Classification
from pipeline.objectives.parameters import optimizers
from pipeline.process.distributed import Ranks, from_environment
from pipeline.settings.run import EngineConfig, OptimizerConfig
from pipeline.train.loop import training_step
from pipeline.train.zero.engine import start_ranks

_LR = 1e-3


def run(given: argparse.Namespace) -> None:
    """Print the speed of both, and the relative overhead of the pipeline's step in wall-clock time, the median over rounds.

    On a CPU the overhead in CPU seconds is printed as well, which is more reliable on a machine with other load.
    """
    ranks = from_environment()
    start_ranks(ranks, timeout_minutes=10)
    batch = noise_batch(given.batch, given.pixels)
    contestants = {"pipeline": _pipeline_step(given, ranks, batch), "bare PyTorch": _bare_step(given, ranks, batch)}
    print(f"{given.model} at {given.pixels} px, batch {given.batch}, {given.precision}, on {ranks.device}; "
          f"ZeRO stage {given.zero_stage}, {counted(torch.get_num_threads(), 'thread')}", flush=True)  # fmt: skip
    first = {name: step(0) for name, step in contestants.items()}
    print("loss of the first step: " + ", ".join(f"{name} {loss:.5f}" for name, loss in first.items()), flush=True)

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(1, given.rounds + 1):
        for name, step in contestants.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for i in range(given.steps):
                step(1 + (round_number - 1) * given.steps + i)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begin) / given.steps)
            cpu_seconds[name].append((time.process_time() - cpu_begin) / given.steps)
        told = ", ".join(f"{name} {taken[-1] * 1e3:,.1f} ms a step" for name, taken in seconds.items())
        print(f"round {round_number} of {given.rounds}: {told}", flush=True)

    overhead, cpu_overhead = (
        statistics.median(ours / bare - 1 for ours, bare in zip(*taken.values(), strict=True))
        for taken in (seconds, cpu_seconds)
    )
    per_image = models.training_flops_per_image(models.configure(given.model, given.pixels, NUM_CLASSES))
    dtype = torch.bfloat16 if given.precision == "bf16" else torch.float32
    peak, source = peak_flops(ranks.device, dtype, given.peak_tflops)
    for name, taken in seconds.items():
        rate = given.batch / statistics.median(taken)
        print(f"{name:12}  {rate:10,.1f} images/s  MFU {per_image * rate / peak:.1%}")
    print(f"peak {peak / 1e12:.2f} TFLOP/s ({source}), {peak_memory(ranks.device) / 2**30:.2f} GiB with both in memory")
    in_cpu_seconds = "" if ranks.device.type == "cuda" else f", {cpu_overhead:+.1%} in CPU seconds"
    print(f"the pipeline's step takes {overhead:+.1%}{in_cpu_seconds} (median of {counted(given.rounds, 'round')})")


def _pipeline_step(given: argparse.Namespace, ranks: Ranks, batch: Batch) -> Callable[[int], float]:
    """A step as in `loop.py`, with its clock, meter and mean loss of all ranks."""
    model, optimizer = _model_and_optimizer(given)
    engine_config = EngineConfig(zero_stage=given.zero_stage, precision=given.precision)
    engine = pipeline_engine(Classification(model, "softmax"), optimizer, engine_config, given.batch)
    meter = Meter(ranks, engine.clock, flops_per_image=[1.0], peak=1.0)

    def step(number: int) -> float:
        result = training_step(engine, [batch], number, _LR)
        meter.step(given.batch)
        if (number + 1) % given.steps == 0:
            meter.read()
            ranks.mean(result.loss)
        return float(result.loss) if number == 0 else 0.0

    return step


def _bare_step(given: argparse.Namespace, ranks: Ranks, batch: Batch) -> Callable[[int], float]:
    """A plain step: forward, loss, backward, clip, step."""
    model, _ = _model_and_optimizer(given)
    dtype = torch.bfloat16 if given.precision == "bf16" else torch.float32
    model.to(ranks.device, dtype)
    optimizer = optimizers.build(model, kernel_names(model), OptimizerConfig(lr=_LR))

    def step(number: int) -> float:
        images = normalise(batch.images, ranks.device, dtype, RGB8)
        labels = batch.labels[:, 0].to(ranks.device)
        loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().clip)
        optimizer.step()
        return float(loss.detach()) if number == 0 else 0.0

    return step


def _model_and_optimizer(given: argparse.Namespace) -> tuple[models.Model, torch.optim.Optimizer]:
    model = models.create(given.model, given.pixels, NUM_CLASSES, seed=0)
    model.train()
    return model, optimizers.build(model, kernel_names(model), OptimizerConfig())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="the plain loop has no fp32 master weights"
    )
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--steps", type=int, default=1, help="of each loop in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="on a CPU; 0 is torch's default")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="for MFU; 0 looks it up or measures it")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    run(given)


if __name__ == "__main__":
    main()
