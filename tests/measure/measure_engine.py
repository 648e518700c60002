"""Speed of the pipeline's training step beside a plain PyTorch loop with the same model, batch and optimizer.

    python tests/measure/measure_engine.py ViT-S/16
    python tests/measure/measure_engine.py ViT-L/16 --precision bf16 --steps 20

Both loops alternate in one process, so that other load on the machine affects both.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data_tools.bench.gpu_step import Case, pipeline_engine, settings
from data_tools.bench.noise import NUM_CLASSES, noise_views
from pipeline import model as models
from pipeline.architecture.pixels import RGB8
from pipeline.data.loading.loader import Batch, normalise
from pipeline.model.layers import kernel_names
from pipeline.monitor.profile import Meter
from pipeline.objectives.classification import Classification
from pipeline.objectives.parameters import optimizers
from pipeline.process.distributed import Ranks, from_environment
from pipeline.settings.run import OptimizerConfig
from pipeline.train.loop import training_step
from pipeline.train.zero.engine import start_ranks

_LR = 1e-3


def pipeline_step(given: argparse.Namespace, ranks: Ranks, batch: Batch) -> Callable[[int], float]:
    """A step as in `loop.py`, with its clock, meter and mean loss of all ranks. Returns the loss."""
    model, optimizer = _model_and_optimizer(given)
    run = settings(Case(given.model, given.pixels, given.batch, 0.0), f"engine.precision={given.precision}")
    engine = pipeline_engine(run, Classification(model, "softmax"), optimizer)
    meter = Meter(ranks, engine.clock, flops_per_image=1.0, peak=1.0)

    def step(number: int) -> float:
        result = training_step(engine, [batch], number, _LR)
        meter.step(given.batch)
        if number % given.steps == 0:
            meter.read("record")
            return ranks.sum(float(result.loss))[0] / ranks.world_size
        return 0.0

    return step


def bare_step(given: argparse.Namespace, ranks: Ranks, batch: Batch) -> Callable[[int], float]:
    """A plain step: forward, loss, backward, clip, step. It has no fp32 master weights."""
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
        return float(loss.detach()) if number % given.steps == 0 else 0.0

    return step


def _model_and_optimizer(given: argparse.Namespace) -> tuple[models.Model, torch.optim.Optimizer]:
    model = models.create(given.model, given.pixels, NUM_CLASSES, seed=0)
    model.train()
    return model, optimizers.build(model, kernel_names(model), OptimizerConfig())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    for name, default in (("--pixels", 224), ("--batch", 64), ("--steps", 1), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    ranks = from_environment()
    start_ranks(ranks)
    batch = noise_views([(1, given.pixels, given.pixels)], given.batch)
    steps = [make(given, ranks, batch) for make in (pipeline_step, bare_step)]
    print("loss of the first step: pipeline {:.5f}, bare PyTorch {:.5f}".format(*(step(0) for step in steps)))
    ratios = []
    for number in range(given.rounds):
        taken = []
        for step in steps:
            begin, cpu = time.perf_counter(), time.process_time()
            for i in range(given.steps):
                step(1 + number * given.steps + i)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(((time.perf_counter() - begin) / given.steps, (time.process_time() - cpu) / given.steps))
        print(
            "round {}: pipeline {:.4f} s a step, bare PyTorch {:.4f} s".format(
                number + 1, *(clock for clock, _ in taken)
            )
        )
        ratios.append([ours / bare - 1 for ours, bare in zip(*taken, strict=True)])
    by_clock, in_cpu = map(statistics.median, zip(*ratios, strict=True))
    print(f"the pipeline's step takes {by_clock:+.1%}, {in_cpu:+.1%} in CPU seconds (median of {given.rounds} rounds)")


if __name__ == "__main__":
    main()
