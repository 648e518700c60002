"""The settings of a study: which pre-training runs are compared, how they are scored, and where they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from pipeline.base.errors import UserError
from pipeline.settings.quantities import (
    Limit,
    PathText,
    PositiveLength,
    ShareBelow1,
    ShellWords,
    Tasks,
    Threads,
)
from pipeline.settings.run import result_name
from pipeline.settings.schema import Distinct, Seeds, Settings, setting

# Each question is a file.
QUESTIONS = sorted(file.stem for file in (Path(__file__).parents[2] / "experiment" / "questions").glob("[!_]*.py"))
# Settings of a run that the study sets itself.
_SET_BY_STUDY = (
    "name=",
    "out=",
    "seed=",
    "data.limit=",
    "schedule.cooldown=",
    "init.",
    "track.parent_run=",
)
# What a model of a study must not change, because scores could not be compared any more.
_SAME_FOR_ALL = (
    "data.path=",
    "data.train_split=",
    "data.eval_split=",
    "data.exclude=",
    "data.dev_share=",
    "probe.",
    "augment.eval_crop=",
)
_SET_FOR_EACH = "this command sets for each cell: leave it out."
_NOT_COMPARABLE = (
    "must be the same for all cells, or their scores could not be compared: set it in `settings` of the study."
)


def refuse_overrides(subject: str, overrides: Sequence[str], prefixes: tuple[str, ...], reason: str) -> None:
    """Raise UserError for `setting=value` that begins with one of the prefixes. subject: the beginning of the
    sentence.
    """
    if given := [override for override in overrides if override.startswith(prefixes)]:
        raise UserError(f"{subject} {', '.join(given)}, which {reason}")


class ExperimentConfig(Settings):
    """How the runs of an experiment are done, and where their results are."""

    name: str = result_name("experiment")
    """Name of the result; all of its runs are in <out>/<name>"""
    out: PathText = setting("runs", output="folder")
    """Folder that holds all runs and results."""
    mlflow: str = ""
    """MLflow tracking URI of the result and its runs; none sends no result. Empty is track.uri of the runs, else
    sqlite:///<out>/mlflow.db, or nothing with track.enabled=false.
    """
    on: Literal["here", "ray"] = "here"
    """Where runs are done: here, one after the other, or as tasks of a Ray cluster, as many at a time as fit."""
    launcher: ShellWords = ""
    """Command that starts a run, as 'deepspeed --num_gpus 8'; empty is one process, or torchrun with as many ranks as
    `gpus`.
    """
    gpus: NonNegativeInt = 0
    """GPUs of a run: reserved for it on Ray, and counted in the plan. 0 computes on the CPU."""
    threads: Threads = setting(2, needs="on=ray")
    """on=ray: CPUs of a run."""
    num_tasks: Tasks = setting(0, needs="on=ray")
    """on=ray: number of tasks that run at the same time; 0 is as many as fit."""
    tflops: NonNegativeFloat = 0.0
    """Sustained TFLOP/s of one device in training, for the plan of a study until runs are finished, which say it."""
    cell: str = ""
    """Do this run only (its name), and write no report."""
    report: bool = False
    """Run nothing: write the report of the runs that are done."""
    plan: bool = False
    """Only list the runs and their compute, with the hours of all."""

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: plan only prints."""
        return ("name", "out") if self.plan else ()

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        if sum([bool(self.cell), self.report, self.plan]) > 1:
            raise UserError("cell, report and plan each do something else: set one of them.")


class StudyModel(Settings):
    """A model of a study, or weights that it fine-tunes."""

    name: str = setting(pattern="^[A-Za-z0-9][A-Za-z0-9+_.-]*$")
    """Name in figures and run names"""
    settings: list[str] = []
    """Its settings, over those of the study, as [model.name=ViT-S/16,optimizer.lr=0.001]."""
    weights: PathText = ""
    """question = labels or continue: the run folder or file of weights that are trained on; empty is a new model."""


class StudyConfig(ExperimentConfig):
    """A study: each combination of model, data size, length and seed is one pre-training run, called a cell."""

    question: Literal[tuple(QUESTIONS)]  # type: ignore[valid-type]
    """data_size: how much data is enough (the paper's Figures 3 and 4); scaling: which model is best for a compute
    budget, and what a larger one would give (Figure 5); ablation: what a part of the model contributes (Table 8, Figure
    8); labels: what pre-trained weights gain over the first model, by the number of labelled images; continue: what
    they gain on a new domain, and forget of the old one, by the way in which they go on learning
    """
    run: PathText
    """YAML file of a pre-training run, or of a fine-tuning for question = labels, with the settings that all cells
    share
    """
    settings: list[str] = []
    """Settings over those of that file, for all cells, as [data.path=datasets/photos]."""
    models: list[StudyModel]
    """The models that are compared"""
    data_sizes: Distinct[Limit] = []
    """Sizes of the training set to compare, as [1000,10000,100%]; larger ones contain smaller ones. Empty is data.limit
    of the run.
    """
    lengths: Distinct[PositiveLength] = []
    """Lengths of pre-training to compare, as [7 epochs,14 epochs]; empty is train.length of the run, or of a model."""
    budgets: Distinct[PositiveFloat] = []
    """In place of lengths: compute of pre-training in exaFLOPs, the same for each model."""
    cooldown: ShareBelow1 = setting(0.0, needs="lengths|budgets")
    """Share of each length in which the learning rate falls, after a constant rate. Runs of different lengths then
    share all steps before, which are trained once. 0 trains each length by itself, with the schedule of the run.
    """
    equal_compute: bool = setting(True, needs="question=labels")
    """question = labels: models without weights train for as many more steps as the longest pre-training of the others
    is worth in compute.
    """
    seeds: Seeds = [0]
    """Seeds; each gives a run with its own subset, weights and order."""
    score: str = "top1"
    """Score that figures and fits show: top1 or top5 of the run's last evaluation, best_top1 of all (early stopping,
    with checkpoint.best=val_top1), 5shot, 20nn, ... of its probe, or finetune:NAME.
    """
    finetune: list[PathText] = []
    """YAML files of runs that fine-tune the weights of each cell, as [configs/finetune/pets_384px.yaml]."""

    @property
    def num_lengths(self) -> int:
        """How many lengths are compared; 0 if cells have that of the run, or their model's train.length."""
        return len(self.lengths or self.budgets)

    @property
    def has_weights(self) -> bool:
        return any(model.weights for model in self.models)

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        super().check()
        set_here = (*_SET_BY_STUDY, *["train.length="] * bool(self.num_lengths))
        refuse_overrides("settings has", self.settings, set_here, _SET_FOR_EACH)
        for model in self.models:
            refuse_overrides(f"model {model.name} sets", model.settings, set_here, _SET_FOR_EACH)
            refuse_overrides(f"model {model.name} sets", model.settings, _SAME_FOR_ALL, _NOT_COMPARABLE)
        names = [model.name for model in self.models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"models has two called {twice[0]!r}: give each its own name.")
        if self.lengths and self.budgets:
            raise UserError("lengths and budgets each say how long cells train: set one of them.")
