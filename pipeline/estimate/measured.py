"""The speed of one GPU as `launch/bench.py gpu` measured it, beside what the planner predicts for the same step."""

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.estimate.cluster import Cluster, lay_out
from pipeline.estimate.step_time import optimizer_bytes, passes
from pipeline.model import Config, training_flops_per_image
from pipeline.monitor.gpus import find_gpu
from pipeline.settings.commands.operate import PlanConfig

# Models whose arithmetic for an image differs by less are the same but for their heads.
_SAME_MODEL = 0.05


@dataclass(frozen=True)
class Fastest:
    """The fastest exact training step of a model that was measured, optimizer included.

    model: as ViT-L/16@224. gflops: of training on an image. settings: those of a run that give it. This is the form in bench.json.
    """

    model: str
    gflops: float
    batch: int
    images_per_second: float
    settings: list[str]


@dataclass(frozen=True)
class _Machine:
    gpu: str


@dataclass(frozen=True)
class _Bench:
    """What is read of a bench.json."""

    machine: _Machine
    date: str
    fastest: list[Fastest]


@dataclass(frozen=True)
class Measured:
    """What was measured, and where; and what is predicted for that step on that GPU, in images/s."""

    fastest: Fastest
    gpu: str
    date: str
    predicted: float

    def __str__(self) -> str:
        found = self.fastest
        return (
            f"{found.images_per_second:,.0f} images/s measured ({self.gpu}, {self.date}, {' '.join(found.settings)}); "
            f"{self.predicted:,.0f} predicted"
        )


def read_measured(config: PlanConfig, model: Config, cluster: Cluster) -> Measured:
    """Read config.bench. Raises UserError if it has no such model, or is of another kind of GPU or precision."""
    try:
        bench = json_record.read(Path(config.bench), _Bench)
    except FileNotFoundError:
        raise UserError(
            f"bench = {config.bench}: no such file. Make it on the GPU: launch/bench.py gpu json=FILE."
        ) from None
    except OSError as error:
        raise UserError(f"bench = {config.bench} cannot be read ({error.strerror}).") from None
    gpu = bench.machine.gpu
    kind = sheet.kind if (sheet := find_gpu(gpu)) else gpu
    if kind != cluster.gpu.kind:
        raise UserError(f"{config.bench} was measured on {gpu}, and the plan is for {cluster.gpu.kind}.")
    if config.engine.precision != "bf16":
        raise UserError(f"{config.bench} was measured in bf16, and engine.precision is {config.engine.precision}.")
    gflops = training_flops_per_image(model) / 1e9
    same = [entry for entry in bench.fastest if abs(entry.gflops / gflops - 1) < _SAME_MODEL]
    if not same:
        known = (
            ", ".join(f"{entry.model} ({entry.gflops:,.0f} GFLOP an image)" for entry in bench.fastest) or "no model"
        )
        raise UserError(
            f"{config.bench} has {known}, and this run's model takes {gflops:,.0f}. Measure it: launch/bench.py gpu models=[...]."
        )
    fastest = max(same, key=lambda entry: entry.images_per_second)
    if fastest.batch < 1 or fastest.images_per_second <= 0:
        raise UserError(f"{config.bench}: {fastest.images_per_second} images/s at batch {fastest.batch} is no speed.")
    alone = _as_measured(config)
    seconds = sum(passes(alone, model, cluster.gpu, fastest.batch)) + _optimizer_seconds(alone, model, cluster)
    return Measured(fastest, gpu, bench.date, fastest.batch / seconds)


def measured_mfu(config: PlanConfig, model: Config, cluster: Cluster, measured: Measured) -> float:
    """MFU of forward and backward in the measured step: without the predicted time of the optimizer, which more ranks share."""
    peak = (config.engine.peak_tflops or cluster.gpu.tflops) * 1e12
    step = measured.fastest.batch / measured.fastest.images_per_second
    seconds = max(step - _optimizer_seconds(_as_measured(config), model, cluster), step / 2)
    return min(1.0, training_flops_per_image(model) * measured.fastest.batch / (seconds * peak))


def _as_measured(config: PlanConfig) -> PlanConfig:
    """The step of launch/bench.py gpu: on one GPU, of the model alone as a classifier, whatever the run's objective adds."""
    alone = lay_out(config, 1, False)
    return replace(alone, train=replace(alone.train, loss="softmax"), objective={})


def _optimizer_seconds(config: PlanConfig, model: Config, cluster: Cluster) -> float:
    return optimizer_bytes(config, model, 1, 1) / (cluster.gpu.bandwidth * config.efficiency)
