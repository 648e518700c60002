"""An objective with everything that one may have: a head, a teacher, a frozen parameter, small state, frozen first steps.

It stands for those that the library does not have; `plant` makes one a value of train.loss in this process.
"""

import dataclasses
import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.objectives.across_ranks import summed
from pipeline.objectives.objective import Inputs, Objective, mean_of_valid, normalised
from pipeline.settings import run_sections
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import setting

NAME, FROZEN_STEPS, MOMENTUM = "distillation", 2, 0.8


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    temperature: float = setting(0.1, "Temperature of the student.", above=0)


class Distillation(Objective):
    Settings = DistillationSettings

    @classmethod
    def create(cls, config: RunConfig, backbone: nn.Module) -> Objective:
        return cls(backbone, cls.settings(config).temperature)

    def __init__(self, backbone: nn.Module, temperature: float) -> None:
        super().__init__(backbone)
        self.temperature = temperature
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(backbone.config.width, 8, bias=False)
        self.mixer = nn.Parameter(torch.empty(8, 8), requires_grad=False)
        if not self.mixer.is_meta:
            with torch.no_grad():
                self.head.weight.normal_(std=0.5, generator=generator)
                self.mixer.normal_(generator=generator)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("batch_sum", torch.zeros(8), persistent=False)
        self.num = 0
        self.add_teacher("backbone", "head")

    def teacher_momentum(self, step: int, num_steps: int) -> float:
        return MOMENTUM + (1 - MOMENTUM) * step / num_steps

    def inputs(self, batch, device, mixing) -> Inputs:
        return Inputs((normalised(batch.images.to(device), device),), {"valid": batch.valid.to(device)})

    def loss(self, views: tuple[Tensor, ...], facts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.head(self.backbone(views[0])) @ self.mixer
        with torch.no_grad():
            target = (self.teacher["head"](self.teacher["backbone"](views[0].flip(3))) @ self.mixer).float()
            if self.training:
                self.batch_sum += target.sum(0)
                self.num += len(target)
            target = ((target - self.center) / 0.2).softmax(1)
        losses = -(target * (found.float() / self.temperature).log_softmax(1)).sum(1)
        entropy = -(target * target.clamp(min=1e-9).log()).sum(1).mean()
        return mean_of_valid(losses, facts["valid"]), {"entropy": entropy}

    def measure(self, views: tuple[Tensor, ...], facts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.head(self.backbone(views[0])).float().square().mean(1)}

    def before_step(self, step: int, num_steps: int) -> None:
        self.batch_sum.zero_()
        self.num = 0

    def after_step(self) -> None:
        num = summed(torch.tensor(float(self.num)))
        self.center.lerp_(summed(self.batch_sum) / num, 0.1)

    def frozen_steps(self, num_steps: int) -> dict[str, int]:
        return {"head.": FROZEN_STEPS}


def plant(name: str, cls: type[Objective]) -> None:
    """Make an objective a value of train.loss in this process."""
    run_sections.OBJECTIVES[name] = f"{name}:{cls.__name__}"
    (field,) = (field for field in dataclasses.fields(run_sections.TrainConfig) if field.name == "loss")
    object.__setattr__(field.metadata["rule"], "choices", tuple(run_sections.OBJECTIVES))
    sys.modules[f"pipeline.objectives.{name}"] = sys.modules[cls.__module__]


def train_planted(runs: list[list[str]]) -> None:
    """In a rank: as `forked.train`."""
    from forked import train

    plant(NAME, Distillation)
    train(runs)


def train_worked(argument: dict[str, Any]) -> None:
    """In a rank: trains the objective in a file. argument: name, file, runs, and kill_at: the step at which the rank is killed."""
    from forked import train

    spec = importlib.util.spec_from_file_location(argument["name"], argument["file"])
    module = sys.modules[argument["name"]] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cls = getattr(module, argument["name"].capitalize())
    plant(argument["name"], cls)
    if argument["kill_at"] is not None:
        cls.before_step = lambda self, step, num: step == argument["kill_at"] and os.kill(os.getpid(), signal.SIGKILL)
    train(argument["runs"])
