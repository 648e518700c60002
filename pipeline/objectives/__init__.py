"""What a run can learn: `objective.py` is the interface, each other file one objective. Read classification.py first.

Imports pipeline.model and pipeline.data.loading. Used by data_tools/, estimate/, evaluate/, launch/,
study/, train/ and transfer/.
"""

import importlib
from collections.abc import Sequence
from dataclasses import fields

from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.model import Config, Model, configure
from pipeline.objectives.objective import Objective
from pipeline.settings.command import listed
from pipeline.settings.run import ModelConfig, RunConfig
from pipeline.settings.run_sections import OBJECTIVES
from pipeline.settings.schema import describe


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
    """Returns the objective of a run, which trains this backbone. Raises UserError for settings that do not fit it."""
    objective = kind(config.train.loss).create(config, backbone)
    if objective.teacher is not None and config.optimizer.ema_decay:
        raise UserError(
            f"train.loss = {config.train.loss} has a teacher, which is the average of the weights: leave out optimizer.ema_decay."
        )
    return objective


def settings_help(arguments: Sequence[str]) -> str:
    """The settings of the objective that a command line names by train.loss=NAME, for `--help`; empty if it has none."""
    names = [argument.partition("=")[2] for argument in arguments if argument.startswith("train.loss=")]
    if not names or names[-1] not in OBJECTIVES:
        return ""
    rows = describe(kind(names[-1]).Settings, "objective.")
    return (
        f"settings of train.loss = {names[-1]}:\n{listed(rows)}"
        if rows
        else f"train.loss = {names[-1]} has no settings of its own."
    )


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
