"""Set-up before the first step: ranks, data, plan, lock, checkpoint or weights to start from, engine, dry run."""

import contextlib
import json
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.files import write_text
from pipeline.base.words import counted
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import Checkpoints, State, checkpoint_folder, commit_minutes, read_state
from pipeline.estimate.memory import refuse_too_large
from pipeline.estimate.plan import Plan
from pipeline.evaluate import architecture
from pipeline.lifecycle.run_folder import last_end_in_words
from pipeline.lifecycle.stop import Stop
from pipeline.model import Model
from pipeline.model.files import find_file
from pipeline.monitor.health import SlowRanks, SpikePolicy
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.profile import Meter, StepClock, Trace, device_memory, host_memory, peak_flops
from pipeline.monitor.run_page import RunFacts, WeightsOrigin, hide_passwords
from pipeline.monitor.system import HostMeter
from pipeline.monitor.tracking import Tracker
from pipeline.monitor.watchdog import Watchdog
from pipeline.process import waits
from pipeline.process.console import Console
from pipeline.process.distributed import from_environment, use_exact_arithmetic
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import optimizers, resume
from pipeline.train.drawing import DrawingProcess
from pipeline.train.dry_run import dry_run_on_all_ranks, room_for_training
from pipeline.train.evaluators import Evaluator, ProbeEvaluator, SplitEvaluator
from pipeline.train.feed import Feed
from pipeline.train.logged_models import logged_models
from pipeline.train.optimizers import peak_rate
from pipeline.train.run_counts import RunCounts
from pipeline.train.run_facts import environment, plan_lines, run_facts
from pipeline.train.start import Prepared
from pipeline.train.training_run import Progress, TrainingRun
from pipeline.train.zero.engine import Engine, start_ranks


def set_up(config: RunConfig, stop: Stop, prepared: Prepared) -> TrainingRun:
    """Prepare a run, up to the step where it starts. Collective. Raises UserError for a user's mistake."""
    # ------------------------------------------------------------------ plan, run folder's lock, ranks
    ranks = from_environment()
    use_exact_arithmetic(ranks.device, config.engine.deterministic)
    dataset, split, evaluation, plan = prepared.dataset, prepared.split, prepared.evaluation, prepared.plan
    fused = optimizers.is_fused(config.engine, ranks.device)
    facts = resume.identity(config, dataset, plan, split, evaluation) | {"fused_optimizer": fused}
    folder = stop.folder.path
    before = last_end_in_words(folder) if ranks.is_main else ""
    in_use = stop.folder.lock() if ranks.is_main else None
    console = Console(folder / "log.txt", ranks.is_main and in_use is None)
    waits.say_with(console.say)
    console.say(f"{config.name}: {plan.describe()}")
    if not stop.folder.is_locked:
        console.say(f"{folder} is on a file system without locks: nothing keeps a second run out of it.")
    for line in plan.notes(config) + split.notes() + evaluation.notes():
        console.say(line)
    longest_wait = max(config.data.retry_minutes, commit_minutes(config))
    start_ranks(ranks, config.engine.timeout_minutes, longest_wait)
    ranks.agree(in_use)
    stop.connect(ranks)
    resume.refuse_other_facts(facts, ranks.agree(facts), ranks.rank)

    # ------------------------------------------------------------------ where to start: checkpoint, weights or afresh
    gpu_memory = device_memory(ranks.device)
    if config.model.name:  # Checked before the model is built, which takes long if it is too large.
        least = min(ranks.gather(gpu_memory or host_memory()))
        new = objectives.new_backbone(config, dataset.num_classes)
        refuse_too_large(config, plan, new, least, "its GPU" if gpu_memory else "its share of the host")
    checkpoints = Checkpoints(checkpoint_folder(config))
    resumed, damaged = resume.find_checkpoint_on_all_ranks(checkpoints, facts, plan.steps, ranks, console)
    located, origin = config, None
    if resumed is None and config.init.weights:
        # The file rather than its run: while that run trains on, its newest checkpoint is another one a moment later.
        origin = ranks.on_main(partial(_find_weights, config, console))
        located = replace(config, init=replace(config.init, weights=origin.path))
    model = resume.initial_model(located, dataset, resumed, console)
    if gpu_memory is not None:
        refuse_too_large(config, plan, model.config, gpu_memory)
    model.activation_checkpointing = config.engine.activation_checkpointing
    objective = objectives.create(config, model)
    optimizer = optimizers.build(objective, objective.decayed(), config.optimizer, fused)
    clock = StepClock(ranks.device)
    with room_for_training(config, plan, model.config, stop):
        engine = Engine(objective, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock)
        dry_run_on_all_ranks(config, plan, engine, split, evaluation, stop)
    state = State(step=0)
    if resumed is not None:
        state = read_state(resumed)
        engine.load(ShardedTensors.open(resumed), state.engine)
        stop.step = state.step
        console.say(f"resumed from {resumed} at step {state.step:,} of {plan.steps:,}")
    elif origin is not None:
        console.say(f"started from the weights in {config.init.weights}: {origin.details}")
    start = state.step
    progress = Progress(start, start, start, list(state.left_out))

    # ------------------------------------------------------------------ data, metrics, checkpoints, evaluators
    feed = Feed(config, plan, split, ranks, stop, clock)
    peak, peak_source = peak_flops(ranks.device, engine.dtype, config.engine.peak_tflops)
    flops = models.training_flops_per_image(model.config)
    console.say(
        f"{models.num_parameters(model.config) / 1e6:.2f} M parameters, {flops / 1e9:.2f} GFLOP to train on an image; "
        f"{counted(dataset.num_classes, 'class')}, data {dataset.fingerprint}; {peak / 1e12:.2f} TFLOP/s a device ({peak_source})"
    )
    meter = Meter(ranks, clock, flops, peak)
    trace = Trace(
        config.profile.trace_step if ranks.is_main else 0,
        config.profile.trace_steps,
        folder / "trace.json",
        ranks.device,
    )
    if config.profile.communication:
        engine.count_communication()
    spikes = SpikePolicy(config.health, ranks, state.losses, state.counts.loss_spikes)
    counts = RunCounts(state.counts, dataset.storage.retry, ranks)
    hosts = ranks.gather(socket.gethostname())
    slow_ranks = SlowRanks(hosts, config.health.straggler_ratio)
    # Also for a finished run: sends the metrics that MLflow has not received yet.
    tracker = None
    if ranks.is_main:
        if resumed is not None:
            origin = _saved_origin(folder)
        shown = run_facts(located, plan, model, dataset, split, evaluation, ranks.device, origin)
        shown = replace(shown, hosts=tuple(sorted(set(hosts))), before=before)
        tracker = _start_tracker(config, plan, shown, folder, engine, model, start, checkpoints)
    for line in tracker.notes if tracker else []:
        console.say(line)
    saver = Saver(
        str(checkpoints.folder), ranks, 60 * config.data.retry_minutes, start, console.say, 60 * commit_minutes(config)
    )
    watchdog = Watchdog(folder / "hang", ranks.rank, hosts, config.health.hang_minutes, stop.record_failure)
    drawing = (
        DrawingProcess(folder, prepared.draw) if prepared.draw and ranks.is_main and config.track.figures else None
    )
    shared = (config, plan, ranks, stop, engine, watchdog, console, tracker, folder)
    evaluators: list[Evaluator] = [SplitEvaluator(*shared, evaluation, saver, drawing)]
    if prepared.run_probe is not None:
        evaluators.append(ProbeEvaluator(*shared, prepared.run_probe))
    return TrainingRun(
        config, plan, ranks, stop, console, folder, facts, dataset, split, model, engine, feed, evaluators,
        progress, counts, checkpoints, damaged, saver, spikes, slow_ranks, HostMeter(ranks), watchdog, clock, meter, trace, tracker, drawing,
        peak_rate(config.optimizer, plan.global_batch),
    )  # fmt: skip


def _find_weights(config: RunConfig, console: Console) -> WeightsOrigin:
    """The weights that a run begins with, which it may go on without later. Raises UserError if there are none."""
    assert config.init.weights is not None
    return find_origin(find_file(Path(weights_path(config.init.weights, config.track.uri, console.say))))


def _saved_origin(folder: Path) -> WeightsOrigin | None:
    """The weights that a run began with, as its first start found them; None for a run of an earlier version."""
    with contextlib.suppress(UserError):
        return PageFolder(folder).read_facts().facts.origin
    return None


def _start_tracker(
    config: RunConfig, plan: Plan, facts: RunFacts, folder: Path, engine: Engine, model: Model, start: int,
    checkpoints: Checkpoints,
) -> Tracker:  # fmt: skip
    write_settings(config, folder)
    write_text(folder / "deepspeed.json", json.dumps(engine.settings, indent=1))
    write_text(folder / architecture.FILE, json.dumps(model.config.to_dict(), indent=1))
    page = PageFolder(folder)
    # The address of the weights, such as models:/NAME@best, is looked up at the first start only.
    if not facts.parents:
        with contextlib.suppress(UserError):
            facts = replace(facts, parents=page.read_facts().facts.parents)
    page.write_text("environment.txt", environment(engine.ranks.device))
    page.write_text("plan.txt", plan_lines(config, plan, model))
    return Tracker(
        config.track, Path(config.out), folder, facts, start, find_models=partial(logged_models, checkpoints)
    )


def write_settings(config: RunConfig, folder: Path) -> None:
    """Write config.json and config.yaml, without the password of the tracking URI."""
    settings = schema.to_dict(config)
    settings["track"]["uri"] = hide_passwords(settings["track"]["uri"])
    write_text(folder / "config.json", json.dumps(settings, indent=1))
    write_text(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
