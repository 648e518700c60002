"""A run in training: what it consists of, how it is set up, what the loop does beside the step (loss spikes, logging,
saving), and what MLflow shows of it.
"""

import contextlib
import json
import os
import platform
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline import model as models
from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import DivergedError, OneRankError, UserError
from pipeline.base.files import write_text
from pipeline.base.json_record import quoted
from pipeline.base.metric import Metric, score_of
from pipeline.base.trained_on import TRAINED_BY, TRAINED_ON, TrainedSet, not_held_out, recorded
from pipeline.base.words import counted, of_classes, on_one_line
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import (
    Checkpoints,
    Counts,
    State,
    checkpoint_folder,
    read_state,
    step_name,
    step_of,
    verify,
)
from pipeline.checkpoint.writer import Commit
from pipeline.cluster.logged_models import logged_models
from pipeline.cluster.status_files import RUN_FOLDER, Ending, refuse_checkpoint_of_another, write_settings
from pipeline.cluster.stop import Stop
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import NOTHING_EXCLUDED, Split
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.mix import draw_mixing
from pipeline.data.loading.order import batches_before, skip_batches
from pipeline.data.mixture.facts import MIXTURE, mixed_until, mixture_facts
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MixedSplit
from pipeline.data.storage.bucket import AnyPath, to_path
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.estimate.memory import checkpoint_bytes, rank_memory, refuse_too_large, what_takes_less
from pipeline.estimate.plan import Plan, accumulation
from pipeline.evaluate import architecture
from pipeline.evaluate.intervals import of_samples
from pipeline.model import Model, read_weights
from pipeline.model.files import find_file
from pipeline.monitor.health import CollapseReports, SlowRanks, SpikePolicy
from pipeline.monitor.metrics_file import METRICS_FILE, by_name, read_metrics
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.origin import find_origin
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.monitor.profile import Meter, StepClock, device_memory, host_memory, peak_flops
from pipeline.monitor.run_page import (
    PROBED_IMAGES,
    TEACHER_TAG,
    DatasetFacts,
    RunFacts,
    WeightsOrigin,
    hide_passwords,
    installed_packages,
)
from pipeline.monitor.system import HostMeter
from pipeline.monitor.tracking import Tracker
from pipeline.monitor.watchdog import Watchdog
from pipeline.objectives.classification import classes_note, moved_class
from pipeline.objectives.parameters import optimizers
from pipeline.objectives.parameters.optimizers import peak_rate
from pipeline.process import waits
from pipeline.process.committed import checkpoints_of
from pipeline.process.console import Console, progress_line
from pipeline.process.distributed import Ranks, from_environment, use_exact_arithmetic
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import Change, Fact, OnChange
from pipeline.train.drawing import DrawingProcess
from pipeline.train.loop import Feed, training_step
from pipeline.train.start import Prepared

if TYPE_CHECKING:  # DeepSpeed is imported late: it takes seconds, and an experiment needs `datasets_of` alone.
    from pipeline.train.evaluators import Evaluator
    from pipeline.train.zero.engine import Engine

# Settings by dotted name, data and number of ranks, which identify a run.
Identity = dict[str, Any]
# Its entries other than settings.
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
# In torch's error for an operation, whose name it begins with, under engine.deterministic.
_NO_SUCH_KERNEL = " does not have a deterministic implementation"
# In the errors of torch.compile (engine.compile) without a C++ compiler for a CPU's kernels, and without Triton, or the
# C compiler that it needs, for a GPU's.
_NO_COMPILER = ("InvalidCxxCompiler", "Cannot find a working triton installation", "Failed to find C compiler")


@dataclass
class Progress:
    """Progress of a run, counted in optimizer steps.

    start: step at which this process started. step: steps completed. saved: step of the last checkpoint handed to the
    writer.
    skipped_batches: (step, number) for each rollback after a loss spike: so many batches are skipped before that step.
    """

    start: int
    step: int
    saved: int
    skipped_batches: list[tuple[int, int]] = field(default_factory=list)


class RunCounts:
    """Continues the counts of a checkpoint, so that a resumed run reports what an undisturbed one would.

    A rank counts without the others; `gather_on_all_ranks` adds up. A rollback takes nothing back: the images of the
    discarded steps could not be read, and their batches are not read again.

    unreadable: row of the training split -> why it cannot be read. Each row counts once, however often and on whichever
    rank it was met.
    """

    def __init__(self, before: Counts, retry: Retry, ranks: Ranks) -> None:
        """before: of the checkpoint that the run resumes from. retry: counts this rank's retries since this start."""
        self.retry, self.ranks = retry, ranks
        self.unreadable = dict(before.unreadable)
        self.storage_retries = before.storage_retries
        self._new: dict[int, str] = {}
        self._retries_counted = 0  # This rank's since this start, included in storage_retries.

    def add(self, batches: Iterable[Batch], reasons: Mapping[int, str]) -> None:
        """Count the unreadable images of a completed step on this rank. reasons: of all unreadable rows."""
        for batch in batches:
            for row in batch.rows[~batch.valid.numpy()].tolist():
                if row not in self.unreadable:
                    self._new[row] = reasons[row]

    def gather_on_all_ranks(self) -> None:
        """Add what all ranks counted since the last call: afterwards the counts are the same on every rank."""
        retries = self.retry.retries
        for unreadable, new_retries in self.ranks.gather((self._new, retries - self._retries_counted)):
            for row, reason in unreadable.items():
                self.unreadable.setdefault(row, reason)
            self.storage_retries += new_retries
        self._new, self._retries_counted = {}, retries

    def to_save(self, loss_spikes: int) -> Counts:
        """The counts of a checkpoint, as they were last gathered. loss_spikes: so far, the same on every rank."""
        return Counts(loss_spikes, self.storage_retries, sorted(self.unreadable.items()))


@dataclass(frozen=True, kw_only=True)
class StartingPoint(Prepared):
    """Where a run begins, once its ranks have met. identity: settings and data, saved with each checkpoint.

    trained_on: by this run, by those whose weights it began with, and by its teacher, as far as recorded. resumed: the
    checkpoint to continue, None without one. damaged: names of damaged checkpoints, which do not count as kept ones.
    state: of the checkpoint. origin: of the weights that a first start begins with. model: not trained yet; the engine
    loads the checkpoint's tensors.
    """

    ranks: Ranks
    stop: Stop
    console: Console
    identity: Identity
    trained_on: Sequence[TrainedSet]
    checkpoints: Checkpoints
    resumed: AnyPath | None
    damaged: set[str]
    state: State
    origin: WeightsOrigin | None
    model: Model

    @property
    def folder(self) -> Path:
        return self.stop.folder.path


@dataclass(frozen=True, kw_only=True)
class TrainingRun(StartingPoint):
    """Everything that the training loop uses; made by `set_up`. tracker, drawing: rank 0 only."""

    engine: "Engine"
    feed: Feed
    peak_lr: float
    meter: Meter
    host_meter: HostMeter
    spikes: SpikePolicy
    slow_ranks: SlowRanks
    collapses: CollapseReports
    counts: RunCounts
    watchdog: Watchdog
    tracker: Tracker | None
    drawing: DrawingProcess | None
    saver: Saver
    progress: Progress
    evaluators: list["Evaluator"] = field(default_factory=list)

    # ------------------------------------------------------------------ around the step
    def record_step(self, micro_batches: Sequence[Batch], loss: Tensor) -> None:
        """Record a completed step. loss: this rank's mean, on the device. Does not synchronise with the device."""
        self.spikes.add(self.progress.step, loss)
        self.counts.add(micro_batches, self.feed.loader.bad)
        self.meter.step(self.plan.global_batch)
        self.console.advance()
        self.saver.check_writer()

    def rolled_back_after_spikes_on_all_ranks(self) -> bool:
        """Report loss spikes since the last call and apply health.on_spike. Returns whether the run was rolled back.

        "warn" continues; "skip" has already skipped the step; "rollback" loads the newest checkpoint before the spike
        and skips the batches that led to it. Raises DivergedError when the budget of skipped steps or rollbacks is
        exceeded.
        """
        config, console, progress = self.config, self.console, self.progress
        engine, spikes, tracker = self.engine, self.spikes, self.tracker
        lines, roll_back_before = spikes.react()
        for line in lines:
            console.say(line)
        if engine.skipped_steps > config.train.max_skipped_steps:
            raise DivergedError(
                f"{counted(engine.skipped_steps, 'step')} skipped by step {progress.step:,}, for a non-finite gradient"
                f" or a loss that jumped, more than train.max_skipped_steps = {config.train.max_skipped_steps}. Lower"
                " optimizer.lr, use a longer schedule.warmup or engine.precision=fp32, or raise the budget."
            )
        if roll_back_before is None:
            return False
        with self.meter.paused():
            self.saver.wait()
            with waits.waiting(
                "an earlier checkpoint to be read", 60 * config.commit_minutes, "checkpoint.wait_minutes"
            ):
                state = self._go_back_on_all_ranks(roll_back_before)
        if state is None:
            return False
        progress.skipped_batches[:] = skip_batches(progress.skipped_batches, state.step, progress.step)
        if len(progress.skipped_batches) > config.health.max_rollbacks:
            raise DivergedError(
                f"the loss has jumped {counted(len(progress.skipped_batches), 'time')}, more than health.max_rollbacks"
                f" = {config.health.max_rollbacks} allows to go back for. Lower optimizer.lr, or raise"
                " health.spike_sigma."
            )
        spikes.forget(state.losses)
        progress.step = progress.saved = state.step
        for line in tracker.go_back(state.step) if tracker else []:
            console.say(line)
        return True

    def _go_back_on_all_ranks(self, spike: int) -> State | None:
        """Load the newest intact checkpoint before step `spike` and remove later ones. Returns its state, or None.

        No save may be in flight.
        """
        ranks, checkpoints = self.ranks, self.checkpoints
        for path in ranks.on_main(checkpoints.candidates):
            if step_of(path) < spike and not any(ranks.gather(verify(path, ranks.rank, ranks.world_size))):
                state = read_state(path)
                # From here on, a killed run must not resume from a checkpoint after the spike.
                ranks.on_main(partial(checkpoints.remove_after, step_of(path)))
                self.engine.load(ShardedTensors.open(path), state.engine)
                self.console.say(f"back to {path}, continuing with the data after the spike")
                return state
        self.console.say("no checkpoint before the spike to roll back to: continuing")
        return None

    # ------------------------------------------------------------------ log, save
    def log_on_all_ranks(self, loss: Tensor, values: dict[str, Tensor], grad_norm: float, lr: float) -> None:
        """Write a console line and a record of metrics. Raises UserError for a failed save or too many unreadable
        samples.
        """
        plan, ranks, counts, progress = self.plan, self.ranks, self.counts, self.progress
        engine, loader, saver = self.engine, self.feed.loader, self.saver
        counts.gather_on_all_ranks()
        num_bad = len(counts.unreadable)
        batches_seen = batches_before(progress.step, progress.skipped_batches)
        logged = {name: ranks.mean(value) for name, value in values.items()}
        metrics = {
            "loss": ranks.mean(loss),
            **logged,
            "lr": lr,
            "grad_norm": grad_norm,
            **self.meter.read(),
            "epoch": self.feed.epochs(batches_seen),
            "skipped_steps": engine.skipped_steps,
            "loss_spikes": self.spikes.num_spikes,
            "bad_samples": num_bad,
            "storage_retries": counts.storage_retries,
            **saver.read(),
            **self.host_meter.read_on_all_ranks(),
        }
        collapse = engine.objective.collapse({"loss": metrics["loss"], **logged})
        if collapse:
            metrics["collapse"] = 1
        declared = engine.objective.values(self.config)
        shown = {name: declared.get(name, Metric()).text(value) for name, value in logged.items()}
        self.console.say(progress_line(progress.step, plan.steps, metrics, plan.global_batch, shown))
        lines = self.collapses.changed("loss", progress.step, collapse)
        for line in lines + self.slow_ranks.changed(self.meter.own_seconds):
            self.console.say(line)
        if self.tracker:
            self.tracker.log(progress.step, metrics)
        saver.check()
        self.stop.committed(saver.committed_step, saver.longest)
        # The limit is for all ranks and starts together; each loader knows only its own.
        if num_bad > loader.max_bad and (text := loader.budget.excess_of_any_set(counts.unreadable, loader.split)):
            raise UserError(text)

    def save_on_all_ranks(self, keep: bool = False) -> None:
        """Hand a checkpoint of this step to the writer, which commits it in the background. keep: never remove it."""
        step = self.progress.step
        self.watchdog.at(step, "checkpoint")
        self.damaged.discard(step_name(step))  # It is overwritten.
        self.counts.gather_on_all_ranks()
        with self.engine.clock.host("checkpoint"):
            self.saver.save(step, self.engine.part(), self._commit(keep))
        self.progress.saved = step

    def save_before_stop_on_all_ranks(self) -> None:
        """Save this step, unless a loss spike since the last save is to be rolled back.

        Then the last checkpoint stays the newest, and a resumed run trains to the spike again and rolls back: the
        outcome is that of a run that was not stopped.
        """
        progress, console = self.progress, self.console
        self.counts.gather_on_all_ranks()
        if progress.step == progress.saved:
            return
        lines, roll_back_before = self.spikes.react()
        for line in lines:
            console.say(line)
        if roll_back_before is None or not progress.saved:
            self.save_on_all_ranks()
            return
        console.say(
            f"step {progress.step:,} is not saved: the resumed run trains from step {progress.saved:,} to the spike"
            " again, to roll back"
        )
        progress.step = progress.saved

    def _commit(self, keep: bool) -> Commit | None:
        """Content of a checkpoint other than tensors; None except on rank 0."""
        if not self.ranks.is_main:
            return None
        config, dataset, progress = self.config, self.data.dataset, self.progress
        engine, spikes = self.engine, self.spikes
        model = engine.objective.backbone.config
        trained_on = [asdict(one) for one in self.trained_on]
        state = {
            "step": progress.step,
            "samples_seen": progress.step * config.train.global_batch,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "engine": asdict(engine.counters()),
            "model": model.to_dict(),
            "identity": self.identity | {RUN_FOLDER: str(Path(config.out, config.name).resolve())},
            "losses": list(spikes.scores.recent),
            "left_out": progress.skipped_batches,
            "counts": asdict(self.counts.to_save(spikes.num_spikes)),
            TRAINED_ON: trained_on,
        }
        preprocessing = {"image_size": min(config.model.image_size), **schema.to_dict(config.augment)}
        extra = {
            "classes": dataset.classes,
            "preprocessing": preprocessing,
            "loss": engine.objective.loss_kind or config.train.loss,
            TRAINED_ON: trained_on,
            "run": config.name,
            "step": progress.step,
        }
        if dataset.class_names != dataset.classes:
            extra["class_names"] = dataset.class_names
        split = self.data.split
        if isinstance(split, MixedSplit) and split.class_maps:
            extra["class_maps"] = split.class_maps
        extra |= engine.objective.extra()
        metadata = models.safetensors_metadata(model, extra)
        return Commit(state, engine.shapes, metadata, config.checkpoint.keep, sorted(self.damaged), keep)

    # ------------------------------------------------------------------ the end
    def report_bad_samples_on_all_ranks(self) -> None:
        """Print a line for each sample that could not be read on any rank since the run's first start."""
        self.counts.gather_on_all_ranks()
        bad = self.counts.unreadable
        for row, key in zip(sorted(bad), self.data.split.keys(sorted(bad)), strict=True):
            self.console.say(f"left out {key}: {bad[row]}")

    def close(self, is_finished: bool) -> None:
        """End threads and processes."""
        self.watchdog.close()
        self.console.close_bar()
        self.feed.loader.close()
        self.saver.close()
        if self.drawing:
            self.drawing.end(last=is_finished and self.progress.step > self.progress.start)
        waits.say_with(None)  # The console was this run's.

    def show_end(self, how: Ending, reason: str) -> None:
        """Show on the run's page how this start ended."""
        if (tracker := self.tracker) is None:
            return
        step = self.progress.step
        status, outcome = "FAILED", f"{how} after step {step:,}: {reason}"
        if how == "finished":
            status, outcome = "FINISHED", f"finished, but {reason}" if reason else how
        elif how == "stopped":
            status, outcome = "KILLED", f"stopped by {reason} at step {step:,}; the same command resumes it"
        told = self._result(tracker.facts, status, outcome)
        tracker.finish(status, how != "finished", outcome, told, self.collapses.first)

    def _result(self, facts: RunFacts, status: str, outcome: str) -> str:
        """Markdown for the end of the description: what was measured, and what a reviewer should know of it."""
        plan, step, meter, bad = self.plan, self.progress.step, self.meter, self.counts.unreadable
        table = [
            "| | planned | done |",
            "|---|---|---|",
            f"| steps | {plan.steps:,} | {step:,} |",
            f"| images | {plan.steps * plan.global_batch:,} | {step * plan.global_batch:,} |",
            "| exaFLOPs | {:.4g} | {:.4g} |".format(*(facts.axes(n).get("exaflops", 0.0) for n in (plan.steps, step))),
        ]
        # A rank that failed cannot ask the others: it knows of its own images, and what they counted at the last log
        # line.
        until = ""
        if status == "FAILED":
            bad, until = bad | self.feed.loader.bad, ", up to the last log line"
        counts = {
            "steps skipped": self.engine.skipped_steps,
            "loss spikes": self.spikes.num_spikes,
            "rollbacks": len(self.progress.skipped_batches),
            "unreadable images": len(bad),
            "storage retries": self.counts.storage_retries,
        }
        warnings = [f"{count:,} {what}" for what, count in counts.items() if count]
        warnings += [self.collapses.first.rstrip(".")] * bool(self.collapses.first)
        warned = f"Warnings: {', '.join(warnings)}" if warnings else "No step was skipped, no image unreadable"
        found = "; ".join([outcome, *_last_scores(self.folder, facts)])
        lines = [f"**Result**: {found}. {warned}{until}.", "\n".join(table)]
        if meter.total_seconds:
            lines.append(
                f"{meter.average:,.1f} images/s over {meter.total_seconds:,.0f} s of training since the last start."
            )
        return "\n\n".join(lines)

    def caveats(self) -> str:
        """Warnings about a finished run: most steps were skipped, or its score may be chance; "" without any."""
        skipped, step, num_classes = self.engine.skipped_steps, self.progress.step, self.data.dataset.num_classes
        told = []
        if 2 * skipped > step:
            told.append(
                f"{skipped:,} of {counted(step, 'step')} were skipped, for a non-finite gradient or a loss that jumped:"
                " lower optimizer.lr, use a longer schedule.warmup or engine.precision=fp32"
            )
        scores = json_record.read_or_none(self.folder / "scores.json", dict[str, Any]) or {}
        count, top1 = scores.get("top1_effective_images") or scores.get("num_samples"), scores.get("top1")
        if top1 is not None and count and scores["step"] == step and of_samples(top1, count).low <= 1 / num_classes < 1:
            told.append(
                f"top-1 {top1:.2%} cannot be told from chance, {1 / num_classes:.2%} of {counted(num_classes, 'class')}"
            )
        return "; ".join(told)


# ---------------------------------------------------------------------- set-up
def set_up(stop: Stop, prepared: Prepared) -> TrainingRun:
    """Prepare a run, up to the step where it starts. Collective. Raises UserError for a user's mistake."""
    from pipeline.train.evaluators import evaluators_of  # Late: it imports this module.

    start = _find_start_on_all_ranks(stop, prepared)
    # A failure would leave processes and threads to this process, which may live on, and MLflow a run that never ends.
    with contextlib.ExitStack() as undone:
        engine, feed = _build_training_on_all_ranks(start, undone)
        run = _begin_run_on_all_ranks(start, engine, feed, undone)
        run.evaluators.extend(evaluators_of(run))
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
    for line in plan.notes(config) + objectives.without_effect(config) + data_lines:
        console.say(line)
    start_ranks(ranks, config.engine.timeout_minutes, _longest_wait_minutes(config), stop.meet)
    ranks.agree(in_use)
    stop.connect(ranks)
    ranks.on_all(partial(refuse_other_facts, identity, ranks.agree(identity)))

    gpu_memory = device_memory(ranks.device)
    least = min(ranks.gather(gpu_memory or host_memory()))  # Hosts may have other GPUs.
    of = "its GPU" if gpu_memory else "its share of the host"
    if config.model.name:  # Checked before the model is built, which takes long if it is too large.
        new = objectives.new_backbone(config, data.dataset.num_classes, data.split.pixels)
        ranks.on_main(partial(refuse_too_large, config, plan, new, least, of))
    checkpoints = Checkpoints(checkpoint_folder(config))
    resumed, damaged = find_checkpoint_on_all_ranks(checkpoints, identity, plan.steps, ranks, console)
    origin, begun = None, config
    if resumed is None:
        ranks.on_main(partial(refuse_checkpoints_elsewhere, config))
        if config.init.weights:
            # The file rather than its run: while that run trains on, its newest checkpoint is another one a moment
            # later.
            origin = ranks.on_main(partial(_find_weights, config, console))
            begun = replace(config, init=replace(config.init, weights=origin.path))
    model, before = ranks.on_all(partial(initial_model, begun, data.dataset, resumed, console))
    trained_on = list(dict.fromkeys([*before, *data.trained_on(config.name)]))
    marked = data.not_held_out(trained_on)
    if (probe := prepared.run_probe) and (runs := probe.trained_by(trained_on)):
        marked["probe.split"] = runs
    for name, runs in marked.items():
        console.say(not_held_out(name, runs))
    if not config.model.name:
        ranks.on_main(partial(refuse_too_large, config, plan, model.config, least, of))
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
        state=State(step=0) if resumed is None else read_state(resumed),
        origin=origin,
        model=model,
    )


def _longest_wait_minutes(config: RunConfig) -> float:
    """Longest wait of a rank outside a collective call that the others are in."""
    return max(config.data.retry_minutes, config.commit_minutes)


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


def refuse_other_facts(mine: Identity, of_rank_0: Identity) -> None:
    """Raise UserError if this rank's settings or data differ from rank 0's: its batches would not match."""
    keys = [key for key in {**of_rank_0, **mine} if mine.get(key) != of_rank_0.get(key)]
    other = [f"{key} is {mine.get(key)} here, {of_rank_0.get(key)} on rank 0" for key in keys]
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
    ranks.on_main(lambda: checkpoints.clean_up(console.say))
    ranks.on_main(checkpoints.kept)  # Raises for a damaged kept.json before training, not after.
    for path in ranks.on_main(checkpoints.candidates):
        problems = [text for text in ranks.gather(verify(path, ranks.rank, ranks.world_size)) if text]
        if not problems:
            for text in ranks.on_main(partial(_compare, path, now, num_steps)):
                console.say(f"changed since the checkpoint: {text}")
            ranks.on_main(partial(checkpoints.point_at, path))  # A kill may have prevented it.
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

    def listed(least: OnChange) -> str:
        return hide_passwords("; ".join(str(change) for change in changed if change.fact.means(least)))

    if other := listed("run"):
        raise UserError(f"{path} cannot be continued: {other}. Set it back, or start another run with name=...")
    if state.step > num_steps:
        raise UserError(
            f"{path} has {counted(state.step, 'step')} of training, more than train.length = {now.get('train.length')}"
            f" asks for ({num_steps:,}). Set it back, or start another run with name=..."
        )
    if state.step == num_steps and (other := listed("result")):
        raise UserError(
            f"the run is finished, and was another one: {other}. Set it back to use what was trained ({path}), "
            "raise train.length to train on, or start another run with name=..."
        )
    return [hide_passwords(str(change)) for change in changed] + _other_comparison(state.identity, now)


def _other_comparison(then: Identity, now: Identity) -> list[str]:
    """A line if the loss compares the images of a micro-batch on all ranks, and compares another number of them than
    before.
    """
    section = {name.removeprefix("objective."): value for name, value in now.items() if name.startswith("objective.")}
    name = objectives.kind(now["train.loss"]).compares_micro_batch(section) if "train.loss" in now else ""
    if not name or "ranks" not in then:
        return []
    before, after = (
        batch // accumulation(batch, identity["train.micro_batch"], identity["ranks"])
        for identity in (then, now)
        for batch in [identity["train.global_batch"]]
    )
    if before == after:
        return []
    return [
        f"{name} compares the images of a micro-batch, which were {before} on all ranks and are {after}: another loss"
        " from here on (train.micro_batch)"
    ]


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
    teacher = of_objective.teacher_file(config)
    before = recorded(teacher[2]) if teacher else []
    if config.init.weights:
        num_classes = objectives.num_classes(config, dataset.num_classes)
        adaptation = objectives.adaptation(config, dataset.num_classes, dataset.pixels)
        content = models.read_weights(config.init.weights, console.say)
        names, before = content.extra.get("classes"), [*recorded(content.extra), *before]
        model = models.load(config.init.weights, seed=config.seed, content=content, say=console.say, **adaptation)
        del content  # whose tensors the model has copied
        if not num_classes and not of_objective.continues_additions:
            console.say(
                f"train.loss = {config.train.loss} begins with the backbone of {config.init.weights}; its head is new"
            )
        if model.config.num_classes != num_classes:
            raise UserError(
                f"{config.init.weights} has {counted(model.config.num_classes, 'class')}, {config.data.path} has "
                f"{dataset.num_classes}. Use init.new_head=true, or the data set that these weights were made for."
            )
        if num_classes and not config.init.new_head and (not names or len(names) == num_classes):
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
def _build_training_on_all_ranks(start: StartingPoint, undone: contextlib.ExitStack) -> tuple["Engine", Feed]:
    """Build the engine, try out one step, and load the checkpoint. undone: closes what was opened, if set-up fails."""
    from pipeline.train.zero.engine import Engine, limit_collectives

    config, plan, ranks = start.config, start.plan, start.ranks
    clock = StepClock(ranks.device)

    def begin_feed() -> Feed:
        feed = Feed(config, plan, start.data.split, ranks, start.stop, clock, start.model.config.pixels)
        undone.enter_context(feed.loader)
        return feed

    # First, because it may fork processes, which should inherit little of what trains.
    feed = ranks.on_all(begin_feed)
    start.model.activation_checkpointing = config.engine.activation_checkpointing
    objective = ranks.on_all(lambda: objectives.create(config, start.model))  # It may read weights.
    objective.num_steps = plan.steps
    if start.resumed is None and start.origin is not None and objective.continues_additions:
        weights = ranks.on_all(partial(read_weights, start.origin.path))
        start.console.say(ranks.on_all(partial(objective.load_additions, weights.added, weights.decoder)))
        del weights  # whose tensors the objective has copied
    fused = start.identity["fused_optimizer"]
    optimizer = optimizers.build(objective, objective.decayed(), config.optimizer, fused)
    with room("training", lambda: what_takes_less(config, plan, start.model.config)):
        engine = Engine(objective, optimizer, config.engine, config.optimizer, plan, ranks, config.seed, clock)
        limit_collectives(config.engine.timeout_minutes + _longest_wait_minutes(config))
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
    return engine, feed


# ---------------------------------------------------------------------- dry run
# One step and one evaluation batch of the largest shapes before training, so that out-of-memory shows at once, and so
# does an operation whose bits a GPU cannot repeat (engine.deterministic).
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
        return Batch(
            tuple(zeros(group.count, count, *ImageSize.parse(group.size)) for group in views),
            torch.zeros(count, num_labels, dtype=torch.int64),
            torch.ones(count, dtype=torch.bool),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
        )

    # The second has gradients and activations in memory.
    micro_batches = [blank(plan.micro_batch, data.split.max_labels)] * min(2, plan.accumulation)
    mixing = draw_mixing(config.augment, config.model.image_size, config.seed, step=0)
    with engine.untouched(len(micro_batches)):
        training_step(engine, micro_batches, step=0, lr=0.0, mixing=mixing)

    trials: list[tuple[str, int, Callable[[int], object]]] = []  # (of what, most images that a rank may get, trial)
    if objectives.metrics(config)["scores"]:
        most = -(-max(len(split) for _, split in data.evaluated.values()) // plan.world_size)
        if objective.predicts_classes:
            trials.append(("evaluation", most, lambda count: engine.forward(zeros(count, *config.model.image_size))))
        else:
            trials.append(("evaluation", most, lambda count: engine.measure(blank(count, 0))))
    if probe := prepared.run_probe:
        read = [len(probe.labelled.choice.rows), len(probe.labelled.test)] if probe.labelled else []
        most = max(*read, min(config.probe.rankme_images, len(probe.own)), 0)
        trials.append(("probe", most, lambda count: engine.features(zeros(count, *config.model.image_size))))
    for what, most, trial in trials:
        count = min(config.evaluate.batch, most)
        smaller = f"Use evaluate.batch={count // 2}." if count > 1 else "The batch is one image: use a larger GPU."
        with room(
            f"{what} with {counted(count, 'image')} (evaluate.batch = {config.evaluate.batch})", partial(str, smaller)
        ):
            trial(count)


@contextmanager
def room(what: str, way_out: Callable[[], str]) -> Iterator[None]:
    """Context in which an out-of-memory error on one rank ends all ranks. what: is tried out. way_out: what takes less
    memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        operation, has_no_kernel, _ = reason.partition(_NO_SUCH_KERNEL)
        if has_no_kernel:
            raise OneRankError(
                f"torch has no kernel for {operation} that gives the same bits each time on this GPU. Use"
                " engine.deterministic=false (a resumed run then differs in the last bits), or compute it otherwise."
            ) from None
        if any(words in str(error) for words in _NO_COMPILER):
            what = "Triton and a C compiler" if torch.cuda.is_available() else "a C++ compiler (g++, or what CXX names)"
            raise OneRankError(
                f"engine.compile = true needs {what}, which {socket.gethostname()} does not have. Install it, or use"
                " engine.compile=false."
            ) from None
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        traceback.clear_frames(error.__traceback__)  # Frees tensors: the estimate below needs memory.
        where = f"{socket.gethostname()} ran out of memory before the first step, trying out {what}"
        raise OneRankError(f"{where}: {reason} {way_out()}") from None


# ---------------------------------------------------------------------- what measures
def _begin_run_on_all_ranks(
    start: StartingPoint, engine: "Engine", feed: Feed, undone: contextlib.ExitStack
) -> TrainingRun:
    """Begin what measures the run and what saves it. undone: ends threads and processes if set-up fails."""
    config, ranks, folder, console = start.config, start.ranks, start.folder, start.console
    dataset, state = start.data.dataset, start.state
    peak, peak_source = peak_flops(ranks.device, engine.dtype, config.engine.peak_tflops)
    model = start.model.config
    flops: int = ranks.on_main(partial(objectives.training_flops, config, model))
    console.say(
        f"{models.num_parameters(model) / 1e6:.2f} M parameters, {flops / 1e9:.2f} GFLOP to train on an image;"
        f" {counted(dataset.num_classes, 'class') if dataset.classes else 'no labels'}, data {dataset.fingerprint};"
        f" {peak / 1e12:.2f} TFLOP/s a device ({peak_source})"
    )
    hosts = ranks.gather(socket.gethostname())
    # Also for a finished run: sends the metrics that MLflow has not received yet.
    tracker = _start_tracker(start, hosts) if ranks.is_main else None
    if tracker:
        start.stop.show_end = lambda how, reason: tracker.finish(
            "FAILED", in_a_hurry=True, outcome=f"{how} before training began: {reason}"
        )
        for line in tracker.notes:
            console.say(line)
    # After the metrics of steps that run again are gone, and before its settings are there: a kill must leave no word
    # of a last start that had finished, beside settings by which there is more to train.
    start.stop.committed(state.step)
    if tracker:
        page = PageFolder(folder)
        write_settings(config, folder)
        write_text(folder / "deepspeed.json", json.dumps(engine.settings, indent=1))
        page.write_text("environment.txt", environment(ranks.device))
        page.write_text("plan.txt", plan_lines(config, start.plan, start.model))
    watchdog = Watchdog(folder / "hang", ranks.rank, hosts, config.health.hang_minutes, start.stop.record_failure)
    undone.callback(watchdog.close)
    draws = ranks.is_main and config.track.figures
    if config.train.stop_after_minutes:
        start.stop.expect_checkpoint(checkpoint_bytes(model, config))
    retry, wait = 60 * config.data.retry_minutes, 60 * config.commit_minutes
    saver = Saver(str(start.checkpoints.folder), ranks, retry, state.step, console.say, wait)
    undone.callback(saver.close)
    return TrainingRun(
        **vars(start),
        engine=engine,
        feed=feed,
        peak_lr=peak_rate(config.optimizer, start.plan.global_batch),
        progress=Progress(state.step, state.step, state.step, list(state.left_out)),
        meter=Meter(ranks, engine.clock, flops, peak),
        host_meter=HostMeter(ranks),
        spikes=SpikePolicy(config.health, ranks, state.losses, state.counts.loss_spikes),
        slow_ranks=SlowRanks(hosts, config.health.straggler_ratio),
        collapses=CollapseReports(),
        counts=RunCounts(state.counts, dataset.storage.retry, ranks),
        watchdog=watchdog,
        tracker=tracker,
        drawing=DrawingProcess(folder, start.draw) if draws and start.draw else None,
        saver=saver,
    )


def _start_tracker(start: StartingPoint, hosts: list[str]) -> Tracker:
    """Begin to record. Rank 0 only."""
    saved = PageFolder(start.folder).saved()
    # A resumed run shows the weights that its first start found.
    origin = start.origin if start.resumed is None else saved.facts.origin if saved else None
    facts = run_facts(start, origin)
    changed = changes_since(start.state, start.identity) if start.resumed is not None else []
    told = hide_passwords("; ".join(str(change) for change in changed if change.fact.means("comparison")))
    # The address of the weights, such as models:/NAME@best, is looked up at the first start only.
    if saved and not facts.parents:
        facts = replace(facts, parents=saved.facts.parents)
    return Tracker(
        start.config.track,
        Path(start.config.out),
        start.folder,
        facts,
        start.state.step,
        find_models=partial(logged_models, start.checkpoints),
        began=Start(time.time(), start.state.step, tuple(sorted(set(hosts))), start.stop.folder.before, told),
    )


# ---------------------------------------------------------------------- what MLflow shows of a run
def run_facts(start: StartingPoint, origin: WeightsOrigin | None) -> RunFacts:
    """The facts of a run whose model is built. origin: of the weights that its first start began with; None for new
    weights, and where it was not recorded.
    """
    config, plan, data, model = start.config, start.plan, start.data, start.model.config
    dataset, split, objective = data.dataset, data.split, objectives.kind(config.train.loss)
    flops = objectives.training_flops(config, model)
    resolved = architecture.as_settings(model)
    defaults = schema.defaults(RunConfig)
    settings = schema.flatten(schema.to_dict(config)) | ({"init.weights": origin.path} if origin else {})
    parameters = {
        **{name: value for name, value in settings.items() if value != defaults.get(name)},
        **resolved,
        "steps": plan.steps,
        "epochs": round(plan.epochs, 3),
        "ranks": plan.world_size,
        "accumulation": plan.accumulation,
        "num_parameters": models.num_parameters(model),
        "gflops_per_image": round(flops / 1e9, 3),
        "exaflops_planned": round(plan.steps * plan.global_batch * flops / 1e18, 6),
        "fingerprint": dataset.fingerprint,
        "samples": len(split),
        "classes": dataset.num_classes,
        "excluded": split.excluded,
    }
    if start.run_probe and start.run_probe.labelled:
        parameters[PROBED_IMAGES] = len(start.run_probe.labelled.test)
    for hidden in ("name", "out", "track.uri", "track.parent_run", "launch.env"):
        parameters.pop(hidden, None)
    tags = {
        "model": str(resolved["model.name"]),
        "data": dataset.fingerprint,
        "dataset": dataset.path.name,
        "device": str(start.ranks.device),
        "torch": torch.__version__,
        "test_copies": _test_copies(dataset, split.name),
        "run_folder_path": str((Path(config.out) / config.name).resolve()),
    }
    if teacher := objective.teacher_file(config):
        file = find_origin(teacher[0], str(teacher[0]))
        tags[TEACHER_TAG] = f"{file.path}, {file.details}"
    parents = {"parent": origin.run_id} if origin and origin.run_id else {}
    what = "Fine-tuning" if config.init.weights else "Pre-training"
    description = [
        f"**{what} of {resolved['model.name']}** at {resolved['model.image_size']} px on **{dataset.path.name}**"
        f" {'and other sets ' * (len(split.parts) > 1)}({counted(len(split), 'image')}"
        f" {of_classes(dataset.num_classes)}, fingerprint `{dataset.fingerprint}`).",
        f"Plan: {plan.describe()}.",
    ]
    if isinstance(split, MixedSplit):
        description.append(f"M{split.describe()[1:]}.")
    if config.init.weights:
        weights = f"`{origin.path}`, {origin.details}" if origin else f"`{config.init.weights}`"
        parent = f"; MLflow run `{parents['parent']}`" if parents else ""
        description.append(f"From the weights in {weights}{parent}.")
    if config.track.parent_run:
        parents["group"] = tags["mlflow.parentRunId"] = config.track.parent_run
    measured = {
        name: metric for of in objectives.metrics(config, dataset.num_classes).values() for name, metric in of.items()
    }
    measured |= {name: replace(metric, group="train") for name, metric in objective.values(config).items()}
    return RunFacts(
        name=config.name,
        kind="finetune" if config.init.weights else "pretrain",
        parameters=parameters,
        tags=tags,
        datasets=tuple(datasets_of(data, start.trained_on)),
        description="\n\n".join(description),
        parents=parents,
        steps=plan.steps,
        images_per_step=plan.global_batch,
        flops_per_image=flops,
        artifacts=("config.yaml", "deepspeed.json", "log.txt", "scores.json", "probe.json"),
        score=config.checkpoint.best or score_of(measured),
        origin=origin,
        objective=config.train.loss,
        metrics=measured,
        model=model.to_dict(),
        checkpoint_folder=config.checkpoint.folder,
    )


def datasets_of(data: RunData, trained_on: Sequence[TrainedSet] = ()) -> Iterator[DatasetFacts]:
    """The data sets that a run trains on, those of a mixture with their shares, then those it is evaluated on."""

    def facts(dataset: Dataset, split: Split, context: str, **notes: str) -> DatasetFacts:
        notes["excluded"] = split.excluded
        path, classes = dataset.path, dataset.num_classes
        return DatasetFacts(path.name, str(path), dataset.fingerprint, split.name, len(split), classes, context, notes)

    split = data.split
    if isinstance(split, MixedSplit):
        for one, share in zip(split.sets, split.shares, strict=True):
            copies = _test_copies(one.dataset, one.split.name)
            found = facts(one.dataset, one.split, "training", test_copies=copies, share=share)
            # Another name, because MLflow shows a data set of the same name and content once.
            yield found if one.entry.labels else replace(found, name=f"{found.name} without labels", num_classes=0)
    else:
        yield facts(data.dataset, split, "training", test_copies=_test_copies(data.dataset, split.name))
    trained = data.not_held_out(trained_on)
    for name, (dataset, part) in data.evaluated.items():
        yield facts(dataset, part, "evaluation", **({TRAINED_BY: trained[name]} if name in trained else {}))


def environment(device: torch.device) -> list[str]:
    """Versions of the system, of torch's libraries and of all packages, and the devices, for environment.txt."""
    lines = [
        f"python {platform.python_version()}",
        f"system {platform.platform()}, {os.cpu_count()} CPUs",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    ]
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        lines.append(f"GPUs of the first host: {', '.join(names)}; NCCL {torch.cuda.nccl.version()}")
    return [*lines, "", *installed_packages()]


def plan_lines(config: RunConfig, plan: Plan, model: Model) -> list[str]:
    """The plan and the predicted memory, for plan.txt."""
    memory = rank_memory(model.config, config, plan.micro_batch, plan.accumulation, plan.world_size)
    images = plan.steps * plan.global_batch
    return [
        plan.describe(),
        *plan.notes(config),
        *objectives.without_effect(config),
        f"{counted(images, 'image')}, {images * objectives.training_flops(config, model.config) / 1e18:.4g} exaFLOPs",
        f"{memory.total / 2**30:.2f} GiB of memory for each rank's tensors at the most, predicted",
        *objectives.describe_groups(config, model.config, plan.steps),
    ]


def _last_scores(folder: Path, facts: RunFacts) -> Iterator[str]:
    """The last value of each score of the held-out images and of the probe, of accuracies with the 95 % interval over
    images.
    """
    last = {name: max(values.items()) for name, values in by_name(read_metrics(folder / METRICS_FILE)[0]).items()}
    for name in [name for name in facts.metrics if name in last]:
        metric, (step, value) = facts.metrics[name], last[name]
        if metric.group not in ("eval", "probe") or not metric.better:
            continue
        own, of_split = f"{name}_effective_images", f"{name.rpartition('_')[0]}_num_samples"
        probed = facts.parameters.get(PROBED_IMAGES, 0) if metric.group == "probe" else 0
        count = next((last[key][1] for key in (own, of_split) if key in last), probed)
        interval = ""
        if metric.is_share and count and 0 <= value <= 1:
            found = of_samples(value, count)
            interval = f" [{100 * found.low:.2f}, {100 * found.high:.2f}]"
        yield f"{name} {metric.text(value)}{interval} at step {step:,}"


def _test_copies(dataset: Dataset, split: str) -> str:
    """Results of launch/dedup.py: test sets, and the number of their copies in this split."""
    try:
        report = read_dedup_report(dataset.path)
    except FileNotFoundError:
        return "not searched"
    except (UserError, OSError, StorageError) as error:
        return f"not known: {on_one_line(error)[:200]}"
    if report.data.fingerprint != dataset.fingerprint:
        return f"{report.in_words()}, searched in data {report.data.fingerprint}"
    other = "" if report.data.is_split(split) else f", searched in {report.data.name}, not in {split}"
    return report.in_words() + other
