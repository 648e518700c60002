"""Sets a run up: settings, data, weights and checkpoints become a `TrainingRun`."""

import contextlib
import hashlib
import platform
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import OneRankError, UserError
from pipeline.base.json_record import quoted
from pipeline.base.trained_on import TrainedSet, not_held_out, recorded
from pipeline.base.words import counted
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import Checkpoints, State, checkpoint_folder, read_state, verify
from pipeline.cluster.status_files import refuse_checkpoint_of_another
from pipeline.cluster.stop import Stop
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import NOTHING_EXCLUDED
from pipeline.data.loading.loader import Batch, normalise
from pipeline.data.loading.mix import draw_mixing
from pipeline.data.loading.order import batches_before
from pipeline.data.loading.views import Views
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MIXTURE, MixedSplit, mixed_until, mixture_facts
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.data.storage.retry import Retry
from pipeline.data.storage.tars import check_tars_on_all_ranks
from pipeline.estimate.memory import refuse_too_large, what_takes_less
from pipeline.estimate.plan import Plan
from pipeline.evaluate.classify import each_sample, label_table
from pipeline.evaluate.probes import linear_head
from pipeline.evaluate.probes.linear_head import LinearHead
from pipeline.evaluate.probes.out_of_fold import divide
from pipeline.evaluate.split_reader import SplitReader
from pipeline.model import Model, read_weights
from pipeline.model.files import find_file
from pipeline.model.weights import TARGETS
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.origin import find_origin
from pipeline.monitor.profile import StepClock, device_memory, host_memory
from pipeline.monitor.run_page import WeightsOrigin, hide_passwords
from pipeline.objectives.classification import classes_note, moved_class
from pipeline.objectives.parameters import optimizers
from pipeline.process import waits
from pipeline.process.committed import checkpoints_of
from pipeline.process.console import Console
from pipeline.process.distributed import START_MINUTES, Ranks, from_environment, use_exact_arithmetic
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Change, Fact, OnChange
from pipeline.train.bookkeeping import Identity, StartingPoint, TrainingRun
from pipeline.train.loop import Feed, training_step
from pipeline.train.start import Prepared

if TYPE_CHECKING:  # DeepSpeed is imported late: it takes seconds.
    from pipeline.train.zero.engine import Engine

# Entries of an identity other than settings.
_FACTS = {
    **dict.fromkeys(("fingerprint", "classes"), Fact(on_change="run")),
    "excluded": Fact(NOTHING_EXCLUDED, on_change="run"),
    "the teacher's SHA-256": Fact("", on_change="run"),
    MIXTURE: Fact(on_change="nothing"),  # Compared by `mixed_until`.
    "evaluation_excluded": Fact(NOTHING_EXCLUDED, on_change="nothing"),
    "left_out": Fact(0, on_change="nothing"),
    "ranks": Fact(on_change="nothing"),
    "fused_optimizer": Fact(False, on_change="nothing"),
}

# In the errors of a lack of memory: of CUDA's allocator, the CPU, NCCL and cuBLAS.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


# ---------------------------------------------------------------------- set-up
def set_up(stop: Stop, prepared: Prepared) -> TrainingRun:
    """Prepare a run, up to the step where it starts. Collective. Raises UserError for a user's mistake."""
    start = _find_start_on_all_ranks(stop, prepared)
    # A failure would leave processes and threads to this process, which may live on, and MLflow a run that never ends.
    with contextlib.ExitStack() as undone:
        run = TrainingRun(start, *_build_training_on_all_ranks(start, undone), undone)
        undone.pop_all()
    return run


# ---------------------------------------------------------------------- run folder's lock, ranks, and where to start
def _find_start_on_all_ranks(stop: Stop, prepared: Prepared) -> StartingPoint:
    """Lock the run folder, start the ranks, compare their settings and data, and find the checkpoint, the weights or
    the new model that the run begins with.
    """
    from pipeline.train.zero.engine import start_ranks

    config, data, plan, ranks = prepared.config, prepared.data, prepared.plan, from_environment()
    use_exact_arithmetic(ranks.device, config.engine.deterministic)
    identity = identity_of(config, plan, data)
    identity["fused_optimizer"] = optimizers.is_fused(config.engine, ranks.device)
    folder = stop.folder.path
    in_use = stop.folder.lock() if ranks.is_main else None
    console = Console(folder / "log.txt", ranks.is_main and in_use is None)
    waits.say_with(console.say)
    console.say(f"{config.name}: {plan.describe()}")
    if not stop.folder.is_locked:
        console.say(f"{folder} is on a file system without locks: nothing keeps a second run out of it.")
    data_lines = data.notes() if ranks.is_main else []  # Others say nothing.
    console.say(*plan.notes(config), *objectives.without_effect(config), *data_lines)
    start_ranks(ranks, _collective_minutes(config), stop.meet)
    ranks.agree(in_use)
    stop.connect(ranks)
    same = identity | versions()
    ranks.on_all(refuse_other_facts, same, ranks.agree(same))
    check_tars_on_all_ranks(ranks, data.split.storage.unchecked or [])

    gpu_memory = device_memory(ranks.device)
    least = min(ranks.gather(gpu_memory or host_memory()))  # Hosts may have other GPUs.
    of = "its GPU" if gpu_memory else "its share of the host"
    if config.model.name:  # Checked before the model is built, which takes long if it is too large.
        new = objectives.new_backbone(config, data.dataset.num_classes, data.split.pixels)
        ranks.on_main(refuse_too_large, config, plan, new, least, of)
    checkpoints = Checkpoints(checkpoint_folder(config))
    resumed, damaged = find_checkpoint_on_all_ranks(checkpoints, identity, plan.steps, ranks, console)
    origin, begun = None, config
    if resumed is None:
        ranks.on_main(refuse_checkpoints_elsewhere, config)
        if config.init.weights:
            # The file rather than its run: while that run trains on, its newest checkpoint is another one a moment
            # later.
            origin = ranks.on_main(_find_weights, config, console)
            begun = replace(config, init=replace(config.init, weights=origin.path))
    model, before = ranks.on_all(initial_model, begun, data.dataset, resumed, console)
    trained_on = list(dict.fromkeys([*before, *data.trained_on(config.name)]))
    marked = data.not_held_out(trained_on)
    if probe := prepared.run_probe:
        marked |= {f"probe.split of {name}": runs for name, runs in probe.trained_by(trained_on).items()}
    console.say(*(not_held_out(name, runs) for name, runs in marked.items()))
    if not config.model.name:
        ranks.on_main(refuse_too_large, config, plan, model.config, least, of)
    state = State(step=0) if resumed is None else read_state(resumed)
    return StartingPoint(
        **vars(prepared),
        ranks=ranks,
        stop=stop,
        console=console,
        identity=identity,
        trained_on=trained_on,
        checkpoints=checkpoints,
        resumed=resumed,
        damaged=damaged,
        state=state,
        changed="" if resumed is None else _in_words(changes_since(state, identity), "comparison"),
        origin=origin,
        model=model,
    )


def _collective_minutes(config: RunConfig) -> float:
    """Timeout of a collective call: the watchdog speaks first, also while one rank is in a wait that may last."""
    return START_MINUTES + config.health.hang_minutes + max(config.data.retry_minutes, config.commit_minutes)


def identity_of(config: RunConfig, plan: Plan, data: RunData) -> Identity:
    """The identity of a run, which is saved with each checkpoint."""
    dataset, split, evaluation = data.dataset, data.split, data.evaluation
    splits = [split, evaluation] if evaluation else [split]
    return {
        **objectives.flat_settings(config),
        "track.uri": hide_passwords(config.track.uri),
        "fingerprint": dataset.fingerprint,
        "classes": dataset.num_classes,
        "ranks": plan.world_size,
        "excluded": split.excluded,
        "the teacher's SHA-256": objectives.teacher_digest(config),
        "evaluation_excluded": evaluation.excluded if evaluation else NOTHING_EXCLUDED,
        **{f"left_out.{s.name}.{name}": n for s in splits for name, n in s.excluded_by.items()},
        **({MIXTURE: mixture_facts(split)} if isinstance(split, MixedSplit) else {}),
    }


def versions() -> Identity:
    """What is the same on every rank beside settings and data: Python, packages, and this code, also without git."""
    from pipeline.train.zero.internals import deepspeed

    code = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(file.read_bytes())
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "this code": code.hexdigest()[:12],
    }


def refuse_other_facts(mine: Identity, of_rank_0: Identity) -> None:
    """Raise UserError if this rank's settings, data or versions differ from rank 0's: its batches would not match."""
    other = [
        f"{key} is {schema.in_words(mine.get(key))} here, {schema.in_words(of_rank_0.get(key))} on rank 0"
        for key in {**of_rank_0, **mine}
        if mine.get(key) != of_rank_0.get(key)
    ]
    if other:
        raise UserError(f"differs from rank 0: {'; '.join(other)}. Give every node the same files.")


def _find_weights(config: RunConfig, console: Console) -> WeightsOrigin:
    """The weights that a run begins with, which it may go on without later. Raises UserError if there are none."""
    assert config.init.weights is not None
    weights = weights_path(config.init.weights, config.track.uri, console.say, config.out)
    return find_origin(find_file(Path(weights), console.say), weights)


def find_checkpoint_on_all_ranks(
    checkpoints: Checkpoints, now: Identity, num_steps: int, ranks: Ranks, console: Console
) -> tuple[AnyPath | None, set[str]]:
    """Return the newest intact checkpoint of this run (None: there is none) and the names of damaged ones.

    now: this run's `identity`. num_steps: its length. `latest` names it from here on.
    Raises UserError if checkpoints exist but none can be continued.
    """
    damaged: set[str] = set()
    ranks.on_main(checkpoints.clean_up, console.say)
    ranks.on_main(checkpoints.kept)  # Raises for a damaged kept.json before training, not after.
    for path in ranks.on_main(checkpoints.candidates):
        problems = [text for text in ranks.gather(verify(path, ranks.rank, ranks.world_size)) if text]
        if not problems:
            changes = ranks.on_main(_compare, path, now, num_steps)
            console.say(*(f"changed since the checkpoint: {text}" for text in changes))
            ranks.on_main(checkpoints.point_at, path)  # A kill may have prevented it.
            return path, damaged
        console.say(f"{path} is damaged ({problems[0]}): not used.")
        damaged.add(path.name)
    if damaged:
        raise UserError(f"no checkpoint in {checkpoints.folder} is intact. Remove that folder to start the run afresh.")
    return None, set()


def refuse_checkpoints_elsewhere(config: RunConfig) -> None:
    """Raise UserError if the run has checkpoints where its last start kept them. Call it where checkpoint.folder has
    none.

    It would begin anew otherwise, and remove the metrics of what it has trained.
    """
    run = Path(config.out, config.name)
    before = to_path(str(checkpoints_of(run)), Retry(60 * config.data.retry_minutes, "data.retry_minutes"))
    if there := Checkpoints(before).candidates():
        raise UserError(
            f"checkpoint.folder = {quoted(config.checkpoint.folder)} has no checkpoint of {run}, whose newest is"
            f" {there[0]}. Set it back, move the checkpoints, or start another run with name=..."
        )


def changes_since(state: State, now: Identity) -> list[Change]:
    """Differences to the run that made a checkpoint. now: this run's `identity`."""
    known = (objectives.facts(now["train.loss"]) if "train.loss" in now else dict(schema.facts_of(RunConfig))) | _FACTS
    return schema.differences(state.identity, now, known)


def _in_words(changes: list[Change], least: OnChange) -> str:
    """Those of the changes that mean at least so much."""
    return hide_passwords("; ".join(str(change) for change in changes if change.fact.means(least)))


def _compare(path: AnyPath, now: Identity, num_steps: int) -> list[str]:
    """List the changes since a checkpoint was made. Raises UserError if it cannot be continued."""
    state = read_state(path)
    refuse_checkpoint_of_another(path, state.identity, now)
    changed = changes_since(state, now)
    seen = batches_before(state.step, state.left_out)
    then_mixed, now_mixed = (mixed_until(identity, seen) for identity in (state.identity, now))
    if then_mixed != now_mixed and (MIXTURE in state.identity or MIXTURE in now):
        skipped = f", of which {seen - state.step:,} skipped in a rollback," * (seen > state.step)
        raise UserError(
            f"{path} cannot be continued: data.path and data.mix of its {counted(seen, 'batch')}{skipped} were"
            f" {then_mixed}, and are {now_mixed}. Set them back, change the weights or add a set with from_step={seen}"
            " or later, or start another run with name=..."
        )
    if other := _in_words(changed, "run"):
        raise UserError(f"{path} cannot be continued: {other}. Set it back, or start another run with name=...")
    if state.step > num_steps:
        raise UserError(
            f"{path} has {counted(state.step, 'step')} of training, more than train.length = {now.get('train.length')}"
            f" asks for ({num_steps:,}). Set it back, or start another run with name=..."
        )
    if state.step == num_steps and (other := _in_words(changed, "result")):
        raise UserError(
            f"the run is finished, and was another one: {other}. Set it back to use what was trained ({path}), "
            "raise train.length to train on, or start another run with name=..."
        )
    return [hide_passwords(str(change)) for change in changed]


def initial_model(
    config: RunConfig, dataset: Dataset, resumed: AnyPath | None, console: Console
) -> tuple[Model, list[TrainedSet]]:
    """Build the checkpoint's model (the engine loads its tensors later), load init.weights, or initialise a new model.

    Returns it, and what its weights and those of a teacher were trained on before.
    """
    if resumed is not None:
        state = read_state(resumed)
        return models.build(models.config_from_dict(state.model)), state.trained_on
    of_objective = objectives.kind(config.train.loss)
    if note := of_objective.check_classes(config, dataset.num_classes, dataset.classes):
        console.say(note)
    teacher = of_objective.published(config)
    before = recorded(teacher.extra) if teacher else []
    if config.init.weights:
        num_classes = of_objective.of_backbone(config, dataset.num_classes)["num_classes"]
        adaptation = objectives.adaptation(config, dataset.num_classes, dataset.pixels)
        content = models.read_weights(config.init.weights, console.say)
        names, before = content.extra.get("classes"), [*recorded(content.extra), *before]
        model = models.load(config.init.weights, seed=config.seed, content=content, say=console.say, **adaptation)
        del content  # whose tensors the model has copied
        if not num_classes and not of_objective.continues_additions:
            console.say(
                f"train.loss = {config.train.loss} begins with the backbone of {config.init.weights}; its head is new"
            )
        learnt = model.extra.get(TARGETS, [])
        if of_objective.predicts == "targets" and not config.init.new_head and learnt != config.data.targets:
            raise UserError(
                f"{config.init.weights} predicts {', '.join(learnt) or 'no numbers'}, and this run learns"
                f" {', '.join(config.data.targets)}. Use init.new_head=true, or name those of the weights in their"
                " order (data.targets)."
            )
        if model.config.num_classes != num_classes or (learnt and of_objective.predicts == "classes"):
            raise UserError(
                f"{config.init.weights} has {counted(model.config.num_classes, 'class')}, {config.data.path} has "
                f"{dataset.num_classes}. Use init.new_head=true, or the data set that these weights were made for."
            )
        is_kept = of_objective.predicts == "classes" and not config.init.new_head
        if is_kept and (not names or len(names) == num_classes):
            compared = config.data.path, dataset.classes, str(config.init.weights), names or ()
            if moved := moved_class(*compared):
                raise UserError(
                    f"{moved}: with init.new_head=false it would be learnt in place of another one. Use"
                    " init.new_head=true, or a data set with the classes in the order of the weights (class_list of"
                    " launch/shard.py)."
                )
            if note := classes_note(*compared):
                console.say(note)
        return model, before
    return models.build(objectives.new_backbone(config, dataset.num_classes, dataset.pixels), config.seed), before


# ---------------------------------------------------------------------- what trains
def _build_training_on_all_ranks(
    start: StartingPoint, undone: contextlib.ExitStack
) -> tuple["Engine", Feed, dict[str, float]]:
    """Build the engine, try out one step, and load the checkpoint. undone: closes what was opened, if set-up fails.

    The last of what is returned: metrics of a head that was fitted.
    """
    from pipeline.train.zero.engine import Engine, limit_collectives

    config, plan, ranks = start.config, start.plan, start.ranks
    clock = StepClock(ranks.device)
    # First, because it may fork processes, which should inherit little of what trains.
    feed = ranks.on_all(Feed, start, clock)
    undone.enter_context(feed.loader)
    head_metrics = fit_head_on_all_ranks(start) if start.resumed is None and config.init.fit_head else {}
    start.model.activation_checkpointing = config.engine.activation_checkpointing
    objective = ranks.on_all(objectives.create, config, start.model)  # It may read weights.
    objective.num_steps = plan.steps
    is_trained = config.init.fit_head or (bool(config.init.weights) and not config.init.new_head)
    line = objective.learn_from(start.data, head_is_trained=start.resumed is None and is_trained)
    if line:
        start.console.say(line)
    if start.resumed is None and start.origin is not None and objective.continues_additions:
        weights = ranks.on_all(read_weights, start.origin.path)
        start.console.say(ranks.on_all(objective.load_additions, weights.added, weights.decoder))
        del weights  # whose tensors the objective has copied
    fused = start.identity["fused_optimizer"]
    optimizer = optimizers.build(objective, objective.decayed(), config.optimizer, fused)
    with room("training", lambda: what_takes_less(config, plan, start.model.config)):
        engine = Engine(objective, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock)
        limit_collectives(_collective_minutes(config))
        dry_run_on_all_ranks(engine, start)
    if start.resumed is not None:
        engine.load(ShardedTensors.open(start.resumed), start.state.engine)
        if start.state.step:
            # An evaluation that a kill prevented is made up with what that step sets, such as DINO's temperature.
            objective.before_step(start.state.step - 1)
        start.stop.step = start.state.step
        start.console.say(f"resumed from {start.resumed} at step {start.state.step:,} of {plan.steps:,}")
    elif start.origin is not None:
        start.console.say(f"started from the weights in {config.init.weights}: {start.origin.details}")
    return engine, feed, head_metrics


# ---------------------------------------------------------------------- a fitted head
def fit_head_on_all_ranks(start: StartingPoint) -> dict[str, float]:
    """Replace the head of the run's model by one fitted to its features of the training split (`init.fit_head`).

    Each image is read once, by all ranks together; rank 0 fits. Returns metrics: the decay that was chosen, and the
    held-out accuracy or R2, and loss. Raises UserError for too few images.
    """
    config, split, ranks, model = start.config, start.data.split.parts[0], start.ranks, start.model
    targets = split.target_values if objectives.kind(config.train.loss).predicts == "targets" else None
    labels = label_table(split)
    is_known = (labels >= 0).any(1) if targets is None else np.isfinite(targets).any(1)
    model.eval().to(ranks.device)
    features, readable = _features_on_all_ranks(start)

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(ranks.device)

    def fit() -> tuple[LinearHead, dict[str, float]]:
        usable = readable & np.isfinite(features).all((1, 2)) & is_known
        if usable.sum() < 2 * linear_head.FOLDS:
            what = "a class" if targets is None else "a number"
            raise UserError(
                f"init.fit_head needs {2 * linear_head.FOLDS} readable training images with {what}, and {split.name!r}"
                f" of {config.data.path} has {usable.sum()}. Leave it out."
            )
        num_views = features.shape[1]
        values = on_device(features[usable].reshape(-1, features.shape[2]))
        known = (labels if targets is None else targets)[usable].repeat(num_views, axis=0)
        classes = labels[usable, 0] if targets is None else np.zeros(usable.sum(), np.int64)
        parts = divide(classes, linear_head.FOLDS, None if split.groups is None else split.groups[usable])
        parts = parts.repeat(num_views)
        if targets is None:
            # Each class counts as often as training draws it.
            weights = np.bincount(known[:, 0]).astype(np.float64)[known[:, 0]] ** (config.data.balance - 1)
            head = linear_head.fit(
                values,
                on_device(known),
                on_device(weights.astype(np.float32)),
                parts,
                start.data.dataset.num_classes,
                config.train.loss,
            )
            score = float((head.predicted.argmax(1).cpu().numpy()[:, None] == known).any(1).mean())
            metric, said = "head_held_out_top1", f"top-1 of the head {score:.2%}"
        else:
            head = linear_head.fit_numbers(values, on_device(known), parts)
            score = 1 - head.held_out[head.decay]  # The loss is in variances of each target.
            metric, said = "head_held_out_r2", f"R2 of the head {score:.4f}"
        tried = ", ".join(f"{decay:.1g}: {loss:.3f}" for decay, loss in head.held_out.items())
        start.console.say(f"held-out {said}, with a weight decay of {head.decay:.1g} (held-out loss by decay: {tried})")
        return head, {"head_decay": head.decay, "head_held_out_loss": head.held_out[head.decay], metric: score}

    head, metrics = ranks.on_main(fit)
    with torch.no_grad():
        for name, value in (("weight", head.weight), ("bias", head.bias)):
            model.get_parameter(f"head.{name}").copy_(value)
    model.train()
    return metrics


def _features_on_all_ranks(start: StartingPoint) -> tuple[np.ndarray, np.ndarray]:
    """D features of all n training images, float32 (n, V, D) of V views, and which images are readable."""
    config, split, ranks, model = start.config, start.data.split.parts[0], start.ranks, start.model
    count = config.init.fit_views
    start.console.say(f"init.fit_head: features of {counted(count, 'view')} of each training image")

    def features(batch: Batch) -> list[Tensor]:
        views = (normalise(view, ranks.device, torch.float32, model.config.pixels) for view in batch.views[0])
        return [torch.stack([model.features(view) for view in views], 1).float()]

    views = () if count == 1 else (Views(count, config.model.image_size, config.augment),)
    reader = SplitReader.of_run(config, split, ranks, model.config.pixels, views=views)
    (values,), readable, _ = each_sample(features, reader, np.arange(len(split)))
    return values, readable


# ---------------------------------------------------------------------- dry run
# One step and one evaluation batch of the largest shapes before training, so that out-of-memory shows at once.
def dry_run_on_all_ranks(engine: "Engine", prepared: Prepared) -> None:
    """Run one training step and one batch of each evaluator, of the largest shapes; leaves no trace in model or
    optimizer.

    Call it before a checkpoint is loaded. Out of memory on any rank ends all ranks, with settings that need less.
    """
    config, data, plan, objective = prepared.config, prepared.data, prepared.plan, engine.objective
    views, pixels = objective.views(config), objective.pixels

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, pixels.num_channels, dtype=getattr(torch, pixels.batch_type))

    def blank(count: int, num_labels: int) -> Batch:
        batch = Batch(
            tuple(zeros(group.count, count, *ImageSize.parse(group.size)) for group in views),
            torch.zeros(count, num_labels, dtype=torch.int64),
            torch.ones(count, dtype=torch.bool),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
            torch.zeros(count, data.split.num_targets),
        )
        batch.drawn.update(objective.draw(batch, training=True))
        return batch

    # The second has gradients and activations in memory.
    micro_batches = [blank(plan.micro_batch, data.split.max_labels)] * min(2, plan.accumulation)
    mixing = draw_mixing(config.augment, config.model.image_size, config.seed, step=0)
    with engine.untouched(len(micro_batches)):
        training_step(engine, micro_batches, step=0, lr=0.0, mixing=mixing)

    def try_out(what: str, most: int, trial: Callable[[int], object]) -> None:
        """most: images that a rank may get."""
        count = min(config.evaluate.batch, most)
        smaller = f"Use evaluate.batch={count // 2}." if count > 1 else "The batch is one image: use a larger GPU."
        with room(f"{what} with {counted(count, 'image')} (evaluate.batch = {config.evaluate.batch})", lambda: smaller):
            trial(count)

    if objectives.metrics(config)["scores"]:
        most = -(-max(map(len, data.evaluated.values())) // plan.world_size)
        if objective.predicts:
            try_out("evaluation", most, lambda count: engine.forward(zeros(count, *config.model.image_size)))
        else:
            try_out("evaluation", most, lambda count: engine.measure(blank(count, 0)))
    if probe := prepared.run_probe:
        read = [count for one in probe.labelled for count in (len(one.choice.rows), len(one.test))]
        most = max(*read, min(config.probe.rankme_images, len(probe.own)), 0)
        try_out("probe", most, lambda count: engine.features(zeros(count, *config.model.image_size)))


@contextmanager
def room(what: str, way_out: Callable[[], str]) -> Iterator[None]:
    """Context in which an out-of-memory error on one rank ends all ranks. what: is tried out. way_out: what takes less
    memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        traceback.clear_frames(error.__traceback__)  # Frees tensors: the estimate below needs memory.
        where = f"{socket.gethostname()} ran out of memory before the first step, trying out {what}"
        raise OneRankError(f"{where}: {reason} {way_out()}") from None
