"""The settings of a study: which pre-training runs are compared, how they are scored, and where they run."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from pipeline.base.errors import UserError
from pipeline.settings.quantities import MAX_TASKS, Limit, PathText, PositiveLength, ShareBelow1, Threads
from pipeline.settings.schema import REQUIRED, Distinct, Settings, setting
from pipeline.settings.shared import Seeds, ShellWords, mlflow_of_runs, refuse_overrides, result_name

Question = Literal["data_size", "scaling", "ablation", "labels"]
# Settings of a run that the study sets itself.
_SET_BY_STUDY = (
    "name=",
    "out=",
    "seed=",
    "data.limit=",
    "train.length=",
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


class StudyModel(Settings):
    """A model of a study, or weights that it fine-tunes."""

    name: str = setting(
        REQUIRED,
        "Name in figures and run names",
        pattern="^[A-Za-z0-9][A-Za-z0-9+_.-]*$",
    )
    family: str = setting("", "Models of one family share a line in figures and a fit; empty is the model's name.")
    settings: list[str] = setting(
        list, "Its settings, over those of the study, as [model.name=ViT-S/16,optimizer.lr=0.001]."
    )
    speed: NonNegativeFloat = setting(
        0.0, "For `minutes`: its images/s in training, as a short run of it prints at its end."
    )
    weights: PathText = setting(
        "",
        "question = labels: the run folder or file of weights that is fine-tuned; empty starts with a new model.",
    )


class StudyConfig(Settings):
    """A study: each combination of model, data size, length and seed is one pre-training run, called a cell."""

    name: str = result_name("Name of the study; all of its runs are in <out>/<name>", "study")
    out: PathText = setting("runs", "Folder that holds all runs and studies.", output="folder")
    question: Question = setting(
        REQUIRED,
        "data_size: how much data is enough (the paper's Figures 3 and 4); scaling: which model is best for a compute budget, and "
        "what a larger one would give (Figure 5); ablation: what a part of the model contributes (Table 8, Figure 8); "
        "labels: what pre-trained weights gain over the first model, by the number of labelled images",
    )
    run: PathText = setting(
        REQUIRED,
        "YAML file of a pre-training run, or of a fine-tuning for question = labels, with the settings that all cells share",
    )
    settings: list[str] = setting(
        list, "Settings over those of that file, for all cells, as [data.path=datasets/photos]."
    )
    models: list[StudyModel] = setting(REQUIRED, "The models that are compared")
    data_sizes: Distinct[Limit] = setting(
        list,
        "Sizes of the training set to compare, as [1000,10000,100%]; larger ones contain smaller ones. Empty is data.limit of the run.",
    )
    lengths: Distinct[PositiveLength] = setting(
        list, "Lengths of pre-training to compare, as [7 epochs,14 epochs]; empty is train.length of the run."
    )
    budgets: Distinct[PositiveFloat] = setting(
        list,
        "In place of lengths: compute of pre-training in exaFLOPs, the same for each model.",
    )
    minutes: Distinct[PositiveFloat] = setting(
        list,
        "In place of lengths: time of training, the same for each model; its `speed` says how many steps that is.",
    )
    cooldown: ShareBelow1 = setting(
        0.0,
        "Share of each length in which the learning rate falls, after a constant rate. Runs of different lengths then share all steps "
        "before, which are trained once. 0 trains each length by itself, with the schedule of the run.",
        needs="lengths|budgets|minutes",
    )
    equal_compute: bool = setting(
        True,
        "question = labels: models without weights train for as many more steps as the longest pre-training of the others is "
        "worth in compute.",
        needs="question=labels",
    )
    seeds: Seeds = setting([0], "Seeds; each gives a run with its own subset, weights and order.")
    score: str = setting(
        "top1",
        "Score that figures and fits show: top1 or top5 of the run's last evaluation, best_top1 of all (early stopping, with "
        "checkpoint.best=val_top1), 5shot, 20nn, ... of its probe, or finetune:NAME.",
    )
    finetune: list[PathText] = setting(
        list,
        "YAML files of runs that fine-tune the weights of each cell, as [configs/finetune/pets_384px.yaml].",
    )
    on: Literal["here", "ray"] = setting(
        "here", "Where cells run: here, one after the other, or as tasks of a Ray cluster, as many at a time as fit."
    )
    launcher: ShellWords = setting(
        "",
        "Command that starts a cell, as 'deepspeed --num_gpus 8'; empty is one process, or torchrun with as many ranks as `gpus`.",
    )
    gpus: int = setting(
        0, "GPUs of a cell: reserved for it on Ray, and counted in the plan. 0 computes on the CPU.", min=0, max=1024
    )
    threads: Threads = setting(2, "CPUs of a cell with on=ray, of each of its GPUs with slurm.", needs="on=ray|slurm")
    num_tasks: int = setting(
        0,
        "on=ray: number of cells that run at the same time; 0 is as many as fit.",
        min=0,
        max=MAX_TASKS,
        needs="on=ray",
    )
    tflops: NonNegativeFloat = setting(
        0.0,
        "Sustained TFLOP/s of one device in training, for the plan until cells are finished, which say it; 0 measures this CPU.",
    )
    slurm: PathText = setting(
        "", "Write a SLURM script to this file, whose array tasks run the cells, and end. '-' prints it.", output="file"
    )
    cell: str = setting("", "Run this cell only (its name), and write no report.")
    report: bool = setting(False, "Run nothing: write the report of the cells that are done.")
    mlflow: str = mlflow_of_runs("study")
    plan: bool = setting(False, "Only list the cells, their compute and hours.")

    @property
    def num_lengths(self) -> int:
        """How many lengths are compared; 0 if all cells have that of the run."""
        return len(self.lengths or self.budgets or self.minutes)

    def not_written(self) -> tuple[str, ...]:
        """Outputs that this command does not write: --plan only prints."""
        return ("name", "out") if self.plan else ()

    def check(self) -> None:
        """Check what depends on several settings. Raises UserError."""
        refuse_overrides("settings has", self.settings, _SET_BY_STUDY, _SET_FOR_EACH)
        for model in self.models:
            refuse_overrides(f"model {model.name} sets", model.settings, _SET_BY_STUDY, _SET_FOR_EACH)
            refuse_overrides(f"model {model.name} sets", model.settings, _SAME_FOR_ALL, _NOT_COMPARABLE)
        names = [model.name for model in self.models]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"models has two called {twice[0]!r}: give each its own name.")
        if sum(map(bool, (self.lengths, self.budgets, self.minutes))) > 1:
            raise UserError("lengths, budgets and minutes each say how long cells train: set one of them.")
        for model in self.models:
            if self.minutes and not model.speed:
                raise UserError(
                    f"minutes needs the speed of model {model.name}: set its images/s in training, as a short run prints."
                )
        self._check_question()

    def _check_question(self) -> None:
        num_models, num_sizes = len(self.models), len(self.data_sizes)
        weighted = [model.name for model in self.models if model.weights]
        compared = {
            "data_size": num_sizes,
            "scaling": self.num_lengths * num_models,
            "ablation": num_models,
            "labels": num_models if weighted else 0,
        }
        if compared[self.question] < 2:
            raise UserError(
                f"question = {self.question} has nothing to compare: data_size compares at least two data_sizes; scaling two models, lengths, "
                "budgets or minutes; ablation two models; labels two models, one of them with weights=..."
            )
        for name, is_given, questions in (
            ("weights of models", weighted, ("labels",)),
            ("several data_sizes", num_sizes > 1, ("data_size", "labels")),
            ("several lengths", self.num_lengths > 1, ("scaling",)),
        ):
            if is_given and self.question not in questions:
                raise UserError(
                    f"{name} belong to question = {' or '.join(questions)}, and it is {self.question}: leave them out."
                )
