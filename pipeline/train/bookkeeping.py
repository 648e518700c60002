"""A run in training: what it consists of, and what the loop does beside the step: loss spikes, logging, saving,
figures.
"""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import DivergedError, UserError
from pipeline.base.files import replacing, write_text
from pipeline.base.metric import Metric
from pipeline.base.progress import duration
from pipeline.base.trained_on import TRAINED_ON, TrainedSet
from pipeline.base.words import counted, si, significant
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import Checkpoints, Counts, State, read_state, step_name, step_of, verify
from pipeline.checkpoint.writer import Commit
from pipeline.cluster.logged_models import logged_models
from pipeline.cluster.status_files import RUN_FOLDER, Ending, write_settings
from pipeline.cluster.stop import Stop
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.order import batches_before, skip_batches
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.retry import Retry
from pipeline.estimate.memory import checkpoint_bytes
from pipeline.evaluate.classify import Predictions, outcomes
from pipeline.evaluate.regression import TargetPredictions
from pipeline.model import Model
from pipeline.monitor.health import Reports, SlowRanks, SpikePolicy
from pipeline.monitor.page_folder import LOG, PAGE, PageFolder, Start
from pipeline.monitor.profile import Meter, peak_flops
from pipeline.monitor.run_page import RunFacts, WeightsOrigin
from pipeline.monitor.tracking import Tracker
from pipeline.monitor.watchdog import Watchdog
from pipeline.objectives.parameters.optimizers import peak_rate
from pipeline.process import waits
from pipeline.process.console import Console, progress_line
from pipeline.process.distributed import Ranks
from pipeline.process.launcher import VARIABLES
from pipeline.process.start import child_environment
from pipeline.settings import schema
from pipeline.train.loop import Feed
from pipeline.train.shown_facts import environment, last_scores, run_facts
from pipeline.train.start import Prepared

if TYPE_CHECKING:  # DeepSpeed is imported late: it takes seconds.
    from pipeline.train.zero.engine import Engine

# At most this many images are kept for the figures, the first ones of the split.
_MAX_IMAGES = 50_000
# Settings by dotted name, data and number of ranks, which identify a run.
Identity = dict[str, Any]


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

    def numbers(self) -> list[float]:
        """This rank's numbers for `gather_on_all_ranks`: new unreadable images, and retries."""
        return [len(self._new), self.retry.retries - self._retries_counted]

    def gather_on_all_ranks(self, numbers: Sequence[Sequence[float]] | None = None) -> None:
        """Add what all ranks counted since the last call: afterwards the counts are the same on every rank.

        numbers: of every rank, where they are known.
        """
        numbers = numbers or self.ranks.gather_numbers({"counts": self.numbers()})["counts"]
        new_images, retries = zip(*numbers, strict=True)
        self.storage_retries += int(sum(retries))
        self._retries_counted += int(retries[self.ranks.rank])
        for unreadable in self.ranks.gather(self._new) if any(new_images) else []:
            for row, reason in unreadable.items():
                self.unreadable.setdefault(row, reason)
        self._new = {}


@dataclass(frozen=True, kw_only=True)
class StartingPoint(Prepared):
    """Where a run begins, once its ranks have met. identity: settings and data, saved with each checkpoint.

    trained_on: by this run, by those whose weights it began with, and by its teacher, as far as recorded. resumed: the
    checkpoint to continue, None without one. damaged: names of damaged checkpoints, which do not count as kept ones.
    state: of the checkpoint. changed: since it, in words, as far as results are not comparable. origin: of the weights
    that a first start begins with. model: not trained yet; the engine loads the checkpoint's tensors.
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
    changed: str
    origin: WeightsOrigin | None
    model: Model

    @property
    def folder(self) -> Path:
        return self.stop.folder.path


class DrawingProcess:
    """Draws the figures of a run at evaluations, in a process of low priority, `python -m MODULE RUN_FOLDER`, and at
    its end, with --final, which waits for the last drawing.

    Rank 0 only. The process reads the run folder, so it needs nothing of this one. Which module draws is up to the
    command that starts the run: reports use the same figures, and their rooms are above this one.
    timeout: seconds that the end of a run waits for the last one.
    """

    def __init__(self, folder: Path, module: str, timeout: float = 60.0) -> None:
        self.folder, self.timeout = folder.resolve(), timeout
        # -P: of this code, whatever the working folder holds; paths in the settings are relative to that folder.
        self.command = (sys.executable, "-P", "-m", module, str(self.folder))
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, predictions: Predictions | TargetPredictions | None, split: Split | None) -> None:
        """Keep the predictions of an evaluation, and draw, unless a drawing is in progress."""
        with contextlib.suppress(OSError):  # A full disk, which the next checkpoint reports.
            if predictions is not None and split is not None:
                self._keep(predictions, split)
            if self._process is None or self._process.poll() is not None:
                self._process = self._start(("nice", "-n", "19", *self.command))

    def end(self, last: bool) -> None:
        """End a drawing in progress. last: draw once more, with the figures that need the weights."""
        self._kill()
        if last:
            # At the priority of the run, which waits for it: at a lower one, other programs of the host would hold up
            # its end.
            with (
                contextlib.suppress(OSError, subprocess.TimeoutExpired),
                waits.waiting("the last figures", self.timeout),
            ):
                self._process = self._start((*self.command, "--final"))
                self._process.wait(self.timeout)
            self._kill()

    def _keep(self, predictions: Predictions | TargetPredictions, split: Split) -> None:
        num = min(len(split), _MAX_IMAGES)
        arrays = {"rows": np.arange(num)}
        if isinstance(predictions, TargetPredictions):
            values = np.where(predictions.readable[:, None], predictions.values, np.nan)
            arrays |= {"targets": predictions.targets, "values": values}
        else:
            true, predicted = outcomes(predictions, split)
            arrays |= {"true": true, "predicted": predicted, "of_label": predictions.of_label}
            arrays["probability"] = predictions.probabilities[:, 0]
        if split.groups is not None:
            arrays["groups"] = split.groups
        (self.folder / PAGE).mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / PAGE / "predictions.npz") as file:
            np.savez_compressed(file, allow_pickle=False, **{name: array[:num] for name, array in arrays.items()})

    def _start(self, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        # It is not a rank.
        environment = {name: value for name, value in child_environment().items() if name not in VARIABLES}
        with open(self.folder / PAGE / LOG, "ab") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # No-op once it has ended.
            self._process.wait()


class TrainingRun(StartingPoint):
    """Everything that the training loop uses; made by `set_up`. tracker, drawing: rank 0 only. head_metrics: of a head
    that this start fitted (`fit_head_on_all_ranks`), else empty.
    """

    def __init__(
        self,
        start: StartingPoint,
        engine: "Engine",
        feed: Feed,
        head_metrics: dict[str, float],
        undone: contextlib.ExitStack,
    ) -> None:
        """Begin what measures the run and what saves it. Collective. undone: ends threads and processes if set-up
        fails.
        """
        from pipeline.train.evaluators import evaluators_of  # Late: it imports this module.

        super().__init__(**vars(start))
        self.engine, self.feed, self.head_metrics = engine, feed, head_metrics
        config, ranks, console, stop, state = self.config, self.ranks, self.console, self.stop, self.state
        dataset, model = self.data.dataset, self.model.config
        peak, peak_source = peak_flops(ranks.device, engine.dtype, config.engine.peak_tflops)
        flops: int = ranks.on_main(objectives.training_flops, config, model)
        learned = counted(dataset.num_classes, "class") if dataset.classes else "no labels"
        if config.data.targets:
            learned = f"numbers to predict: {', '.join(config.data.targets)}"
        speed = f"; {si(peak, 'FLOP/s')} a device ({peak_source})" if peak else ""
        console.say(
            f"{significant(models.num_parameters(model) / 1e6)} M parameters, {si(flops, 'FLOP')} to train on an image;"
            f" {learned}, data {dataset.fingerprint}{speed}"
        )
        hosts = ranks.gather(socket.gethostname())
        # Also for a finished run: sends the metrics that MLflow has not received yet.
        self.tracker = tracker = self._start_tracker(hosts) if ranks.is_main else None
        if tracker:
            stop.show_end = lambda how, reason: tracker.finish(
                "FAILED", in_a_hurry=True, outcome=f"{how} before training began: {reason}"
            )
            console.say(*tracker.notes)
        # After the metrics of steps that run again are gone, and before its settings are there: a kill must leave no
        # word of a last start that had finished, beside settings by which there is more to train.
        stop.committed(state.step)
        if tracker:
            write_settings(config, self.folder)
            write_text(self.folder / "deepspeed.json", json.dumps(engine.settings, indent=1))
            PageFolder(self.folder).write_text("environment.txt", environment(ranks.device))
        hang = self.folder / "hang"
        self.watchdog = Watchdog(hang, ranks.rank, hosts, config.health.hang_minutes, stop.record_failure)
        undone.callback(self.watchdog.close)
        if config.train.stop_after_minutes:
            stop.expect_checkpoint(checkpoint_bytes(model, config))
        retry, wait = 60 * config.data.retry_minutes, 60 * config.commit_minutes
        self.saver = Saver(str(self.checkpoints.folder), ranks, retry, state.step, console.say, wait)
        undone.callback(self.saver.close)
        self.peak_lr = peak_rate(config.optimizer, self.plan.global_batch)
        self.progress = Progress(state.step, state.step, state.step, list(state.left_out))
        self.meter = Meter(ranks, engine.clock, flops, peak)
        self.spikes = SpikePolicy(config.health, ranks, state.losses, state.counts.loss_spikes)
        self.slow_ranks = SlowRanks(hosts, config.health.straggler_ratio)
        self.collapses, self.worse = Reports("collapse"), Reports("loss of features")
        self.counts = RunCounts(state.counts, dataset.storage.retry, ranks)
        draws = ranks.is_main and config.track.figures and self.draw
        self.drawing = DrawingProcess(self.folder, draws) if draws else None
        self.evaluators = evaluators_of(self)

    def _start_tracker(self, hosts: list[str]) -> Tracker:
        """Begin to record. Rank 0 only."""
        saved = PageFolder(self.folder).saved()
        # A resumed run shows the weights that its first start found.
        origin = self.origin if self.resumed is None else saved.facts.origin if saved else None
        facts = run_facts(self, origin)
        # The address of the weights, such as runs:/ID, is looked up at the first start only.
        if saved and not facts.parents:
            facts = replace(facts, parents=saved.facts.parents)
        step = self.state.step
        return Tracker(
            self.config.track,
            Path(self.config.out),
            self.folder,
            facts,
            step,
            find_models=partial(logged_models, self.checkpoints),
            began=Start(time.time(), step, tuple(sorted(set(hosts))), self.stop.folder.before, self.changed),
        )

    # ------------------------------------------------------------------ around the step
    def record_step(self, micro_batches: Sequence[Batch], loss: Tensor) -> None:
        """Record a completed step. loss: this rank's mean, on the device. Does not synchronise with the device."""
        self.spikes.add(self.progress.step, loss)
        self.counts.add(micro_batches, self.feed.loader.bad)
        self.meter.step(self.plan.global_batch)
        self.console.advance()
        self.saver.check_writer()
        if self.progress.step == self.progress.start + 1:  # The optimizer has its states now.
            self.saver.reserve(self.engine.part())

    def rolled_back_after_spikes_on_all_ranks(self) -> bool:
        """Report loss spikes since the last call and apply health.on_spike. Returns whether the run was rolled back.

        "warn" continues; "rollback" loads the newest checkpoint before the spike and skips the batches that led to it.
        Raises DivergedError when the budget of skipped steps or rollbacks is
        exceeded.
        """
        config, console, progress = self.config, self.console, self.progress
        engine, spikes, tracker = self.engine, self.spikes, self.tracker
        lines, roll_back_before = spikes.react()
        console.say(*lines)
        if engine.skipped_steps > config.train.max_skipped_steps:
            raise DivergedError(
                f"{counted(engine.skipped_steps, 'step')} skipped by step {progress.step:,}, for a non-finite gradient,"
                f" more than train.max_skipped_steps = {config.train.max_skipped_steps}. Lower"
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
        if tracker:
            console.say(*tracker.go_back(state.step))
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
                ranks.on_main(checkpoints.remove_after, step_of(path))
                self.engine.load(ShardedTensors.open(path), state.engine)
                self.console.say(f"back to {path}, continuing with the data after the spike")
                return state
        self.console.say("no checkpoint before the spike to roll back to: continuing")
        return None

    # ------------------------------------------------------------------ log, save
    def log_on_all_ranks(
        self, loss: Tensor, values: dict[str, Tensor], grad_norm: float, lr: float, record: bool, line: bool
    ) -> None:
        """Write a record of metrics, a line of the log, or both. Raises UserError for a failed save or too many
        unreadable samples.
        """
        plan, ranks, counts, progress = self.plan, self.ranks, self.counts, self.progress
        engine, loader, saver, meter = self.engine, self.feed.loader, self.saver, self.meter
        own = {
            "losses": [float(loss), *map(float, values.values())],
            "counts": counts.numbers(),
            "saves": saver.numbers(),
            "line": meter.read("line") if line else [],
            "record": meter.read("record") if record else [],
        }
        numbers = ranks.gather_numbers(own)  # The only collective call, unless one has news.
        counts.gather_on_all_ranks(numbers["counts"])
        num_bad = len(counts.unreadable)
        batches_seen = batches_before(progress.step, progress.skipped_batches)
        mean_loss, *means = (sum(of_ranks) / ranks.world_size for of_ranks in zip(*numbers["losses"], strict=True))
        logged = dict(zip(values, means, strict=True))
        metrics = {
            "loss": mean_loss,
            **logged,
            "lr": lr,
            "grad_norm": grad_norm,
            "epoch": self.feed.epochs(batches_seen),
            "skipped_steps": engine.skipped_steps,
            "loss_spikes": self.spikes.num_spikes,
            "bad_samples": num_bad,
            "storage_retries": counts.storage_retries,
        }
        lines = []
        if line:
            speed = meter.rates(numbers["line"])
            declared = engine.objective.values(self.config)
            shown = {name: declared.get(name, Metric()).text(value) for name, value in logged.items()}
            lines.append(progress_line(progress.step, plan.steps, metrics | speed, plan.global_batch, shown))
            if progress.step > progress.start + 1:  # Whose first step is slower for reasons of its own.
                lines += self.slow_ranks.changed(meter.own_seconds(numbers["line"]))
        if record:
            metrics |= meter.rates(numbers["record"]) | saver.metrics(numbers["saves"])
            collapse = engine.objective.collapse({"loss": metrics["loss"], **logged})
            if collapse:
                metrics["collapse"] = 1
            lines += self.collapses.changed("loss", progress.step, collapse)
            if self.tracker:
                self.tracker.log(progress.step, metrics)
        self.console.say(*lines)
        saver.check(numbers["saves"])
        self.stop.committed(saver.committed_step, saver.longest)
        # The limit is for all ranks and starts together; each loader knows only its own.
        if num_bad > loader.max_bad and (excess := loader.budget.excess_of_any_set(counts.unreadable, loader.split)):
            raise UserError(excess)

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
        console.say(*lines)
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
        engine, spikes, counts = self.engine, self.spikes, self.counts
        model = engine.objective.backbone.config
        trained_on = [asdict(one) for one in self.trained_on]
        state = {
            "step": progress.step,
            "engine": asdict(engine.counters()),
            "model": model.to_dict(),
            "identity": self.identity | {RUN_FOLDER: str(Path(config.out, config.name).resolve())},
            "losses": list(spikes.scores.recent),
            "left_out": progress.skipped_batches,
            "counts": asdict(Counts(spikes.num_spikes, counts.storage_retries, sorted(counts.unreadable.items()))),
            TRAINED_ON: trained_on,
        }
        preprocessing = {"image_size": min(config.model.image_size), **schema.to_dict(config.augment)}
        extra = {
            **({} if engine.objective.predicts == "targets" else {"classes": dataset.classes}),
            "preprocessing": preprocessing,
            "loss": engine.objective.loss_kind or config.train.loss,
            TRAINED_ON: trained_on,
            "run": config.name,
            "step": progress.step,
        }
        if "classes" in extra and dataset.class_names != dataset.classes:
            extra["class_names"] = dataset.class_names
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
            is_new = self.progress.step > self.progress.start or bool(self.head_metrics)
            self.drawing.end(last=is_finished and is_new)
        waits.say_with(None)  # The console was this run's.

    def show_end(self, how: Ending, reason: str) -> None:
        """Show on the run's page how this start ended."""
        if (tracker := self.tracker) is None:
            return
        step = self.progress.step
        status, outcome = "FAILED", f"{how} after step {step:,}: {reason}"
        if how == "finished":
            status, outcome = "FINISHED", how
        elif how == "stopped":
            status, outcome = "KILLED", f"stopped by {reason} at step {step:,}; the same command resumes it"
        told = self._result(tracker.facts, status, outcome)
        tracker.finish(status, how != "finished", outcome, told, self.collapses.first)

    def _result(self, facts: RunFacts, status: str, outcome: str) -> str:
        """Markdown for the end of the description: what was measured, and what a reviewer should know of it."""
        plan, step, meter, bad = self.plan, self.progress.step, self.meter, self.counts.unreadable
        planned, done = (si(1e18 * facts.axes(n).get("exaflops", 0.0), "FLOP") for n in (plan.steps, step))
        table = (
            "| | planned | done |\n|---|---|---|\n"
            f"| steps | {plan.steps:,} | {step:,} |\n"
            f"| images | {plan.steps * plan.global_batch:,} | {step * plan.global_batch:,} |\n"
            f"| arithmetic | {planned} | {done} |"
        )
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
        found = "; ".join([outcome, *last_scores(self.folder, facts)])
        lines = [f"**Result**, with 95 % intervals: {found}. {warned}{until}.", table]
        if meter.total_seconds:
            lines.append(
                f"{significant(meter.average)} images/s over {duration(meter.total_seconds)} of training since the last"
                " start."
            )
        return "\n\n".join(lines)
