"""What a run can learn: `objective.py` is the interface, each other file one objective. Read classification.py first.

Imports pipeline.model and pipeline.data.loading. Used by data_tools/, estimate/, evaluate/, study/,
train/ and transfer/.
"""

import importlib
from dataclasses import fields

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.model import Config, Model, configure
from pipeline.objectives.objective import Objective
from pipeline.settings.run import ModelConfig, RunConfig
from pipeline.settings.run_sections import OBJECTIVES


def kind(loss: str) -> type[Objective]:
    """Returns the objective of a value of `train.loss`."""
    file, _, name = OBJECTIVES[loss].partition(":")
    return getattr(importlib.import_module(f"pipeline.objectives.{file}"), name)


def check(config: RunConfig) -> None:
    """Raise UserError for settings that do not fit the run's objective."""
    objective = kind(config.train.loss)
    objective.check(config)
    metrics = [f"{config.data.evaluated_split}_{name}" for name in objective.metrics(config)]
    if config.checkpoint.best and config.checkpoint.best not in metrics:
        raise UserError(f"checkpoint.best = {quoted(config.checkpoint.best)} must be one of {', '.join(metrics)}.")


def create(config: RunConfig, backbone: Model) -> Objective:
    """Returns the objective of a run, which trains this backbone."""
    return kind(config.train.loss).create(config, backbone)


def new_backbone(config: RunConfig, num_classes: int, covered: bool = True) -> Config:
    """Returns the configuration of a run's new model. Raises UserError if it cannot be built.

    num_classes: of the data set. covered: whether patches must cover all pixels.
    """
    name = config.model.name
    assert name, "config.check refuses a run with neither model.name nor init.weights"
    check(config)
    given = {f.name: getattr(config.model, f.name) for f in fields(ModelConfig) if f.name not in ("name", "image_size")}
    return configure(
        name,
        config.model.image_size,
        covered=covered,
        **(given | kind(config.train.loss).of_backbone(config, num_classes)),
    )
