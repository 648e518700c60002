"""The cells of a study: its pre-training runs, made from the settings and checked before anything starts.

A folder holds one study. Its study.json says what each cell is; cells may be added to a study, and none may change.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline import model as models
from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.files import as_bytes, replacing
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.mixture.run_data import RunData, open_run_data
from pipeline.estimate.plan import Plan, make_plan
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.review.statistics import listed
from pipeline.settings import changes, schema
from pipeline.settings.commands.study import StudyConfig, StudyModel
from pipeline.settings.quantities import Limit
from pipeline.settings.run import RunConfig
from pipeline.study.running.compute import EXA, pretraining_compute
from pipeline.study.running.identity import StudyIdentity, common_changes, identity_of, settings_of
from pipeline.transfer.child_run import ChildRun, make_child

STUDY_FILE = "study.json"


@dataclass(frozen=True)
class StudyCell:
    """A pre-training run and what scores its weights.

    steps, epochs: of the run. data_size: training images of data.path, which an epoch uses once. trunk: with a cooldown, the run at a
    constant rate whose last checkpoint this one continues; several cells share it. finetunes: runs that start from its weights.
    """

    model: StudyModel
    run: ChildRun
    seed: int
    data_size: int
    steps: int
    epochs: float
    flops_per_image: int
    parameters: int
    trunk: ChildRun | None
    trunk_steps: int
    finetunes: list[ChildRun]
    finetune_flops: float

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def family(self) -> str:
        return self.model.family or self.model.name

    @property
    def images_seen(self) -> int:
        return self.steps * self.run.config.train.global_batch

    @property
    def flops(self) -> float:
        """FLOPs of the whole pre-training run, including the steps that it shares with others."""
        return float(self.images_seen) * self.flops_per_image


@dataclass(frozen=True)
class Study:
    """cells: cheapest first. jobs: the cells that one task runs, one after the other: those that share a trunk, else one."""

    config: StudyConfig
    folder: Path
    dataset: Dataset
    cells: list[StudyCell]
    notes: list[str]

    @property
    def jobs(self) -> list[list[StudyCell]]:
        """Cheapest first; within a job, the shortest run first."""
        groups: dict[str, list[StudyCell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.trunk.name if cell.trunk else cell.name, []).append(cell)
        return sorted(groups.values(), key=lambda cells: sum(new_flops(cells)))

    def job_of(self, wanted: str) -> list[StudyCell]:
        """The cells of a job up to the cell of this name. Raises UserError."""
        for job in self.jobs:
            names = [cell.name for cell in job]
            if wanted in names:
                return job[: names.index(wanted) + 1]
        raise UserError(f"cell = {wanted}: there is no such cell. There are: {', '.join(c.name for c in self.cells)}.")

    def claim(self) -> None:
        """Write study.json. Raises UserError with the difference if a cell of this name was another run, or the data are others."""
        file, now = self.folder / STUDY_FILE, identity_of(self)
        then = replace(now, cells={})
        try:
            then = json_record.read(file, StudyIdentity)
        except FileNotFoundError:
            if self.folder.exists() and (
                files := [p.name for p in self.folder.iterdir() if not p.name.startswith(".")]
            ):
                raise UserError(
                    f"{self.folder} is not empty (it holds {files[0]}), and holds no study. Choose another name=..."
                ) from None
        except UserError as error:
            raise UserError(
                f"{error} It says what the runs of this study are: choose another name=..., or remove the folder."
            ) from None
        found = [str(change) for change in common_changes(then, now)]
        for name, cell in now.cells.items():
            known = objectives.facts(cell["train.loss"])
            changed = changes.differences(then.cells.get(name, cell), cell, known, "comparison")
            found += [f"{change} in {name}" for change in changed]
        if found:
            raise UserError(
                f"{self.folder} holds another study: {listed(found, 3)}. Set it back, or choose another name=..."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        both = replace(now, cells={**then.cells, **now.cells}, sources={**now.sources, **then.sources})
        text = json.dumps(asdict(both), indent=1) + "\n"
        with replacing(file) as replacement:  # All jobs of an array write it, often at the same moment.
            replacement.write(as_bytes(text))


def open_study(config: StudyConfig) -> Study:
    """Make the cells of a study and check them as far as can be without training. Raises UserError."""
    folder = Path(config.out) / config.name
    base = run_for_all(config)
    if base.init.weights and config.question != "labels":
        raise UserError(
            f"{config.run} has init.weights: a study pre-trains new models. Use a file of launch/pretrain.py, or question=labels."
        )
    dataset = open_dataset(base.data.path)
    notes: list[str] = []
    cells = []
    extra = pretraining_compute(config, base.track.uri, notes)
    opened: dict[str, RunData] = {}
    for model in config.models:
        for size in config.data_sizes or [base.data.limit]:
            for seed in config.seeds:
                more = 0.0 if model.weights else extra
                cells += _cells_of(config, folder, dataset, model, size, seed, more, opened)
    cells.sort(key=lambda cell: (cell.flops, cell.data_size, cell.seed))
    _refuse_twins(cells)
    _check_comparable(cells)
    _check_score(config, cells[0], dataset.num_classes)
    if config.cooldown:
        notes.append(
            f"The learning rate is constant and falls in the last {config.cooldown:.0%} of each run, so runs of different lengths share "
            "their first steps; each equals a run of its own with this schedule."
        )
    return Study(config, folder, dataset, cells, notes)


def run_for_all(config: StudyConfig) -> RunConfig:
    """What all cells have in common. Its objective is not checked: it may need what only the models set. Raises UserError."""
    model = _overrides(config, config.models[0]) if config.question == "labels" else []
    return schema.load(RunConfig, config.run, [*config.settings, *model, "name=study"])


def new_flops(cells: list[StudyCell]) -> list[float]:
    """FLOPs that each cell of a job adds, with its fine-tuning: a trunk's steps are done once."""
    added, trained = [], 0
    for cell in cells:
        own = cell.steps - (trained if cell.trunk else 0)
        added.append(float(own) * cell.run.config.train.global_batch * cell.flops_per_image + cell.finetune_flops)
        trained = cell.trunk_steps
    return added


# -------------------------------------------------------------------- making them
def _plan(config: RunConfig, num_samples: int) -> Plan:
    """The plan of a cell, however many ranks divide its batch. Raises UserError for an impossible length."""
    undivided = replace(config, train=replace(config.train, micro_batch=config.train.global_batch))
    return make_plan(undivided, num_samples, 1)


def _cells_of(
    config: StudyConfig,
    folder: Path,
    dataset: Dataset,
    model: StudyModel,
    size: Limit,
    seed: int,
    extra: float,
    opened: dict[str, RunData],
) -> list[StudyCell]:
    """The cells of one model, data size and seed: one for each length or budget, the shortest first.

    extra: FLOPs for which they train in addition. opened: the data of other cells, most of which train on the same; is added to.
    """
    common = [*config.settings, *_overrides(config, model), f"out={folder}", f"seed={seed}", f"data.limit={size}"]
    first = make_child("study", config.run, [*common, "name=study"]).config
    asked = (first.data, seed, first.train.global_batch, first.labels, dataset.storage)
    if (data := opened.get(repr(asked))) is None:
        data = opened[repr(asked)] = open_run_data(*asked)
    if data.eval_split != first.data.eval_split:  # The data have no such split, and the run itself sets none.
        common.append("data.eval_split=")
    built = _starting_model(first, data, config.out)
    flops = objectives.training_flops(first, built)
    split = data.split.parts[0]
    stem = f"{model.name}-n{len(split)}" if config.data_sizes else model.name
    lengths: list[tuple[str, str]] = [
        (str(length).replace(" ", "_").replace("%", "pc"), str(length)) for length in config.lengths
    ]
    batch = first.train.global_batch
    in_steps = [
        *((f"{budget:g}", "EF", "exaFLOPs", round(budget * EXA / (flops * batch))) for budget in config.budgets),
        *((f"{minutes:g}", "min", "minutes", round(minutes * 60 * model.speed / batch)) for minutes in config.minutes),
    ]
    for amount, short, unit, steps in in_steps:
        if not steps:
            raise UserError(f"{amount} {unit} are less than one step of model {model.name}: give it more.")
        lengths.append((amount + short, f"{steps} steps"))

    def make(name: str, length: str) -> tuple[Plan, ChildRun, ChildRun | None, int]:
        named, trunk, trunk_steps = [*common, f"name={name}"], None, 0
        run = make_child(name, config.run, [*named, f"train.length={length}"])
        try:
            plan = _plan(run.config, data.epoch_samples)
            if extra:
                plan = replace(plan, steps=plan.steps + round(extra / (flops * batch)))
                run = make_child(name, config.run, [*named, f"train.length={plan.steps} steps"])
            if config.cooldown:
                run, trunk, trunk_steps = _with_trunk(config, name, stem, seed, named, plan.steps)
                _plan(run.config, data.epoch_samples)
        except UserError as error:
            raise UserError(f"cell {name}: {error}") from None
        return plan, run, trunk, trunk_steps

    found = []
    for label, length in lengths or [("", str(first.train.length))]:
        plan, run, trunk, trunk_steps = make("-".join(filter(None, [stem, label, f"seed{seed}"])), length)
        finetunes = [_finetune(file, run, folder, seed) for file in config.finetune]
        found.append(
            StudyCell(
                model,
                run,
                seed,
                len(split),
                plan.steps,
                plan.epochs,
                flops,
                models.num_parameters(built),
                trunk,
                trunk_steps,
                finetunes,
                sum(_finetune_flops(finetune.config, built) for finetune in finetunes),
            )
        )
    return sorted(found, key=lambda cell: cell.steps)


def _overrides(config: StudyConfig, model: StudyModel) -> list[str]:
    """The settings of a model. With question = labels, weights or none are the model's, whatever the file of settings has."""
    if config.question != "labels":
        return model.settings
    # A new model has neither weights nor what the file does with them.
    none = ["init.weights=null", "init.mean_pool=false", "init.attentive_pool=false"]
    return [*model.settings, *([f"init.weights={model.weights}"] if model.weights else none)]


def _starting_model(config: RunConfig, data: RunData, out: str) -> models.Config:
    """The backbone of a cell: a new one, or that of its weights with a new head. out: folder of runs and studies."""
    if not config.init.weights:
        return objectives.new_backbone(config, data.dataset.num_classes, data.split.pixels)
    found = models.read_weights(weights_path(config.init.weights, config.track.uri, out=out)).config
    adaptation = objectives.adaptation(config, data.dataset.num_classes, data.split.pixels)
    return models.adapted(found, config.init.weights, **adaptation)


def _with_trunk(
    config: StudyConfig, name: str, stem: str, seed: int, overrides: list[str], steps: int
) -> tuple[ChildRun, ChildRun, int]:
    """Returns (the run with a cooldown, the run at a constant rate up to where it begins, steps of that one)."""
    cooldown = max(1, round(config.cooldown * steps))
    constant = [*overrides, "schedule.decay=constant", f"train.length={steps} steps"]
    run = make_child(name, config.run, [*constant, f"schedule.cooldown={cooldown} steps"])
    if run.config.schedule.warmup.unit == "%":
        raise UserError(
            f"schedule.warmup = {run.config.schedule.warmup} differs between lengths, which then share no steps: with cooldown, give it in "
            "steps, epochs or samples."
        )
    if found := _follows_length(run.config):
        raise UserError(
            f"{found} follows the length of a run, so runs of different lengths share no steps: leave out cooldown."
        )
    if "://" in run.config.checkpoint.folder:
        raise UserError("cooldown copies checkpoints between runs: checkpoint.folder must be on a disk.")
    trunk_name = f"{stem}-trunk-seed{seed}"
    trunk = make_child(
        trunk_name,
        config.run,
        [*constant, f"name={trunk_name}", f"train.length={steps - cooldown} steps", "track.register="],
    )
    return run, trunk, steps - cooldown


def _follows_length(config: RunConfig) -> str:
    """The first setting by which a step depends on how many there are in all; "" without one. The learning rate is constant here."""
    if config.optimizer.weight_decay_end is not None:
        return "optimizer.weight_decay_end"
    return f"train.loss = {config.train.loss}" if objectives.kind(config.train.loss).follows_length else ""


def _finetune(file: str, run: ChildRun, folder: Path, seed: int) -> ChildRun:
    """The run that fine-tunes the weights of a cell by a file."""
    own = schema.load(RunConfig, file, ["init.weights=any"])
    name = f"{run.name}-{own.name}"
    return make_child(name, file, [f"name={name}", f"out={folder}", f"seed={seed}", f"init.weights={run.folder}"])


def own_name(finetune: ChildRun) -> str:
    """The name that the file of a fine-tuning gives it; in a study, that of the cell precedes it."""
    return finetune.name.removeprefix(Path(str(finetune.config.init.weights)).name + "-")


def _finetune_flops(config: RunConfig, model: models.Config) -> float:
    data = open_run_data(config.data, config.seed, config.train.global_batch, config.labels)
    images = config.train.length.steps(data.epoch_samples, config.train.global_batch) * config.train.global_batch
    return float(images) * models.training_flops_per_image(replace(model, image_size=config.model.image_size))


# -------------------------------------------------------------------- checking them
def _refuse_twins(cells: list[StudyCell]) -> None:
    """Raise UserError for two cells that are the same run."""
    seen: dict[str, str] = {}
    for cell in cells:
        # Another length that is as many steps is the same run, too.
        about = json.dumps(
            {**settings_of(cell.run), "train.length": cell.steps, "data.limit": cell.data_size}, sort_keys=True
        )
        if about in seen:
            raise UserError(f"{seen[about]} and {cell.name} are the same run: leave out one of them.")
        seen[about] = cell.name


def _check_comparable(cells: list[StudyCell]) -> None:
    """Raise UserError if the cells are evaluated differently, as far as settings of the models can bring about."""
    for name in ("data.path", "data.eval_split", "data.exclude", "data.dev_share", "train.loss"):
        values: dict[str, str] = {}
        for cell in cells:
            values.setdefault(str(settings_of(cell.run)[name]), cell.name)
        if len(values) > 1 and not (name == "train.loss" and all(objectives.kind(v).predicts_classes for v in values)):
            (one, first), (other, second) = list(values.items())[:2]
            raise UserError(f"{first} has {name} = {one}, {second} has {other}: their scores cannot be compared.")


def score_names(config: StudyConfig, run: RunConfig, num_classes: int | None = None) -> list[str]:
    """Names of the scores that a cell will have. num_classes: see `objectives.metrics`."""
    measured = objectives.metrics(run, num_classes)["scores"]
    names = [name for name in ("top1", "top5") if any(metric.endswith(f"_{name}") for metric in measured)]
    names += ["best_top1"] if run.checkpoint.best.endswith("top1") else []
    if run.probe.every.amount:
        found = run.probe.metrics("").items()
        names += [name.removeprefix("_") for name, metric in found if metric.better and metric.is_share]
    return names + [f"finetune:{schema.load(RunConfig, file, ['init.weights=any']).name}" for file in config.finetune]


def scored_on(study: Study) -> str:
    """Data set and split of the study's score, as "photos:val"."""
    score, cell = study.config.score, study.cells[0]
    kind, _, name = score.partition(":")
    config = cell.run.config if kind != "finetune" else next(f for f in cell.finetunes if own_name(f) == name).config
    if kind in ("finetune", "top1", "top5", "best_top1"):
        data, split = config.data.path, config.data.evaluated[0]
    else:
        data, split = config.probe.data or config.data.path, config.probe.split
    return f"{Path(data).name}:{split}"


def _check_score(config: StudyConfig, cell: StudyCell, num_classes: int) -> None:
    known = score_names(config, cell.run.config, num_classes)
    if config.score not in known:
        raise UserError(
            f"score = {config.score}: these cells will not have it, but {', '.join(known) or 'none at all'}. 5shot and 20nn need probe.every, "
            "probe.shots and probe.neighbours of the run; finetune:NAME needs `finetune`."
        )
