"""Speed of an objective's step on a CPU, beside the same ViT's step of classification: forward pass, loss and backward pass."""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from data_tools.bench.corpus import NUM_CLASSES, noise_of, objective_run
from data_tools.bench.measure import Contestant, Timing, race, stepping
from data_tools.bench.record import BenchRecord, markdown
from pipeline import model as models
from pipeline import objectives
from pipeline.base.words import counted
from pipeline.objectives import on_meta
from pipeline.objectives.mae import Mae
from pipeline.settings.commands.bench import ModelBenchConfig
from pipeline.settings.run import RunConfig

_PLAIN, _ENCODER = "softmax", "mae, encoder alone"
# By name, the value of train.loss.
_STEPS = {_PLAIN: "softmax", _ENCODER: "mae", "mae": "mae", "dino": "dino", "lejepa": "lejepa"}


def measure(config: ModelBenchConfig, name: str, precision: str, dtype: torch.dtype, record: BenchRecord) -> None:
    """Print a table of one model in one precision."""
    runs = {step: objective_run(loss, name, config.image_size, config.batch) for step, loss in _STEPS.items()}
    contestants = [_contestant(config, step, run, dtype) for step, run in runs.items()]
    results = race(contestants, config.rounds)
    flops = {
        step: on_meta.training_flops(objectives.kind(run.train.loss), run, _model(run)) for step, run in runs.items()
    }
    plain, lines = results[_PLAIN], []
    for step, found in results.items():
        if not (isinstance(found, Timing) and isinstance(plain, Timing)):
            lines.append([step, f"not measured: {found}", "", ""])
            continue
        arithmetic = math.nan if step == _ENCODER else flops[step] / flops[_PLAIN]
        share = plain.per_cpu / found.per_cpu
        record.add(f"{name} {precision} {step}", cpu_seconds_per_image=1 / found.per_cpu, of_the_vit=share, of_its_arithmetic=arithmetic)  # fmt: skip
        lines.append([step, f"{1e3 / found.per_cpu:,.1f}", f"{share:.0%}", "" if math.isnan(arithmetic) else f"{arithmetic:.0%}"])  # fmt: skip
    print(f"\n{name} {precision}, batch {config.batch}, {config.image_size} px, {counted(config.threads, 'thread')}\n")
    print(markdown(("", "CPU ms per image", "of the ViT's step", "of its arithmetic"), lines), flush=True)


def _model(run: RunConfig) -> models.Config:
    return objectives.new_backbone(run, NUM_CLASSES)


def _contestant(config: ModelBenchConfig, name: str, run: RunConfig, dtype: torch.dtype) -> Contestant:
    def make() -> Callable[[], None]:
        torch.set_num_threads(config.threads)
        objective = on_meta.cast(objectives.create(run, models.build(_model(run))), dtype)
        read = objective.inputs(noise_of(run, config.batch), torch.device("cpu"), None)
        read = read._replace(views=tuple(view.to(dtype) for view in read.views))
        objective.num_steps = 100
        objective.before_step(0)

        def loss() -> Tensor:
            if name == _ENCODER:
                return cast(Mae, objective).encode(read.views[0], read.facts["kept"]).float().mean()
            return objective(*read)[0]

        return partial(_step, objective, loss)

    return stepping(name, [], config.threads, [config.batch] * config.steps, make)


def _step(objective: objectives.Objective, loss: Callable[[], Tensor]) -> None:
    """Forward, loss and backward."""
    loss().backward()
    for parameter in objective.parameters():
        parameter.grad = None
