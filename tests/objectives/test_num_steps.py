"""How long a run is can be read only by an objective that says so: a study's cooldown relies on it."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from distillation import plant
from forked import Forge
from ranks import settings
from torch import Tensor

from pipeline.objectives.classification import Classification

MESSAGE = "TypeError: Forgetful reads num_steps, so its steps depend on the length of a run: set follows_length = True in the class."


class Forgetful(Classification):
    """Classification of which a method, `reads_in`, reads the length of the run. A plan runs its loss only if `loss` is that method."""

    reads_in: ClassVar[str] = ""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        if self.reads_in == "teacher_momentum":
            self.add_teacher("backbone")

    def _read_in(self, method: str) -> float:
        return 1 / self.num_steps if method == self.reads_in else 0.5

    def frozen_steps(self) -> dict[str, int]:
        return {"backbone.head.": round(self._read_in("frozen_steps"))}

    def before_step(self, step: int) -> None:
        self._read_in("before_step")

    def teacher_momentum(self, step: int) -> float:
        return self._read_in("teacher_momentum")

    def loss(self, views: tuple[Tensor, ...], facts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, values = super().loss(views, facts)
        return self._read_in("loss") * loss, values


def plan_and_train(argument: dict[str, Any]) -> None:
    """In a rank: says how the plan of a run ended, and how its training."""
    from forked import train

    from pipeline.estimate.forecast_text import run
    from pipeline.settings import schema
    from pipeline.settings.commands.operate import PlanConfig

    Forgetful.reads_in = argument["reads_in"]
    Forgetful.trains_backbone_alone = argument["reads_in"] != "loss"
    Forgetful.follows_length = argument["follows_length"]
    plant("forgetful", Forgetful)
    plan = schema.load(PlanConfig, None, argument["run"])
    for what, does in (("plan", lambda: run(plan)), ("training", lambda: train([argument["run"]]))):
        try:
            does()
        except Exception as error:
            print(f"{what}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"{what}: ended", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["before_step", "teacher_momentum", "loss"])
def test_who_forgets_to_say_that_it_follows_the_length_neither_plans_nor_trains(
    forge: Forge, dataset: Path, tmp_path: Path, method: str
) -> None:
    run = settings(dataset, tmp_path, "forgetful", "train.loss=forgetful", "train.micro_batch=24")
    argument = {"reads_in": method, "follows_length": False, "run": run}
    said = forge.start_work(1, "test_num_steps:plan_and_train", argument).finish()
    assert f"plan: {MESSAGE}" in said, said
    assert f"training: {MESSAGE}" in said, said
    assert "step 1/" not in said


@pytest.mark.slow
def test_who_says_so_plans_and_trains(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    run = settings(dataset, tmp_path, "forgetful", "train.loss=forgetful", "train.micro_batch=24")
    argument = {"reads_in": "before_step", "follows_length": True, "run": run}
    said = forge.start_work(1, "test_num_steps:plan_and_train", argument).finish()
    assert "plan: ended" in said, said
    assert "training: ended" in said, said
