"""What a run can learn: `objective.py` is the interface, classification.py the objective to read first.

Imports architecture/, model/, data/loading, settings/, checkpoint/ and base/. Used by most rooms.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pipeline.architecture.objectives import NEED_NO_LABELS, OBJECTIVES
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.base.json_record import quoted
from pipeline.base.metric import Metric
from pipeline.base.random_numbers import Purpose, torch_seed
from pipeline.model import Config, Model
from pipeline.objectives import classification
from pipeline.objectives.objective import Objective
from pipeline.settings import schema
from pipeline.settings.command import listed
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Fact, facts_of, flatten, to_dict


def kind(loss: str) -> type[Objective]:
    """Returns the objective of a value of `train.loss`."""
    file, _, name = OBJECTIVES[loss].place.partition(":")
    return getattr(importlib.import_module(f"pipeline.objectives.{file}"), name)


def _own(config: RunConfig) -> type[Objective]:
    return kind(config.train.loss)


def metrics(config: RunConfig, num_classes: int | None = None) -> dict[str, dict[str, Metric]]:
    """What each evaluator of a run measures, the most telling first: evaluator -> name in metrics.jsonl -> metric.

    num_classes: of the data set, which decides whether there is a top-5; None if it is not known.
    """
    measured = _own(config).metrics(config)
    if num_classes is not None and not classification.has_top5(num_classes):
        measured = {name: metric for name, metric in measured.items() if name != "top5"}
    counts = dict.fromkeys(("num_samples", "num_unreadable"), Metric("count")) if measured else {}
    of_split = {name: replace(metric, group="eval") for name, metric in (measured | counts).items()}
    return {
        "scores": {f"{split}_{name}": metric for split in config.data.evaluated for name, metric in of_split.items()},
        **{name: section.measured() if section.every.amount else {} for name, section in config.evaluators.items()},
    }


def best_from(config: RunConfig, num_classes: int | None = None) -> str:
    """The evaluator that measures checkpoint.best, "" without one. num_classes: see `metrics`. Raises UserError if none
    does.
    """
    best = config.checkpoint.best
    rankable = {
        name: evaluator
        for evaluator, measured in metrics(config, num_classes).items()
        for name, metric in measured.items()
        if metric.better
    }
    if best and best not in rankable:
        possible = f"must be one of {', '.join(rankable)}" if rankable else "must be empty: nothing is measured"
        raise UserError(f"checkpoint.best = {quoted(best)} {possible}.")
    return rankable.get(best, "")


def check(config: RunConfig, num_classes: int | None = None, classes: Sequence[str] = ()) -> None:
    """Raise UserError for settings that do not fit the run's objective. num_classes: see `metrics`. classes: their
    names, if known.
    """
    if config.needs_labels and num_classes == 0:
        raise UserError(
            f"train.loss = {config.train.loss} needs labels, and this data set has none (0 classes). Use an objective"
            f" that needs none (train.loss={NEED_NO_LABELS}), or a data set with labels."
        )
    _own(config).check(config)
    if num_classes is not None:
        _own(config).check_classes(config, num_classes, classes)
    best_from(config, num_classes)


def check_pixels(config: RunConfig, pixels: Pixels) -> None:
    """Raise UserError for settings that do not fit images of these pixels, those of the data set."""
    _own(config).check_pixels(config, pixels)


def create(config: RunConfig, backbone: Model) -> Objective:
    """Returns the objective of a run, which trains this backbone. Raises UserError for settings that do not fit it."""
    with torch.random.fork_rng(
        devices=[]
    ):  # What it adds has the same initial values on all ranks, drawn from the seed.
        torch.default_generator.manual_seed(torch_seed(config.seed, Purpose.named("objective")))
        return _own(config).of(config, backbone)


def training_flops(config: RunConfig, model: Config) -> int:
    """Floating-point operations of a run's training on one image. model: its backbone."""
    return _own(config).training_flops(config, model)


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """All settings of a run by dotted name, with those of its objective that are not given."""
    return flatten(to_dict(config) | {"objective": to_dict(_own(config).settings(config))})


def without_effect(config: RunConfig) -> list[str]:
    """A line for each reason for which settings of a run, or of its objective, have no effect."""
    objective = _own(config)
    of_objective = schema.without_effect(objective.settings(config), "objective.")
    return schema.without_effect(config) + of_objective


def teacher_digest(config: RunConfig) -> str:
    """SHA-256 of the published weights that a run's objective learns from, "" for none."""
    found = _own(config).published(config)
    return found.digest if found else ""


def facts(loss: str) -> dict[str, Fact]:
    """The facts of all settings of a run with this `train.loss`."""
    # Without the fact of the section, which would apply to entries that no longer exist.
    of_run = {name: fact for name, fact in facts_of(RunConfig).items() if name != "objective"}
    return {**of_run, **facts_of(kind(loss).Settings, "objective.", "run")}


def settings_help(arguments: Sequence[str]) -> str:
    """The settings of the objective that a command line names by train.loss=NAME, for `--help`; empty if it has
    none.
    """
    names = [argument.partition("=")[2] for argument in arguments if argument.startswith("train.loss=")]
    if not names or names[-1] not in OBJECTIVES:
        return ""
    listing = listed(kind(names[-1]).Settings, "objective.", "run")
    return f"settings of train.loss = {names[-1]}:\n{listing or '  none'}"


def new_backbone(config: RunConfig, num_classes: int, pixels: Pixels = RGB8) -> Config:
    """Returns the configuration of a run's new model. Raises UserError if it cannot be built.

    num_classes, pixels: of the data set.
    """
    check(config, num_classes)
    return _own(config).new_backbone(config, num_classes, pixels)


def adaptation(config: RunConfig, of_dataset: int, pixels: Pixels = RGB8) -> dict[str, Any]:
    """How a run changes the model of init.weights, as arguments of `pipeline.model.load`. of_dataset: classes of its
    data set. pixels: its.
    """
    return _own(config).adaptation(config, of_dataset, pixels)
