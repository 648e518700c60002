"""Set-up before the first step: ranks and run folder, where to start, engine, data, metrics, checkpoints."""

import contextlib
import json
import socket
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline import model as models
from pipeline import objectives
from pipeline.base.files import write_text
from pipeline.base.trained_on import TrainedSet, not_held_out
from pipeline.base.words import counted
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import Checkpoints, State, checkpoint_folder, commit_minutes, read_state
from pipeline.data.mixture.label_use import data_notes
from pipeline.data.storage.bucket import AnyPath
from pipeline.estimate.memory import checkpoint_bytes, refuse_too_large, what_takes_less
from pipeline.lifecycle.logged_models import logged_models
from pipeline.lifecycle.run_folder import write_settings
from pipeline.lifecycle.stop import Stop
from pipeline.model import Model, read_weights
from pipeline.model.files import find_file
from pipeline.monitor.health import CollapseReports, SlowRanks, SpikePolicy
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.monitor.profile import Meter, StepClock, device_memory, host_memory, peak_flops
from pipeline.monitor.run_page import WeightsOrigin, hide_passwords
from pipeline.monitor.system import HostMeter
from pipeline.monitor.tracking import Tracker
from pipeline.monitor.watchdog import Watchdog
from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.optimizers import peak_rate
from pipeline.process import waits
from pipeline.process.console import Console
from pipeline.process.distributed import from_environment, use_exact_arithmetic
from pipeline.settings.run import RunConfig
from pipeline.train import resume
from pipeline.train.drawing import DrawingProcess
from pipeline.train.dry_run import dry_run_on_all_ranks, room
from pipeline.train.evaluators import evaluators_of
from pipeline.train.feed import Feed
from pipeline.train.run_counts import RunCounts
from pipeline.train.run_facts import environment, plan_lines, run_facts
from pipeline.train.start import Prepared
from pipeline.train.training_run import Monitoring, Progress, RunContext, Saving, Training, TrainingRun
from pipeline.train.zero.engine import Engine, limit_collectives, start_ranks


def set_up(stop: Stop, prepared: Prepared) -> TrainingRun:
    """Prepare a run, up to the step where it starts. Collective. Raises UserError for a user's mistake."""
    context = _connect_on_all_ranks(stop, prepared)
    start = _find_start_on_all_ranks(context)
    context = replace(context, trained_on=start.trained_on)
    # A failure would leave processes and threads to this process, which may live on, and MLflow a run that never ends.
    with contextlib.ExitStack() as undone:
        training = _build_training_on_all_ranks(context, start, undone)
        monitoring = _begin_monitoring_on_all_ranks(context, start, training, undone)
        saving = _prepare_saving(context, start)
        undone.callback(saving.saver.close)
        evaluators = evaluators_of(context, training.engine, monitoring, saving.saver)
        undone.pop_all()
    step = start.state.step
    progress = Progress(step, step, step, list(start.state.left_out))
    return TrainingRun(context, training, monitoring, saving, evaluators, progress)


# ---------------------------------------------------------------------- plan, run folder's lock, ranks
def _connect_on_all_ranks(stop: Stop, prepared: Prepared) -> RunContext:
    """Lock the run folder, start the ranks, and compare their settings and data."""
    config, data, plan, ranks = prepared.config, prepared.data, prepared.plan, from_environment()
    use_exact_arithmetic(ranks.device, config.engine.deterministic)
    identity = resume.identity(config, plan, data)
    identity["fused_optimizer"] = optimizers.is_fused(config.engine, ranks.device)
    folder = stop.folder.path
    in_use = stop.folder.lock() if ranks.is_main else None
    console = Console(folder / "log.txt", ranks.is_main and in_use is None)
    waits.say_with(console.say)
    console.say(f"{config.name}: {plan.describe()}")
    if not stop.folder.is_locked:
        console.say(f"{folder} is on a file system without locks: nothing keeps a second run out of it.")
    data_lines = data_notes(data, config.train.loss) if ranks.is_main else []  # Others say nothing.
    for line in plan.notes(config) + objectives.without_effect(config) + data_lines:
        console.say(line)
    start_ranks(ranks, config.engine.timeout_minutes, _longest_wait_minutes(config), stop.meet)
    ranks.agree(in_use)
    stop.connect(ranks)
    ranks.on_all(partial(resume.refuse_other_facts, identity, ranks.agree(identity)))
    return RunContext(config, prepared, ranks, stop, console, identity, stop.folder.before)


def _longest_wait_minutes(config: RunConfig) -> float:
    """For which a rank may wait while the others are in a collective call."""
    return max(config.data.retry_minutes, commit_minutes(config))


# ---------------------------------------------------------------------- where to start: checkpoint, weights or afresh
@dataclass(frozen=True)
class _StartingPoint:
    """resumed: the checkpoint to continue; None without one. damaged: names of damaged ones. state: of `resumed`.

    config: with the path of the weights in place of their address. origin: of the weights that a first start begins with.
    model: not trained yet; the engine loads the checkpoint's tensors. trained_on: see `RunContext`.
    """

    checkpoints: Checkpoints
    resumed: AnyPath | None
    damaged: set[str]
    state: State
    config: RunConfig
    origin: WeightsOrigin | None
    model: Model
    trained_on: list[TrainedSet]


def _find_start_on_all_ranks(context: RunContext) -> _StartingPoint:
    config, plan, ranks, console = context.config, context.plan, context.ranks, context.console
    dataset, pixels = context.prepared.data.dataset, context.prepared.data.split.pixels
    gpu_memory = device_memory(ranks.device)
    least = min(ranks.gather(gpu_memory or host_memory()))  # Hosts may have other GPUs.
    of = "its GPU" if gpu_memory else "its share of the host"
    if config.model.name:  # Checked before the model is built, which takes long if it is too large.
        new = objectives.new_backbone(config, dataset.num_classes, pixels)
        ranks.on_main(partial(refuse_too_large, config, plan, new, least, of))
    checkpoints = Checkpoints(checkpoint_folder(config))
    resumed, damaged = resume.find_checkpoint_on_all_ranks(checkpoints, context.identity, plan.steps, ranks, console)
    if resumed is None:
        ranks.on_main(partial(resume.refuse_checkpoints_elsewhere, config))
    origin = None
    if resumed is None and config.init.weights:
        # The file rather than its run: while that run trains on, its newest checkpoint is another one a moment later.
        origin = ranks.on_main(partial(_find_weights, config, console))
        config = replace(config, init=replace(config.init, weights=origin.path))
    model, before = ranks.on_all(partial(resume.initial_model, config, dataset, resumed, console))
    trained_on = list(dict.fromkeys([*before, *context.prepared.data.trained_on(config.name)]))
    marked = context.prepared.data.not_held_out(trained_on)
    if (probe := context.prepared.run_probe) and (runs := probe.trained_by(trained_on)):
        marked["probe.split"] = runs
    for name, runs in marked.items():
        console.say(not_held_out(name, runs))
    if not config.model.name:
        ranks.on_main(partial(refuse_too_large, config, plan, model.config, least, of))
    state = State(step=0) if resumed is None else read_state(resumed)
    return _StartingPoint(checkpoints, resumed, damaged, state, config, origin, model, trained_on)


def _find_weights(config: RunConfig, console: Console) -> WeightsOrigin:
    """The weights that a run begins with, which it may go on without later. Raises UserError if there are none."""
    assert config.init.weights is not None
    weights = weights_path(config.init.weights, config.track.uri, console.say, config.out)
    return find_origin(find_file(Path(weights), console.say), weights)


# ---------------------------------------------------------------------- what trains
def _build_training_on_all_ranks(context: RunContext, start: _StartingPoint, undone: contextlib.ExitStack) -> Training:
    """Build the engine, try out one step, and load the checkpoint. undone: closes what was opened, if set-up fails."""
    config, plan, ranks = context.config, context.plan, context.ranks
    clock = StepClock(ranks.device)

    def begin_feed() -> Feed:
        feed = Feed(config, plan, context.prepared.data.split, ranks, context.stop, clock, start.model.config.pixels)
        undone.enter_context(feed.loader)
        return feed

    # First, because it may fork processes, which should inherit little of what trains.
    feed = ranks.on_all(begin_feed)
    start.model.activation_checkpointing = config.engine.activation_checkpointing
    objective = ranks.on_all(lambda: objectives.create(config, start.model))  # It may read weights.
    objective.num_steps = plan.steps
    if start.resumed is None and start.origin is not None and objective.continues_additions:
        weights = ranks.on_all(partial(read_weights, start.origin.path))
        context.console.say(ranks.on_all(partial(objective.load_additions, weights.added, weights.decoder)))
        del weights  # whose tensors the objective has copied
    fused = context.identity["fused_optimizer"]
    optimizer = optimizers.build(objective, objective.decayed(), config.optimizer, fused)
    with room("training", lambda: what_takes_less(config, plan, start.model.config)):
        engine = Engine(objective, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock)
        limit_collectives(config.engine.timeout_minutes + _longest_wait_minutes(config))
        dry_run_on_all_ranks(engine, context.prepared)
    if start.resumed is not None:
        engine.load(ShardedTensors.open(start.resumed), start.state.engine)
        if start.state.step:
            # An evaluation that a kill prevented is made up with what that step sets, such as DINO's temperature.
            objective.before_step(start.state.step - 1)
        context.stop.step = start.state.step
        context.console.say(f"resumed from {start.resumed} at step {start.state.step:,} of {plan.steps:,}")
    elif start.origin is not None:
        context.console.say(f"started from the weights in {config.init.weights}: {start.origin.details}")
    return Training(engine, feed, peak_rate(config.optimizer, plan.global_batch))


# ---------------------------------------------------------------------- what measures
def _begin_monitoring_on_all_ranks(
    context: RunContext, start: _StartingPoint, training: Training, undone: contextlib.ExitStack
) -> Monitoring:
    """Begin what measures the run. undone: ends its threads if set-up fails."""
    config, ranks, folder, console = context.config, context.ranks, context.folder, context.console
    dataset, state, engine = context.prepared.data.dataset, start.state, training.engine
    peak, peak_source = peak_flops(ranks.device, engine.dtype, config.engine.peak_tflops)
    model = start.model.config
    flops: list[int] = ranks.on_main(lambda: [objectives.training_flops(part, model) for part in config.parts()])
    console.say(
        f"{models.num_parameters(model) / 1e6:.2f} M parameters, {statistics.mean(flops) / 1e9:.2f} GFLOP to train on an image; "
        f"{counted(dataset.num_classes, 'class') if dataset.classes else 'no labels'}, data {dataset.fingerprint}; {peak / 1e12:.2f} TFLOP/s a device ({peak_source})"
    )
    hosts = ranks.gather(socket.gethostname())
    # Also for a finished run: sends the metrics that MLflow has not received yet.
    tracker = _start_tracker(context, start, hosts) if ranks.is_main else None
    if tracker:
        context.stop.show_end = lambda how, reason: tracker.finish(
            "FAILED", in_a_hurry=True, outcome=f"{how} before training began: {reason}"
        )
        for line in tracker.notes:
            console.say(line)
    # After the metrics of steps that run again are gone, and before its settings are there: a kill must leave no word of a last
    # start that had finished, beside settings by which there is more to train.
    context.stop.committed(state.step)
    if tracker:
        _write_facts(context, start.model, engine)
    watchdog = Watchdog(folder / "hang", ranks.rank, hosts, config.health.hang_minutes, context.stop.record_failure)
    undone.callback(watchdog.close)
    draws = ranks.is_main and config.track.figures
    return Monitoring(
        meter=Meter(ranks, engine.clock, flops, peak),
        host_meter=HostMeter(ranks),
        spikes=SpikePolicy(config.health, ranks, state.losses, state.counts.loss_spikes),
        slow_ranks=SlowRanks(hosts, config.health.straggler_ratio),
        collapses=CollapseReports(),
        counts=RunCounts(state.counts, dataset.storage.retry, ranks),
        watchdog=watchdog,
        tracker=tracker,
        drawing=DrawingProcess(folder, context.prepared.draw) if draws and context.prepared.draw else None,
    )


def _start_tracker(context: RunContext, start: _StartingPoint, hosts: list[str]) -> Tracker:
    """Begin to record. Rank 0 only."""
    config, plan, ranks, folder = context.config, context.plan, context.ranks, context.folder
    data, model = context.prepared.data, start.model
    saved = PageFolder(folder).saved()
    # Of a resumed run, the weights that its first start found.
    origin = start.origin if start.resumed is None else saved.facts.origin if saved else None
    facts = run_facts(
        start.config, plan, model, data, ranks.device, origin, context.prepared.run_probe, context.trained_on
    )
    changed = resume.changes_since(start.state, context.identity) if start.resumed is not None else []
    told = hide_passwords("; ".join(str(change) for change in changed if change.fact.means("comparison")))
    began = Start(time.time(), start.state.step, tuple(sorted(set(hosts))), context.before, told)
    # The address of the weights, such as models:/NAME@best, is looked up at the first start only.
    if saved and not facts.parents:
        facts = replace(facts, parents=saved.facts.parents)
    return Tracker(
        config.track,
        Path(config.out),
        folder,
        facts,
        start.state.step,
        find_models=partial(logged_models, start.checkpoints),
        began=began,
    )


def _write_facts(context: RunContext, model: Model, engine: Engine) -> None:
    """Write what the run folder shows beside the metrics. Rank 0 only."""
    folder, page = context.folder, PageFolder(context.folder)
    write_settings(context.config, folder)
    write_text(folder / "deepspeed.json", json.dumps(engine.settings, indent=1))
    page.write_text("environment.txt", environment(context.ranks.device))
    page.write_text("plan.txt", plan_lines(context.config, context.plan, model))


# ---------------------------------------------------------------------- what saves
def _prepare_saving(context: RunContext, start: _StartingPoint) -> Saving:
    config = context.config
    if config.train.stop_after_minutes:
        context.stop.expect_checkpoint(checkpoint_bytes(start.model.config, config))
    saver = Saver(
        str(start.checkpoints.folder),
        context.ranks,
        60 * config.data.retry_minutes,
        start.state.step,
        context.console.say,
        60 * commit_minutes(config),
    )
    return Saving(start.checkpoints, saver, start.damaged)
