"""An objective with everything that one may have: DINO's heads, teacher, centres and frozen first steps, and a frozen
parameter.

`plant` makes an objective that the library does not have a value of train.loss in this process.
"""

import os
import signal
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline import objectives
from pipeline.architecture.objectives import ObjectiveFacts
from pipeline.objectives.dino import Dino
from pipeline.objectives.objective import Objective
from pipeline.settings import run as run_settings
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

NAME, FROZEN_STEPS, MOMENTUM = "distillation", 2, 0.8
SETTINGS = (
    "objective.prototypes=8",
    "objective.hidden=16",
    "objective.bottleneck=8",
    "objective.local_views=2",
    "objective.local_size=8",
    "objective.teacher_temperature=0.2",
    "objective.temperature_warmup=4 steps",
    f"objective.momentum={MOMENTUM}",
    f"objective.frozen={FROZEN_STEPS} steps",
    "objective.ibot_weight=0.5",
    "objective.ibot_head=separate",
)


class Distillation(Dino):
    """DINO with iBOT, whose outputs a frozen parameter mixes. skipped: the number of a step whose loss is not
    finite.
    """

    skipped: ClassVar[int | None] = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.mixer = nn.Parameter(torch.empty(8, 8), requires_grad=False)
        if not self.mixer.is_meta:
            self.mixer.data.normal_(generator=torch.Generator().manual_seed(0))

    def _student(self, features: Tensor, views: tuple[Tensor, ...]) -> Tensor:
        return super()._student(features, views) @ self.mixer.float()

    def _targets(self, outputs: Tensor, counted: Tensor, centre: str) -> Tensor:
        return super()._targets(outputs.float() @ self.mixer.float(), counted, centre)

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self.step = step

    def loss(self, views: tuple[Tensor, ...], facts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, values = super().loss(views, facts)
        return (loss * float("nan") if self.step == self.skipped else loss), values


def plant(name: str, cls: type[Objective]) -> None:
    """Make an objective a value of train.loss in this process."""
    run_settings.OBJECTIVES[name] = ObjectiveFacts(f"{name}:{cls.__name__}")
    sys.modules[f"pipeline.objectives.{name}"] = sys.modules[cls.__module__]


def train_planted(runs: list[list[str]]) -> None:
    """In a rank: as `forked.train`."""
    from forked import train

    plant(NAME, Distillation)
    train(runs)


def train_stopped(run: list[str]) -> None:
    """In a rank: as `forked.train` of one run, whose rank 1 hears SIGTERM in its third step."""
    from forked import told_to_stop, train

    plant(NAME, Distillation)
    cls = objectives.kind(schema.load(RunConfig, None, run).train.loss)
    before, heard = cls.before_step, told_to_stop()

    def before_step(self: Objective, step: int) -> None:
        before(self, step)
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            heard.wait()

    cls.before_step = before_step  # type: ignore[method-assign]
    train([run])


def train_skipping(argument: dict[str, Any]) -> None:
    """In a rank: trains runs whose step `skipped` is skipped."""
    Distillation.skipped = argument["skipped"]
    train_planted(argument["runs"])
