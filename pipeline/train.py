"""A run from its first line to its last: set up, find where to start, train, stop. Read it top to bottom.

The same command starts, resumes and finishes. Pre-training and fine-tuning differ in their settings only: fine-tuning
has `init.weights`.
"""

import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pipeline import model as models
from pipeline import objective, optim, schema
from pipeline.checkpoint import Checkpoints, free_bytes, read_state, write_atomically
from pipeline.config import RunConfig
from pipeline.console import Console, progress_line
from pipeline.data.cache import Storage
from pipeline.data.loader import Batch, Loader, train_requests, train_view
from pipeline.data.manifest import Dataset, open_dataset
from pipeline.data.mix import draw_mixing
from pipeline.data.order import SampleOrder
from pipeline.data.split import NOTHING_EXCLUDED, Split
from pipeline.distributed import from_environment
from pipeline.engine import Engine, StepResult, start_ranks
from pipeline.errors import OneRankError, Stopped, UserError
from pipeline.evaluate.classify import predict, score
from pipeline.model import VisionTransformer
from pipeline.plan import Plan, make_plan
from pipeline.profile import Meter, peak_flops
from pipeline.schedule import learning_rate
from pipeline.stop import Stop
from pipeline.track import Tracker

# What must be as it was for a checkpoint to continue: its tensors, its engine's files, the order of its samples.
_FIXED = ("seed", "model.", "data.streams", "data.window", "data.train_split", "train.global_batch", "optimizer.name",
          "engine.zero_stage", "engine.precision", "ranks", "fingerprint", "classes", "excluded")  # fmt: skip
# fp32 master weights, two moments and the 16-bit copy, and model.pt, with a margin.
_CHECKPOINT_BYTES_PER_PARAMETER = 20
_FULL_BYTES = 2**20
_SPACE_ADVICE = "Free some, or lower checkpoint.keep; the same command goes on from the last checkpoint."


def run(config: RunConfig, stop: Stop | None = None) -> None:
    """Train to the end of `config.train.length`, from wherever the run stands. Raises UserError for a user's mistake.

    stop: made before the imports, if the command did. A run that is stopped ends the process with exit code 75.
    """
    with stop or Stop(config) as stop:
        _run(config, stop)


def _run(config: RunConfig, stop: Stop) -> None:
    # ------------------------------------------------------------------ what will happen, before anything does
    ranks = from_environment()
    dataset = open_dataset(config.data.path, Storage.of(config.data))
    split = dataset.split(config.data.train_split, config.data.exclude)
    evaluation = dataset.split(config.data.eval_split, config.data.exclude)
    plan = make_plan(config, len(split), ranks.world_size)
    facts = identity(config, dataset, plan, split, evaluation)
    folder = stop.folder.path
    in_use = stop.folder.lock() if ranks.is_main else None
    console = Console(folder / "log.txt", ranks.is_main and in_use is None)
    console.say(f"{config.name}: {plan.describe()}")
    if not stop.folder.is_locked:
        console.say(f"{folder} is on a file system without locks: nothing keeps a second run out of it.")
    for line in split.notes() + evaluation.notes():
        console.say(line)
    start_ranks(ranks, config.engine.timeout_minutes)
    ranks.agree(in_use)
    stop.connect(ranks)
    _refuse_other_facts(facts, ranks.agree(facts), ranks.rank)

    # ------------------------------------------------------------------ where to start: checkpoint, weights or afresh
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    resumed = ranks.agree(_find_checkpoint(checkpoints, facts, console) if ranks.is_main else None)
    model = _initial_model(config, dataset, resumed)
    model.activation_checkpointing = config.engine.activation_checkpointing
    optimizer = optim.build(model, model.weight_decay_mask(), config.optimizer)
    engine = Engine(model, optimizer, config.engine, config.optimizer, plan, ranks, config.seed)
    start = 0
    if resumed is not None:
        engine.load(resumed / "engine")
        start = stop.step = read_state(resumed)["step"]
        console.say(f"resumed from {resumed} at step {start:,} of {plan.steps:,}")
    elif config.init.weights:
        console.say(f"started from the weights in {config.init.weights}")
    # ------------------------------------------------------------------ what feeds it and what watches it
    peak, peak_source = peak_flops(ranks.device, engine.dtype, config.engine.peak_tflops)
    flops = models.training_flops_per_image(model.config)
    console.say(
        f"{models.num_parameters(model.config) / 1e6:.2f} M parameters, {flops / 1e9:.2f} GFLOP to train on an image; "
        f"{dataset.num_classes} classes, data {dataset.fingerprint}; {peak / 1e12:.2f} TFLOP/s a device ({peak_source})"
    )
    meter = Meter(ranks, flops, peak)
    order = SampleOrder(split.shard_sizes, config.seed, plan.global_batch, config.data.streams, config.data.window)
    requests = train_requests(order, start, plan.steps, plan.micro_batch, ranks.rank, ranks.world_size)
    loss_of = partial(objective.batch_loss, kind=config.train.loss, label_smoothing=config.train.label_smoothing)
    loader = Loader(
        split, train_view(config.augment, config.seed), config.model.image_size, config.data.threads,
        config.data.prefetch, config.data.max_bad_share, pin=ranks.device.type == "cuda", is_unwanted=stop.is_wanted,
    )  # fmt: skip

    def evaluate(step: int) -> None:
        split_name = config.data.eval_split
        scores = score(
            predict(engine.forward, evaluation, config.model.image_size, config.augment, config.train.loss,
                    config.evaluate.batch, config.data.threads, ranks, stop=stop),
            evaluation,
        )  # fmt: skip
        console.say(f"step {step:,}: {split_name} {scores}")
        if tracker:
            tracker.log(step, {f"{split_name}_{name}": value for name, value in asdict(scores).items()})
            write_atomically(folder / "scores.json", json.dumps({"step": step, **asdict(scores)}))

    def commit(step: int, result: StepResult) -> None:
        begin = time.perf_counter()
        _refuse_broken(ranks.mean(result.loss), engine, config, step)
        _save(checkpoints, engine, model, config, dataset, facts, step)
        seconds = time.perf_counter() - begin
        if tracker:
            tracker.log(step, {"checkpoint_seconds": seconds})
        stop.committed(step, seconds)

    # Also when nothing is left to train: what MLflow has not been told yet goes now.
    tracker = _start_tracker(config, facts, plan, folder, engine, model) if ranks.is_main else None
    status, reason = "FAILED", ""
    done = committed = start
    try:
        stop.begin_training(start)
        if ranks.agree(_evaluation_is_owed(folder, start, plan)):
            evaluate(start)
        # -------------------------------------------------------------- the loop
        batches = loader.batches(requests)
        console.open_bar(start, plan.steps)
        for step, (micro_batches, waited) in enumerate(stop.together(_steps(batches, plan.accumulation)), start):
            lr = learning_rate(config.schedule, config.optimizer.lr, step, plan.steps, plan.warmup)
            mixing = draw_mixing(config.augment, config.model.image_size, config.seed, step)
            result = engine.train_step(step, micro_batches, lr, loss_of, mixing)
            meter.step(plan.global_batch, waited)
            console.advance()
            done = step + 1
            last = done == plan.steps

            if done % config.train.log_every == 0 or last:
                metrics = {
                    "loss": ranks.mean(result.loss), "lr": lr, "grad_norm": result.grad_norm, **meter.read(),
                    "epoch": done * plan.global_batch / plan.num_samples, "skipped_steps": engine.skipped_steps,
                    "bad_samples": ranks.sum(len(loader.bad))[0],
                    "storage_retries": ranks.sum(dataset.storage.patience.retries)[0],
                }  # fmt: skip
                console.say(progress_line(done, plan.steps, metrics, plan.global_batch))
                if tracker:
                    tracker.log(done, metrics)
                # Each rank has seen its own; here they are counted together.
                if metrics["bad_samples"] > loader.max_bad:
                    raise UserError(
                        f"{metrics['bad_samples']:.0f} samples of {len(split)} cannot be read, more than "
                        f"data.max_bad_share = {config.data.max_bad_share} allows ({loader.max_bad}). Check the shards, "
                        "or raise data.max_bad_share."
                    )

            evaluating = done % plan.eval_every == 0 or last
            saving = done % plan.checkpoint_every == 0 or last
            begin = time.perf_counter()
            if saving:  # Before evaluation: what was trained is safe first.
                commit(done, result)
                committed = done
                stop.leave_if_wanted()  # Else the next step would want a commit of its own.
            if evaluating:
                evaluate(done)
            meter.exclude(time.perf_counter() - begin)
        bad = {row: reason for of_rank in ranks.gather(loader.bad) for row, reason in of_rank.items()}
        for row, key in zip(sorted(bad), split.keys(sorted(bad)), strict=True):
            console.say(f"left out {key}: {bad[row]}")
        status = "FINISHED"
    except Stopped:
        # -------------------------------------------------------------- asked to stop, in training or in evaluation
        if done > committed:
            commit(done, result)
        status, reason = "KILLED", stop.agreed_reason()
    finally:
        console.close_bar()
        loader.close()
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


def _find_checkpoint(checkpoints: Checkpoints, now: dict[str, Any], console: Console) -> Path | UserError | None:
    """The newest whole checkpoint of this run, None to start afresh, or why it cannot be continued."""
    checkpoints.sweep()
    path, refused = checkpoints.newest_whole()
    for line in refused:
        console.say(line)
    if path is None:
        if refused:
            return UserError(
                f"no checkpoint in {checkpoints.folder} is whole. Remove that folder to start the run afresh."
            )
        return None
    # Checkpoints of before there were lists of samples to leave out do not say that none were.
    then = {"excluded": NOTHING_EXCLUDED, "evaluation_excluded": NOTHING_EXCLUDED, **read_state(path)["identity"]}
    changed = [f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]]
    fixed = [text for text in changed if text.startswith(_FIXED)]
    if fixed:
        return UserError(
            f"{path} cannot be continued: {'; '.join(fixed)}. Set it back, or start another run with name=..."
        )
    for text in changed:
        console.say(f"changed since the checkpoint: {text}")
    return path


def identity(config: RunConfig, dataset: Dataset, plan: Plan, split: Split, evaluation: Split) -> dict[str, Any]:
    """What a run is: its settings by dotted name, its data and its ranks. Saved with each checkpoint."""
    return {
        **schema.flatten(schema.to_dict(config)),
        "fingerprint": dataset.fingerprint,
        "classes": dataset.num_classes,
        "ranks": plan.world_size,
        "excluded": split.excluded,
        "evaluation_excluded": evaluation.excluded,
        **{f"left_out.{s.name}.{name}": n for s in (split, evaluation) for name, n in s.left_out_by.items()},
    }


def _refuse_other_facts(mine: dict[str, Any], of_rank_0: dict[str, Any], rank: int) -> None:
    """Stop a rank whose data or settings are not those of rank 0: its batches would be of another order."""
    keys = [key for key in {**of_rank_0, **mine} if mine.get(key) != of_rank_0.get(key)]
    other = [f"{key} is {mine.get(key)} here, {of_rank_0.get(key)} on rank 0" for key in keys]
    if other:
        raise OneRankError(f"rank {rank} is of another run: {'; '.join(other)}. Give every node the same files.")


def _initial_model(config: RunConfig, dataset: Dataset, resumed: Path | None) -> VisionTransformer:
    """The model of the checkpoint (its tensors come with the engine's), of the weights given, or a new one."""
    settings = config.model
    if resumed is not None:
        return VisionTransformer(models.read_weights(resumed / "model.pt")[0])
    if config.init.weights:
        model = models.load(
            config.init.weights,
            image_size=settings.image_size,
            num_classes=dataset.num_classes if config.init.new_head else None,
            new_head=config.init.new_head,
            dropout=settings.dropout,
            seed=config.seed,
        )
        if model.config.num_classes != dataset.num_classes:
            raise UserError(
                f"{config.init.weights} has {model.config.num_classes} classes, {config.data.path} has "
                f"{dataset.num_classes}. Use init.new_head=true, or the data set that these weights were made for."
            )
        return model
    assert settings.name, "config.check refuses a run with neither model.name nor init.weights"
    return models.create(
        settings.name,
        settings.image_size,
        dataset.num_classes,
        representation=settings.representation,
        gelu=settings.gelu,
        dropout=settings.dropout,
        head_bias=settings.head_bias,
        seed=config.seed,
        width=settings.width,
        depth=settings.depth,
        mlp_width=settings.mlp_width,
        num_heads=settings.num_heads,
    )


def _steps(batches: Iterator[Batch], accumulation: int) -> Iterator[tuple[list[Batch], float]]:
    """The micro-batches of each step, and the seconds waited for them."""
    while True:
        begin = time.perf_counter()
        micro_batches = list(islice(batches, accumulation))
        if not micro_batches:
            return
        yield micro_batches, time.perf_counter() - begin


def _evaluation_is_owed(folder: Path, start: int, plan: Plan) -> bool:
    """Whether the run left `start` before it was evaluated: stopped or killed after its checkpoint."""
    if not start or (start % plan.eval_every and start < plan.steps):
        return False
    try:
        return int(json.loads((folder / "scores.json").read_text())["step"]) < start
    except (OSError, ValueError, KeyError):
        return True


def _refuse_broken(loss: float, engine: Engine, config: RunConfig, step: int) -> None:
    """Stop before a checkpoint is made of weights that went wrong. Raises UserError."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {step:,}: no checkpoint is made of this. Start again from the last one with a "
            "lower optimizer.lr, a longer schedule.warmup or engine.precision=fp32."
        )
    if engine.skipped_steps > config.train.max_skipped_steps:
        raise UserError(
            f"{engine.skipped_steps} steps were skipped for a non-finite gradient by step {step:,}, more than "
            f"train.max_skipped_steps = {config.train.max_skipped_steps}. Lower optimizer.lr, or raise the budget."
        )


def _save(
    checkpoints: Checkpoints,
    engine: Engine,
    model: VisionTransformer,
    config: RunConfig,
    dataset: Dataset,
    facts: dict[str, Any],
    step: int,
) -> None:
    """Commit a checkpoint. Collective; nothing half-written stays when the disk is full."""
    ranks = engine.ranks
    needed = _CHECKPOINT_BYTES_PER_PARAMETER * models.num_parameters(model.config)
    problem = None
    if ranks.is_main and free_bytes(checkpoints.folder) < needed:
        problem = UserError(
            f"no space left in {checkpoints.folder}: a checkpoint needs about {needed / 2**30:.2f} GiB. {_SPACE_ADVICE}"
        )
    ranks.agree(problem)
    path = ranks.agree(checkpoints.begin(step) if ranks.is_main else None)
    try:
        engine.save(path / "engine")
        weights = engine.weights()
        if ranks.is_main:
            preprocessing = {"image_size": config.model.image_size, **schema.to_dict(config.augment)}
            extra = {"classes": dataset.classes, "preprocessing": preprocessing, "loss": config.train.loss,
                     "fingerprint": dataset.fingerprint, "run": config.name, "step": step}  # fmt: skip
            models.save_state(weights, model.config, path / "model.pt", extra)
        ranks.barrier()  # Every rank's files are there.
        if ranks.is_main:
            versions = {"python": platform.python_version(), "torch": torch.__version__}
            state = {"step": step, "samples_seen": step * config.train.global_batch, "versions": versions,
                     "identity": facts}  # fmt: skip
            checkpoints.commit(path, state)
        ranks.barrier()
    except (OSError, RuntimeError) as error:
        # torch.save turns a full disk into a RuntimeError that does not say so.
        full = free_bytes(checkpoints.folder) < _FULL_BYTES
        if ranks.is_main:
            checkpoints.sweep()
        if full:
            raise OneRankError(f"no space left in {checkpoints.folder}: {_SPACE_ADVICE}") from None
        raise error


def _start_tracker(
    config: RunConfig, facts: dict[str, Any], plan: Plan, folder: Path, engine: Engine, model: VisionTransformer
) -> Tracker:
    resolved = folder / "config.json"
    write_atomically(resolved, json.dumps(schema.to_dict(config), indent=1))
    write_atomically(folder / "deepspeed.json", json.dumps(engine.settings, indent=1))
    parameters = {**facts, "steps": plan.steps, "accumulation": plan.accumulation,
                  "num_parameters": models.num_parameters(model.config)}  # fmt: skip
    tags = {"device": str(engine.ranks.device), "torch": torch.__version__, "data": facts["fingerprint"]}
    tracker = Tracker(config.track, Path(config.out), folder, config.name, parameters, tags)
    for file in (resolved, folder / "deepspeed.json", folder / "log.txt", folder / "scores.json"):
        tracker.artifact(file)
    return tracker
