"""A run from its first line to its last: set up, find where to start, train, stop. Read it top to bottom.

The same command starts, resumes and finishes. Pre-training and fine-tuning differ in their settings only: fine-tuning
has `init.weights`.
"""

import json
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import json_record
from pipeline import model as models
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import Fragments
from pipeline.checkpoint.store import Checkpoints, State, checkpoint_folder, read_state, step_name
from pipeline.checkpoint.writer import Commit, Retention
from pipeline.console import Console, progress_line
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.loading.loader import Batch, Loader, train_requests, train_view
from pipeline.data.loading.mix import draw_mixing
from pipeline.data.loading.order import SampleOrder, batch_of_step, leave_out
from pipeline.distributed import from_environment
from pipeline.errors import DivergedError, Stopped, UserError
from pipeline.estimate.memory import refuse_too_large
from pipeline.estimate.plan import Plan, new_model_config
from pipeline.evaluate import architecture
from pipeline.evaluate.classify import Scores, predict, score
from pipeline.evaluate.masked import MaskedScores, score_masked
from pipeline.evaluate.probes.probe import named
from pipeline.lifecycle.run_folder import write_atomically
from pipeline.lifecycle.stop import Stop
from pipeline.model import MaskedViT, Model
from pipeline.monitor.health import LossWatch, SlowRanks, Watchdog
from pipeline.monitor.profile import Meter, StepClock, Trace, device_memory, host_memory, peak_flops
from pipeline.monitor.tracking import Tracker
from pipeline.objectives import classification
from pipeline.objectives.masked_patches import Masking
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train import optimizers, resume
from pipeline.train.dry_run import rehearse, room_for_training
from pipeline.train.engine import Engine, start_ranks
from pipeline.train.schedule import learning_rate, peak_rate
from pipeline.train.start import Prepared, prepare


def run(config: RunConfig) -> None:
    """As `start.run`, in a process that has imported everything."""
    with Stop(config) as stop:
        train(config, stop, prepare(config))


def train(config: RunConfig, stop: Stop, prepared: Prepared) -> None:
    """Train to the end of `config.train.length`, from wherever the run stands. Raises UserError for a user's mistake.

    A run that is stopped ends the process with exit code 75.
    """
    # ------------------------------------------------------------------ what will happen, before anything does
    ranks = from_environment()
    dataset, split, evaluation = prepared.dataset, prepared.split, prepared.evaluation
    run_probe, plan = prepared.run_probe, prepared.plan
    facts = resume.identity(config, dataset, plan, split, evaluation)
    folder = stop.folder.path
    in_use = stop.folder.lock() if ranks.is_main else None
    console = Console(folder / "log.txt", ranks.is_main and in_use is None)
    console.say(f"{config.name}: {plan.describe()}")
    if not stop.folder.is_locked:
        console.say(f"{folder} is on a file system without locks: nothing keeps a second run out of it.")
    for line in plan.notes(config) + split.notes() + evaluation.notes():
        console.say(line)
    start_ranks(ranks, config.engine.timeout_minutes)
    ranks.agree(in_use)
    stop.connect(ranks)
    resume.refuse_other_facts(facts, ranks.agree(facts), ranks.rank)

    # ------------------------------------------------------------------ where to start: checkpoint, weights or afresh
    gpu_memory = device_memory(ranks.device)
    if config.model.name:  # Before it is built, which takes long if it is too large.
        least = min(ranks.gather(gpu_memory or host_memory()))
        new = new_model_config(config.model, dataset.num_classes, config.train.masked)
        refuse_too_large(config, plan, new, least, "its GPU" if gpu_memory else "its share of the host")
    checkpoints = Checkpoints(checkpoint_folder(config))
    resumed, damaged = resume.find_checkpoint(checkpoints, facts, plan.steps, ranks, console)
    model = resume.initial_model(config, dataset, resumed, console)
    if gpu_memory is not None:
        refuse_too_large(config, plan, model.config, gpu_memory)
    model.activation_checkpointing = config.engine.activation_checkpointing
    optimizer = optimizers.build(model, model.weight_decay_mask(), config.optimizer)
    clock = StepClock(ranks.device)
    loss_of: Callable[..., Tensor] = partial(
        classification.batch_loss, kind=config.train.loss, label_smoothing=config.train.label_smoothing
    )
    masking = None
    if isinstance(model, MaskedViT):
        masking = Masking(model.config, config.seed)
        loss_of = masking.batch_loss
    with room_for_training(config, plan, model.config, stop):
        engine = Engine(model, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock)
        rehearse(config, plan, engine, split, evaluation, loss_of, masking, stop)
    state = State(step=0)
    if resumed is not None:
        state = read_state(resumed)
        engine.load(Fragments.open(resumed), state.engine)
        stop.step = state.step
        console.say(f"resumed from {resumed} at step {state.step:,} of {plan.steps:,}")
    elif config.init.weights:
        console.say(f"started from the weights in {config.init.weights}")
    start = state.step
    highest_lr = peak_rate(config.optimizer, plan.global_batch)

    # ------------------------------------------------------------------ what feeds it
    order = SampleOrder(split.shard_sizes, config.seed, plan.global_batch, config.data.streams, config.data.window)
    left_out: list[tuple[int, int]] = list(state.left_out)
    loader = Loader(
        split, train_view(config.augment, config.seed), config.model.image_size, config.data.threads,
        config.data.prefetch, config.data.max_bad_share, pin=ranks.device.type == "cuda", is_unwanted=stop.is_wanted,
    )  # fmt: skip

    # ------------------------------------------------------------------ what watches it
    peak, peak_source = peak_flops(ranks.device, engine.dtype, config.engine.peak_tflops)
    flops = models.training_flops_per_image(model.config)
    console.say(
        f"{models.num_parameters(model.config) / 1e6:.2f} M parameters, {flops / 1e9:.2f} GFLOP to train on an image; "
        f"{dataset.num_classes} classes, data {dataset.fingerprint}; {peak / 1e12:.2f} TFLOP/s a device ({peak_source})"
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
    losses = LossWatch(config.health, ranks, state.losses)
    hosts = ranks.gather(socket.gethostname())
    slow_ranks = SlowRanks(hosts, config.health.straggler_ratio)
    # Also when nothing is left to train: what MLflow has not been told yet goes now.
    tracker = _start_tracker(config, facts, plan, folder, engine, model, start) if ranks.is_main else None
    for line in tracker.notes if tracker else []:
        console.say(line)
    saver = Saver(str(checkpoints.folder), ranks, 60 * config.data.retry_minutes, start, console.say)
    watchdog = Watchdog(folder / "hang", ranks.rank, hosts, config.health.hang_minutes)

    def commit(step: int, kept: bool = False) -> None:
        watchdog.at(step, "checkpoint")
        damaged.discard(step_name(step))  # It is written anew.
        retention = Retention(config.checkpoint.keep, sorted(damaged), kept)
        health = {"losses": list(losses.scores.recent), "left_out": left_out}
        with clock.host("checkpoint"):
            saver.save(step, engine.part(), _commit(engine, model, config, dataset, facts, step, health, retention))

    def evaluate(step: int) -> None:
        def forward(images: Tensor, *masks: Tensor) -> Tensor:
            watchdog.at(step, "evaluation")
            return engine.forward(images, *masks)

        split_name, size, view = config.data.evaluated_split, config.model.image_size, config.augment
        batch, threads = config.evaluate.batch, config.data.threads
        scores: Scores | MaskedScores
        with engine.averaged():
            if masking is not None:
                scores = score_masked(forward, masking, evaluation, size, view, batch, threads, ranks, stop)
            else:
                predictions = predict(
                    forward, evaluation, size, view, config.train.loss, batch, threads, ranks, stop=stop
                )
                scores = score(predictions, evaluation)
        console.say(f"step {step:,}: {split_name} {scores}")
        metrics = {f"{split_name}_{name}": value for name, value in asdict(scores).items() if value is not None}
        if config.checkpoint.best:
            saver.mark_best(step, config.checkpoint.best, metrics[config.checkpoint.best])
        if tracker:
            tracker.log(step, metrics)
            write_atomically(folder / "scores.json", json.dumps({"step": step, **asdict(scores)}))

    def probe(step: int) -> None:
        def features(images: Tensor) -> Tensor:
            watchdog.at(step, "probe")
            return engine.features(images)

        assert run_probe is not None
        with engine.averaged():
            scores = run_probe.scores(features, ranks, stop)
        metrics = named(scores, run_probe.name)
        console.say(f"step {step:,}: " + ", ".join(f"{name} {value:.2%}" for name, value in metrics.items()))
        if tracker:
            tracker.log(step, metrics)
            write_atomically(folder / "probe.json", json.dumps({"step": step, **scores}))

    status, reason = "FAILED", ""
    done = saved = start
    try:
        stop.begin_training(start)
        if ranks.agree(_is_owed(folder / "scores.json", start, plan.eval_every, plan.steps)):
            evaluate(start)
        if ranks.agree(_is_owed(folder / "probe.json", start, plan.probe_every, plan.steps)):
            probe(start)
        # -------------------------------------------------------------- the loop
        console.open_bar(start, plan.steps)
        while done < plan.steps:
            # Once, and again from where the run goes back to after a spike.
            first, last_batch = batch_of_step(done, left_out), batch_of_step(plan.steps - 1, left_out)
            requests = train_requests(order, first, last_batch + 1, plan.micro_batch, ranks.rank, ranks.world_size)
            steps = _steps(loader.batches(requests), plan.accumulation, clock)
            for step, micro_batches in enumerate(stop.together(steps), done):
                done = step + 1
                watchdog.at(done, "step")
                trace.before(done)
                lr = learning_rate(config.schedule, highest_lr, step, plan.steps, plan.warmup)
                mixing = draw_mixing(config.augment, config.model.image_size, config.seed, step)
                accept = partial(losses.accept, done) if config.health.on_spike == "skip" else None
                result = engine.train_step(step, micro_batches, lr, loss_of, mixing, accept, masking)
                if accept is None:
                    losses.add(done, result.loss)
                meter.step(plan.global_batch)
                console.advance()
                saver.tend()
                if (trace_file := trace.after(done)) and tracker:
                    tracker.artifact(trace_file)
                    console.say(f"step {done:,}: trace in {trace_file}")

                # ---------------------------------------------------- is it well?
                last = done == plan.steps
                logging = done % config.train.log_every == 0 or last
                evaluating = done % plan.eval_every == 0 or last
                probing = plan.probe_every > 0 and (done % plan.probe_every == 0 or last)
                kept = plan.keep_every > 0 and done % plan.keep_every == 0
                saving = (
                    done % plan.checkpoint_every == 0 or kept or last or (evaluating and config.checkpoint.best != "")
                )
                if logging or saving:
                    spikes = losses.catch_up()
                    for spike in spikes:
                        console.say(f"{spike}{' (not taken)' if accept else ''}")
                    _refuse_too_many_skips(engine.skipped_steps, config, done)
                    if spikes and config.health.on_spike == "rollback":
                        saver.wait()
                        back = resume.go_back(checkpoints, engine, spikes[0].step, ranks, console)
                        if back is not None:
                            left_out = leave_out(left_out, back.step, done)
                            _refuse_too_many_rollbacks(left_out, config)
                            losses.forget(back.losses)
                            done = saved = back.step
                            for line in tracker.go_back(done) if tracker else []:
                                console.say(line)
                            break

                # ---------------------------------------------------- say so
                if logging:
                    clock.add("communication", engine.communication_seconds())
                    metrics = {
                        "loss": ranks.mean(result.loss), "lr": lr, "grad_norm": result.grad_norm, **meter.read(),
                        "epoch": (batch_of_step(step, left_out) + 1) * plan.global_batch / plan.num_samples,
                        "skipped_steps": engine.skipped_steps, "loss_spikes": losses.num_spikes,
                        "bad_samples": ranks.sum(len(loader.bad))[0],
                        "storage_retries": ranks.sum(dataset.storage.patience.retries)[0], **saver.read(),
                    }  # fmt: skip
                    console.say(progress_line(done, plan.steps, metrics, plan.global_batch))
                    for line in slow_ranks.changed(meter.own_seconds):
                        console.say(line)
                    if tracker:
                        tracker.log(done, metrics)
                    saver.check()
                    stop.committed(saver.committed_step, saver.longest)
                    _refuse_too_many_bad(metrics["bad_samples"], loader, len(split))

                # ---------------------------------------------------- keep it, then score it
                begin = time.perf_counter()
                if saving:
                    commit(done, kept)
                    saved = done
                    stop.leave_if_wanted()  # Else the next step would want a commit of its own.
                if evaluating:
                    evaluate(done)
                if probing:
                    probe(done)
                meter.exclude(time.perf_counter() - begin)
                watchdog.at(done, "data")
        saver.wait()
        stop.committed(done)
        bad = {row: reason for of_rank in ranks.gather(loader.bad) for row, reason in of_rank.items()}
        for row, key in zip(sorted(bad), split.keys(sorted(bad)), strict=True):
            console.say(f"left out {key}: {bad[row]}")
        status = "FINISHED"
    except Stopped:
        # -------------------------------------------------------------- asked to stop, in training or in evaluation
        if done > saved:
            losses.catch_up()
            commit(done)
        saver.wait()
        status, reason = "KILLED", stop.agreed_reason()
    finally:
        watchdog.close()
        console.close_bar()
        loader.close()
        saver.close()
        if tracker:
            tracker.finish(status, in_a_hurry=bool(reason))
    if reason:
        console.say(
            f"stopped by {reason} at step {done:,}, which is committed: the same command goes on (exit code 75)"
        )
        stop.leave(done, reason)
    if start >= plan.steps:
        console.say("nothing left to do: the run is finished")
        return
    console.say(f"finished: {meter.average:,.1f} images/s over {meter.total_seconds:,.0f} s of training, in {folder}")


def _steps(batches: Iterator[Batch], accumulation: int, clock: StepClock) -> Iterator[list[Batch]]:
    """The micro-batches of each step; the wait for them is counted."""
    while True:
        with clock.host("data"):
            micro_batches = list(islice(batches, accumulation))
        if not micro_batches:
            return
        yield micro_batches


@dataclass(frozen=True)
class _Scored:
    """What tells how old a scores.json or probe.json is."""

    step: int


def _is_owed(scores: Path, start: int, every: int, steps: int) -> bool:
    """Whether the run left `start` before it was scored, every so many steps: stopped or killed after its checkpoint."""
    if not start or not every or (start % every and start < steps):
        return False
    try:
        return json_record.read(scores, _Scored).step < start
    except (OSError, UserError):  # None yet, or damaged: it is written anew.
        return True


def _refuse_too_many_skips(skipped: int, config: RunConfig, step: int) -> None:
    if skipped > config.train.max_skipped_steps:
        raise DivergedError(
            f"{skipped} steps were skipped by step {step:,}, for a gradient that is no number or a loss that jumped, more than "
            f"train.max_skipped_steps = {config.train.max_skipped_steps}. Lower optimizer.lr, use a longer schedule.warmup "
            "or engine.precision=fp32, or raise the budget."
        )


def _refuse_too_many_rollbacks(left_out: list[tuple[int, int]], config: RunConfig) -> None:
    if len(left_out) > config.health.max_rollbacks:
        raise DivergedError(
            f"the loss has jumped {len(left_out)} times, more than health.max_rollbacks = {config.health.max_rollbacks} "
            "allows to go back for. Lower optimizer.lr, or raise health.spike_sigma."
        )


def _refuse_too_many_bad(bad: float, loader: Loader, num_samples: int) -> None:
    # Each rank has seen its own; here they are counted together.
    if bad > loader.max_bad:
        raise UserError(
            f"{bad:.0f} samples of {num_samples} cannot be read, more than data.max_bad_share = {loader.max_bad_share} "
            f"allows ({loader.max_bad}). Check the shards, or raise data.max_bad_share."
        )


def _commit(
    engine: Engine, model: Model, config: RunConfig, dataset: Dataset, facts: dict[str, Any], step: int,
    health: dict[str, Any], retention: Retention,
) -> Commit | None:  # fmt: skip
    """What a checkpoint holds beside the tensors, on rank 0."""
    if not engine.ranks.is_main:
        return None
    architecture = model.config.to_dict()
    state = {
        "step": step,
        "samples_seen": step * config.train.global_batch,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "engine": asdict(engine.counters()),
        "model": architecture,
        "identity": facts,
        **health,
    }
    preprocessing = {"image_size": min(config.model.image_size), **schema.to_dict(config.augment)}
    extra = {"classes": dataset.classes, "preprocessing": preprocessing, "loss": config.train.loss,
             "fingerprint": dataset.fingerprint, "run": config.name, "step": step}  # fmt: skip
    return Commit(state, engine.shapes, models.safetensors_metadata(model.config, extra), retention)


def _start_tracker(
    config: RunConfig, facts: dict[str, Any], plan: Plan, folder: Path, engine: Engine, model: Model, start: int
) -> Tracker:
    resolved = folder / "config.json"
    write_atomically(resolved, json.dumps(schema.to_dict(config), indent=1))
    write_atomically(folder / "deepspeed.json", json.dumps(engine.settings, indent=1))
    write_atomically(folder / architecture.FILE, json.dumps(model.config.to_dict(), indent=1))
    settings = {name: value for name, value in facts.items() if not name.startswith("model.")}
    parameters = {**settings, **architecture.as_settings(model.config), "steps": plan.steps, "accumulation": plan.accumulation,
                  "num_parameters": models.num_parameters(model.config)}  # fmt: skip
    tags = {"device": str(engine.ranks.device), "torch": torch.__version__, "data": facts["fingerprint"]}
    tracker = Tracker(config.track, Path(config.out), folder, config.name, parameters, tags, start)
    for file in (
        resolved,
        folder / "deepspeed.json",
        folder / "log.txt",
        folder / "scores.json",
        folder / "probe.json",
    ):
        tracker.artifact(file)
    return tracker
