"""Studies: many pre-trainings, called cells, that answer one question. Each question is a file of `questions/`, found
by its name:

specs(config) -> the cells (`cells` makes one of each combination), each followed by the runs that score its weights
answer(results) -> the blocks of the report
"""

import contextlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.metric import kind_of, title_of
from pipeline.base.page import Block, Heading, Paragraph, Table, markdown, report
from pipeline.base.words import counted, si
from pipeline.checkpoint.store import step_of
from pipeline.cluster.ray_tasks import RunJobs, shared_path
from pipeline.cluster.status_files import read_end, read_settings
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.mixture.run_data import RunData, open_run_data
from pipeline.estimate.plan import make_plan
from pipeline.experiment.engine import Experiment, ExperimentAnswer, sources_of, start
from pipeline.experiment.spec import RunSpec, make_spec
from pipeline.experiment.table import Row, StudyResults
from pipeline.model.files import find_file
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import RunFacts
from pipeline.process.committed import NAME, run_of_checkpoint
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig, StudyModel
from pipeline.settings.quantities import Limit
from pipeline.settings.run import RunConfig

# The runs of a study, and notes for its report.
Cells = tuple[list[RunSpec], list[str]]
EXA = 1e18
_BEST = "best_score"  # The best score of all models.
_METHOD = (
    "A score is the mean over the seeds of one model at one data size and length. Brackets are 95 % intervals, each for"
    " itself: Student's t over the seeds; of a single run over its test images, which says nothing of other seeds or"
    " shots. Differences are by seed where both models have the same four or more, else of the two means, with a common"
    " variance of the seeds; of single runs over the test images. p is corrected by Holm's method for all pairs, and a"
    " difference is more than noise below 0.05. The best of several models is chosen by its score, which is therefore a"
    " little too high. Nothing is claimed for other data, image sizes, settings or schedules."
)


def run(config: StudyConfig, run_jobs: RunJobs | None = None) -> StudyResults | None:
    """Run a study, and write its report. Returns None if only a plan, a script or one run was asked for. run_jobs: by
    default as config.on says.

    Raises as `engine.run`, and UserError for a study that cannot run.
    """
    shared_path("data.path", run_for_all(config).data.path)
    return start(Study, config, run_jobs)


class Study(Experiment):
    """Raises UserError for what can be seen to be wrong without training. notes: sentences for the report."""

    kind = "study"

    def __init__(self, config: StudyConfig) -> None:
        self.config, self.folder, self.score = config, Path(config.out) / config.name, config.score
        self.specs, self.notes = _question(config.question).specs(config)
        self.cells = [spec for spec in self.specs if not spec.needs]
        self.dataset = open_dataset(self.cells[0].config.data.path)
        losses = {cell.config.train.loss: cell.name for cell in self.cells}
        is_of_classes = all(objectives.kind(loss).predicts == "classes" for loss in losses)
        # A probe's accuracy is of the features, whatever they learnt from.
        if len(losses) > 1 and not is_of_classes and not kind_of(self.score):
            listed = ", ".join(f"{name} has {loss}" for loss, name in losses.items())
            raise UserError(f"train.loss: {listed}. Their scores cannot be compared.")
        measured = self._measured()
        if self.score not in measured:
            raise UserError(
                f"score = {self.score}: these cells will not have it, but {', '.join(measured) or 'none at all'}. 5shot"
                " and 20nn need probe.every, probe.shots and probe.neighbours of the run; finetune:NAME needs"
                " `finetune`."
            )
        self.scored_on = measured[self.score]

    def _measured(self) -> dict[str, str]:
        """The scores that cells will have -> data set and split, as "photos:val"."""
        cell = self.cells[0]
        run, metrics = cell.config, objectives.metrics(cell.config, self.dataset.num_classes)["scores"]
        own = _evaluated(run)
        found = {name: own for name in ("top1", "top5") if any(metric.endswith(f"_{name}") for metric in metrics)}
        found |= {"best_top1": own} if run.checkpoint.best.endswith("top1") else {}
        if run.probe.every.amount:
            for number, (name, (path, split)) in enumerate(run.probe.tested.items()):
                probed = run.probe.metrics(name if number else "").items()
                on = f"{Path(path or run.data.path).name}:{split}"
                found |= {name.removeprefix("_"): on for name, metric in probed if metric.better and metric.is_share}
        tuned = [spec for spec in self.specs if cell.name in spec.needs]
        return found | {f"finetune:{s.name.removeprefix(f'{cell.name}-')}": _evaluated(s.config) for s in tuned}

    @cached_property
    def shared(self) -> dict[str, Any]:  # type: ignore[override]
        return sources_of(self.specs)

    def answer(self, rows: Sequence[Row]) -> ExperimentAnswer:
        """In the order of the settings, with the scores of fine-tunings as `finetune:NAME`."""
        config, order = self.config, [model.name for model in self.config.models]
        cells = sorted(joined(rows), key=lambda c: (order.index(c.group), c.data_size, c.steps, c.seed))
        data, fingerprint = str(self.dataset.path), self.dataset.fingerprint
        results = StudyResults(config.name, self.score, data, fingerprint, self.scored_on, cells, self.notes)
        return report_of(config.question, results)

    def facts(self) -> RunFacts:
        config, dataset, run = self.config, self.dataset, self.cells[0].config
        names = [model.name for model in config.models]
        description = (
            f"**Study** ({config.question}) of {', '.join(names)} on **{dataset.path.name}**:"
            f" {counted(len(self.specs), 'run')}, which are shown below this one, compared by {config.score}."
        )
        return self.facts_on(
            dataset,
            replace(run.data, eval_split=run.data.evaluated_split),
            schema.to_dict(config) | {"models": names},
            {"question": config.question},
            description=description,
            score=_BEST,
            scored_on=f"{title_of(config.score)} {self.scored_on}",
        )


def _evaluated(config: RunConfig) -> str:
    return ":".join([Path(config.data.path).name, *config.data.evaluated[:1]])


def report_of(question: str, results: StudyResults) -> ExperimentAnswer:
    """The report of a study: the answer to its question, all cells, and how it was made."""
    states = [cell.state for cell in results.cells]
    listed = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    first = Paragraph(f"{counted(len(states), 'cell')}: {listed}. Means leave out those without a score.")
    found = list(_question(question).answer(results))
    data = f"Data: {results.data}, fingerprint {results.fingerprint}. Score: {results.score} on {results.evaluated_on}."
    texts, table = map(Paragraph, (data, *results.notes, _METHOD)), _cells_table(results)
    blocks: list[Block] = [first, *found, Heading("All cells"), table, Heading("How this was made"), *texts]
    metrics = {f"runs_{state}": float(states.count(state)) for state in ("done", "failed", "diverged")}
    metrics["seconds"] = 3600 * sum(cell.hours or 0.0 for cell in results.cells)
    for cell in results.scored(results.score):
        metrics[_BEST] = max(metrics.get(_BEST, 0.0), cell.scores[results.score])
    title = f"Study {results.name}: {question}"
    summary = markdown(title, [first, *[block for block in found if isinstance(block, Table)][:1]])
    about = {"name": results.name, "question": question, "score": results.score, "data": results.data}
    return ExperimentAnswer(metrics, summary, report(title, blocks) | {"results.json": json.dumps(about)}, results)


def _question(name: str) -> Any:
    return importlib.import_module(f"pipeline.experiment.questions.{name}")


def joined(rows: Sequence[Row]) -> list[Row]:
    """Cells with the scores of the runs that fine-tune their weights, without which they are not done."""
    cells = {row.name: row for row in rows if not row.parent}
    for row in rows:
        cell = cells.get(row.parent)
        if cell is None or cell.state != "done":
            continue
        if row.state != "done":
            cells[cell.name] = replace(cell, state=row.state, reason=f"{row.name}: {row.reason}" * bool(row.reason))
            continue
        own, merged = f"finetune:{row.name.removeprefix(f'{cell.name}-')}", {}
        for name in ("scores", "num_test", "effective_images"):
            values = getattr(row, name)
            merged[name] = getattr(cell, name) | ({own: values["top1"]} if "top1" in values else {})
        hours = (cell.hours or 0.0) + (row.hours or 0.0)
        cells[cell.name] = replace(cell, hours=hours, reason=cell.reason or row.reason, **merged)
    return list(cells.values())


def _cells_table(results: StudyResults) -> Table:
    size, unit = results.compute_unit
    names = list(dict.fromkeys([results.score, *(name for cell in results.cells for name in cell.scores)]))
    rows = [
        (
            cell.name,
            f"{cell.state}: {cell.reason}" if cell.reason else cell.state,
            *(f"{100 * cell.scores[name]:.2f}" if name in cell.scores else "–" for name in names),
            f"{cell.data_size:,}",
            f"{cell.exaflops / size:.3g}",
            f"{cell.steps:,}",
        )
        for cell in results.cells
    ]
    last = ("training images", unit, "steps")
    return Table(("cell", "state", *(f"{name}, %" for name in names), *last), rows)


# -------------------------------------------------------------------- the cells
def cells(config: StudyConfig) -> Cells:
    """Returns (each combination of model, data size, length and seed, cheapest first, notes for the report). Raises
    UserError.
    """
    base = run_for_all(config)
    if base.init.weights and not config.has_weights:
        raise UserError(
            f"{config.run} has init.weights: give weights to the models of question=continue or labels,"
            " or use a file without."
        )
    notes: list[str] = []
    extra = pretraining_compute(config, base.track.uri, notes)
    opened: dict[str, RunData] = {}
    found: list[tuple[RunSpec, list[RunSpec]]] = []
    for model, size, seed in product(config.models, config.data_sizes or [base.data.limit], config.seeds):
        found += _cells_of(config, model, size, seed, 0.0 if model.weights else extra, opened)
    found.sort(key=lambda pair: (pair[0].facts["exaflops"], pair[0].facts["data_size"], pair[0].seed))
    specs, trained = list[RunSpec](), dict[str, int]()
    for cell, finetunes in found:
        if cell.trunk:  # Its steps are done once.
            shared = trained.get(cell.trunk.name, 0)
            trained[cell.trunk.name] = cell.trunk_steps
            cell = replace(cell, flops=cell.flops * (cell.facts["steps"] - shared) / cell.facts["steps"])
        specs += [cell, *finetunes]
    return specs, notes


def refuse(config: StudyConfig, *names: str) -> None:
    """Raise UserError for what other questions compare: weights of models, several lengths, several data sizes."""
    given = {
        "weights": (config.has_weights, "labels or continue"),
        "lengths": (config.num_lengths > 1, "scaling"),
        "data_sizes": (len(config.data_sizes) > 1, "data_size or labels"),
    }
    for name in names:
        is_given, question = given[name]
        if is_given:
            raise UserError(
                f"question = {config.question} compares no {name}, which belong to question = {question}: leave them"
                " out."
            )


def run_for_all(config: StudyConfig) -> RunConfig:
    """What all cells have in common. Its objective is not checked: it may need what only the models set. Raises
    UserError.
    """
    model = _overrides(config, config.models[0]) if config.has_weights else []
    return schema.load(RunConfig, config.run, [*config.settings, *model, "name=study"])


# -------------------------------------------------------------------- making them
def _cells_of(
    config: StudyConfig, model: StudyModel, size: Limit, seed: int, extra: float, opened: dict[str, RunData]
) -> list[tuple[RunSpec, list[RunSpec]]]:
    """The cells of one model, data size and seed, with their fine-tunings: one for each length or budget, the shortest
    first.

    extra: FLOPs for which they train in addition. opened: the data of other cells, most of which train on the same; is
    added to.
    """
    folder = Path(config.out) / config.name
    common = [*config.settings, *_overrides(config, model), f"out={folder}", f"seed={seed}", f"data.limit={size}"]
    first = make_spec("study", "", config.run, [*common, "name=study"]).config
    batch, asked = first.train.global_batch, (first.data, seed, first.labels)
    if (data := opened.get(repr(asked))) is None:
        data = opened[repr(asked)] = open_run_data(*asked)
    if data.eval_split != first.data.eval_split:  # The data have no such split, and the run itself sets none.
        common.append("data.eval_split=")
    built = _starting_model(first, data, config.out)
    flops = objectives.training_flops(first, built)
    stem = f"{model.name}-n{len(data.split.parts[0])}" if config.data_sizes else model.name
    lengths = {str(length).replace(" ", "_").replace("%", "pc"): str(length) for length in config.lengths}
    for budget in config.budgets:
        if not (steps := round(budget * EXA / (flops * batch))):
            raise UserError(f"budget {budget:g} is less than one step of model {model.name}: give it more.")
        lengths[f"{budget:g}EF"] = f"{steps} steps"
    found = []
    for label, length in (lengths or {"": str(first.train.length)}).items():
        name = "-".join(filter(None, [stem, label, f"seed{seed}"]))
        named, command = [*common, f"name={name}"], "finetune" if first.init.weights else "pretrain"
        try:
            cell = make_spec(name, command, config.run, [*named, f"train.length={length}"])
            steps = _steps_of(cell.config, data)
            if extra:
                steps += round(extra / (flops * batch))
                cell = make_spec(name, command, config.run, [*named, f"train.length={steps} steps"])
            if config.cooldown:
                cell = _with_trunk(config, name, f"{stem}-trunk-seed{seed}", named, steps)
                _steps_of(cell.config, data)
        except UserError as error:
            raise UserError(f"cell {name}: {error}") from None
        cell = _with_cost(replace(cell, group=model.name), data, built, flops, steps)
        found.append((cell, [_finetune(file, cell, built) for file in config.finetune]))
    return found


def _steps_of(config: RunConfig, data: RunData) -> int:
    """The steps of a run, however many ranks divide its batch. Raises UserError for an impossible length."""
    undivided = replace(config, train=replace(config.train, micro_batch=config.train.global_batch))
    return make_plan(undivided, data.epoch_samples, 1).steps


def _with_cost(spec: RunSpec, data: RunData, model: models.Config, flops: float, steps: int) -> RunSpec:
    """The run with its facts. flops: of training on an image."""
    images = steps * spec.config.train.global_batch
    facts = {
        "parameters": models.num_parameters(model),
        "data_size": len(data.split.parts[0]),
        "steps": steps,
        "images_seen": images,
        "exaflops": float(images) * flops / EXA,
    }
    return replace(spec, flops=float(images) * flops, facts=facts)


def _overrides(config: StudyConfig, model: StudyModel) -> list[str]:
    """The settings of a model. If any model has weights, they or none are the model's, whatever the file of settings
    has.
    """
    if not config.has_weights:
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


def _with_trunk(config: StudyConfig, name: str, trunk_name: str, overrides: list[str], steps: int) -> RunSpec:
    """The run with a cooldown; its trunk is the run at a constant rate up to where that begins."""
    cooldown = max(1, round(config.cooldown * steps))
    constant = [*overrides, "schedule.decay=constant", f"train.length={steps} steps"]
    run = make_spec(name, "pretrain", config.run, [*constant, f"schedule.cooldown={cooldown} steps"])
    if run.config.schedule.warmup.unit == "%":
        raise UserError(
            f"schedule.warmup = {run.config.schedule.warmup} differs between lengths, which then share no steps: with"
            " cooldown, give it in steps, epochs or samples."
        )
    # What a step depends on beside the learning rate, which is constant here.
    loss = run.config.train.loss
    following = {
        "optimizer.weight_decay_end": run.config.optimizer.weight_decay_end is not None,
        f"train.loss = {loss}": objectives.kind(loss).follows_length,
    }
    if found := [name for name, follows in following.items() if follows]:
        raise UserError(
            f"{found[0]} follows the length of a run, so runs of different lengths share no steps: leave out cooldown."
        )
    if "://" in run.config.checkpoint.folder:
        raise UserError("cooldown copies checkpoints between runs: checkpoint.folder must be on a disk.")
    own = [f"name={trunk_name}", f"train.length={steps - cooldown} steps"]
    trunk = make_spec(trunk_name, "pretrain", config.run, [*constant, *own])
    return replace(run, trunk=trunk, trunk_steps=steps - cooldown)


def _finetune(file: str, cell: RunSpec, model: models.Config) -> RunSpec:
    """The run that fine-tunes the weights of a cell by a file."""
    own = schema.load(RunConfig, file, ["init.weights=any"])
    name = f"{cell.name}-{own.name}"
    given = [f"name={name}", f"out={cell.config.out}", f"seed={cell.seed}", f"init.weights={cell.folder}"]
    spec = make_spec(name, "finetune", file, given, group=cell.group, needs=(cell.name,))
    train, size = spec.config.train, spec.config.model.image_size
    data = open_run_data(spec.config.data, cell.seed, spec.config.labels)
    model = replace(model, image_size=size)
    steps = train.length.steps(data.epoch_samples, train.global_batch)
    return _with_cost(spec, data, model, models.training_flops_per_image(model), steps)


# -------------------------------------------------------------------- what the pre-training of their weights cost
def pretraining_compute(config: StudyConfig, uri: str, notes: list[str]) -> float:
    """FLOPs of the longest pre-training among the weights of a study, if others shall train for as much longer; else 0.

    uri: MLflow's, for weights that it names. notes: gets a sentence for each of the weights, for the report.
    """
    found = {}
    for weights in dict.fromkeys(model.weights for model in config.models if model.weights):
        runs = compute_of_runs(Path(weights_path(weights, uri, out=config.out)))
        names = [model.name for model in config.models if model.weights == weights]
        found[names[0]] = compute = sum(runs)
        before = " by runs that began with weights whose own pre-training is not known" * (not runs[-1])
        notes.append(
            f"Weights of {', '.join(names)}: {weights}, "
            + (f"pre-trained for {si(compute, 'FLOP')}{before}." if compute else "whose pre-training is not known.")
        )
    if not config.equal_compute or not any(found.values()):
        return 0.0
    longest = max(found, key=found.__getitem__)
    notes.append(f"Models without weights train for {si(found[longest], 'FLOP')} more, those of {longest}.")
    return found[longest]


def compute_of_runs(weights: Path) -> list[float]:
    """FLOPs of each run that weights come from, the last one first; 0 at the end for weights of which no run is known.

    weights: the folder of a run, or one of its checkpoints.
    """
    found: list[float] = []
    folders = set[Path]()
    while True:
        with contextlib.suppress(UserError):
            weights = find_file(weights).parent
        checkpoint = next((path for path in (weights, weights.parent) if NAME.fullmatch(path.name)), None)
        folder = (run_of_checkpoint(checkpoint) or checkpoint.absolute().parents[1]) if checkpoint else weights
        try:
            end, settings, facts = read_end(folder), read_settings(folder), PageFolder(folder).read_facts().facts
        except (UserError, OSError):  # For example, a file of weights is not a folder.
            end = None
        if end is None or folder in folders:
            return [*found, 0.0]
        folders.add(folder)
        step = step_of(checkpoint) if checkpoint else end.step
        found.append(settings.train.global_batch * (step * facts.flops_per_image))
        # The weights that the run found at its first start.
        before = facts.origin.path if facts.origin else settings.init.weights
        if before is None:
            return found
        weights = Path(before)
