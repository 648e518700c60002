"""A complete run: check launcher, settings and data before the slow imports (torch, DeepSpeed), set up, train, end.

The same command starts, resumes and finishes it. Pre-training and fine-tuning differ only in their settings:
fine-tuning has `init.weights`.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.base.errors import OneRankError, Stopped, UserError
from pipeline.base.progress import duration
from pipeline.base.words import significant
from pipeline.cluster.stop import Stop
from pipeline.estimate.plan import Plan, make_plan
from pipeline.process.launcher import check_environment, quiet_torch, share_cores
from pipeline.process.start import rank
from pipeline.process.waits import Work
from pipeline.settings.run import RunConfig

if TYPE_CHECKING:
    from pipeline.data.mixture.run_data import RunData
    from pipeline.evaluate.probes.probe import RunProbe
    from pipeline.train.bookkeeping import TrainingRun


@dataclass(frozen=True)
class Prepared:
    """Data and plan of a run, checked. config: with an empty data.eval_split if there is no held-out split, and the
    names of all data.targets. draw: see `prepare`.
    """

    config: RunConfig
    data: "RunData"
    run_probe: "RunProbe | None"
    plan: Plan
    draw: str | None = None


def run_training(config: RunConfig, draw: str | None = None) -> None:
    """Train, in a process started by a launcher or directly. draw: see `prepare`. Raises UserError for a user's
    mistake.
    """
    check_environment()
    quiet_torch()
    share_cores()
    folder = Path(config.out, config.name)
    with Stop(folder, config.train.stop_after_minutes) as stop:  # First, so that signals are handled during slow work.
        with _said_by_each_host(), Work("importing PyTorch, opening the data"):
            prepared = prepare(config, draw)
        _train(stop, prepared)


def _train(stop: Stop, prepared: Prepared) -> None:
    """Start or resume a run and train to the end of `train.length`. Raises UserError for a user's mistake.

    A run that is asked to stop commits a checkpoint and ends the process with exit code 75.
    """
    from pipeline.train.setup import set_up  # Late: imports torch.

    with Work("importing DeepSpeed, building the model, trying out one step"):
        run = set_up(stop, prepared)
    stop.show_end = run.show_end
    reason = None
    try:
        reason = _train_until_stopped(run)
    finally:
        run.close(is_finished=reason == "")
    progress, console = run.progress, run.console
    if reason:
        console.say(
            f"stopped by {reason} at step {progress.step:,}, which is committed: the same command resumes it (exit"
            " code 75)"
        )
        stop.leave(progress.step, reason)
    stop.show_end("finished", "")
    if run.resumed is not None and progress.start >= prepared.plan.steps:
        console.say("nothing left to do: the run is finished")
        return
    speed = f"{significant(run.meter.average)} images/s over {duration(run.meter.total_seconds)} of training, in "
    console.say(f"finished: {speed if prepared.plan.steps else ''}{run.folder}")


def _train_until_stopped(run: "TrainingRun") -> str:
    """Train to the end and return "", or, if asked to stop, commit a checkpoint and return the reason."""
    from pipeline.train.loop import train_on_all_ranks  # Late: imports torch.

    progress, stop = run.progress, run.stop
    try:
        stop.begin_training(progress.start)
        if run.head_metrics:  # Committed as step 0, so that a restart does not fit again.
            if run.tracker:
                run.tracker.log(0, run.head_metrics)
            run.save_on_all_ranks()
            run.saver.wait()
        for evaluator in run.evaluators:
            if run.ranks.agree(evaluator.is_missing(progress.start)):
                evaluator.evaluate_on_all_ranks(progress.start)
            else:
                evaluator.mark_best_again(progress.start)
        run.console.open_bar(progress.start, run.plan.steps)
        train_on_all_ranks(run)
        run.saver.wait()
    except Stopped:  # On all ranks at the same step or evaluation batch.
        run.save_before_stop_on_all_ranks()
        run.saver.wait()
        return next(filter(None, run.ranks.gather(stop.reason)))
    stop.committed(progress.step)
    run.report_bad_samples_on_all_ranks()
    return ""


@contextmanager
def _said_by_each_host() -> Iterator[None]:
    """Context in which the first rank of another host says a UserError, too: rank 0 may not have it, and waits for that
    host.
    """
    try:
        yield
    except UserError as error:
        if rank() and os.environ.get("LOCAL_RANK") == "0" and not error.on_one_rank:
            raise OneRankError(f"{socket.gethostname()}: {error}") from error
        raise


def prepare(config: RunConfig, draw: str | None = None) -> Prepared:
    """Open the data and plan the run. Raises UserError for invalid settings, data or weights.

    draw: module that draws the figures of a run folder, in a process of its own (`DrawingProcess`); None: no figures.
    """
    from pipeline.data.dataset.manifest import open_dataset
    from pipeline.data.mixture.run_data import open_run_data
    from pipeline.data.storage.cache import Storage  # Late imports: `Stop` handles signals meanwhile.

    world_size = check_environment()
    storage = Storage.create(config.data.retry_minutes, config.data.cache, config.data.cache_gb, world_size)
    data = open_run_data(config.data, config.seed, config.labels, storage)
    config = replace(config, data=replace(config.data, eval_split=data.eval_split, targets=data.targets))
    probed = {}
    if config.probe.every.amount and config.probe.reads_labels:
        for name, (path, _) in config.probe.tested.items():
            try:
                probed[name] = open_dataset(path, storage) if path else data.own
            except UserError as error:
                raise type(error)(f"probe.data = {error}") from error
            probed[name].refuse_without_labels(
                "probe.data" if path else "data.path",
                "Few-shot and kNN probes need some: set probe.data to any data set with labels, or probe.every=0%.",
            )
    plan = make_plan(config, data.epoch_samples, world_size)
    from pipeline import objectives  # Imports torch, so after what needs none of it.

    objectives.check(config, data.dataset.num_classes, data.dataset.classes)
    objectives.check_pixels(config, data.split.pixels)
    if not config.init.weights:  # Refuses what cannot be built while there is no run folder yet.
        objectives.new_backbone(config, data.dataset.num_classes, data.split.pixels)
    plan = plan.measuring(config, data.dataset.num_classes)
    run_probe = None
    if config.probe.every.amount:
        from pipeline.evaluate.probes.probe import open_run_probe  # Imports torch.

        run_probe = open_run_probe(config, data.own, data.split.parts[0], probed, data.split.pixels)
    refuse_missing_weights(config)
    return Prepared(config, data, run_probe, plan, draw)


def refuse_missing_weights(config: RunConfig) -> None:
    """Raise UserError if init.weights do not exist, unless the run has a checkpoint to resume from."""
    from pipeline.checkpoint.store import Checkpoints, checkpoint_folder
    from pipeline.model.files import find_file
    from pipeline.monitor.mlflow.weights import is_uri

    weights = config.init.weights
    if weights and not is_uri(weights) and not Checkpoints(checkpoint_folder(config)).candidates():
        try:
            find_file(Path(weights), say=lambda line: None)  # A damaged checkpoint is named when the weights are read.
        except UserError as error:
            raise UserError(f"init.weights = {error}") from error
