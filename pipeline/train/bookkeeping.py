"""The state of a run during training, what the loop does beside the step (loss spikes, logging, saving), and what
MLflow shows of the run.
"""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline import model as models
from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import DivergedError, UserError
from pipeline.base.metric import Metric, score_of
from pipeline.base.trained_on import TRAINED_BY, TRAINED_ON, TrainedSet
from pipeline.base.words import counted, of_classes, on_one_line
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import Checkpoints, Counts, State, read_state, step_name, step_of, verify
from pipeline.checkpoint.writer import Commit, Retention
from pipeline.cluster.status_files import RUN_FOLDER, Ending
from pipeline.cluster.stop import Stop
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.order import batches_before, skip_batches
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MixedSplit
from pipeline.data.storage.bucket import AnyPath
from pipeline.data.storage.retry import Retry, StorageError
from pipeline.estimate.memory import rank_memory
from pipeline.estimate.plan import Plan
from pipeline.evaluate import architecture
from pipeline.evaluate.intervals import of_samples
from pipeline.model import Model
from pipeline.monitor.health import CollapseReports, SlowRanks, SpikePolicy
from pipeline.monitor.metrics_file import METRICS_FILE, by_name, read_metrics
from pipeline.monitor.origin import find_origin
from pipeline.monitor.profile import Meter
from pipeline.monitor.run_page import (
    PROBED_IMAGES,
    TEACHER_TAG,
    DatasetFacts,
    RunFacts,
    WeightsOrigin,
    installed_packages,
)
from pipeline.monitor.system import HostMeter
from pipeline.monitor.tracking import Tracker
from pipeline.monitor.watchdog import Watchdog
from pipeline.process import waits
from pipeline.process.console import Console, progress_line
from pipeline.process.distributed import Ranks
from pipeline.settings import changes, schema
from pipeline.settings.run import RunConfig
from pipeline.train.drawing import DrawingProcess
from pipeline.train.loop import Feed
from pipeline.train.start import Prepared

if TYPE_CHECKING:  # Importing DeepSpeed takes seconds, and `training_step` is also used without it.
    from pipeline.train.evaluators import Evaluator
    from pipeline.train.zero.engine import Engine


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
    identity: dict[str, Any]
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
    """Everything that the training loop uses; made by `setup.set_up`. tracker, drawing: rank 0 only."""

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
                state = go_back_on_all_ranks(self.checkpoints, engine, roll_back_before, self.ranks, console)
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
        commit = self._commit(Retention(self.config.checkpoint.keep, sorted(self.damaged), keep))
        with self.engine.clock.host("checkpoint"):
            self.saver.save(step, self.engine.part(), commit)
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

    def _commit(self, retention: Retention) -> Commit | None:
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
        return Commit(state, engine.shapes, models.safetensors_metadata(model, extra), retention)

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


def go_back_on_all_ranks(
    checkpoints: Checkpoints, engine: "Engine", spike: int, ranks: Ranks, console: Console
) -> State | None:
    """Load the newest intact checkpoint before step `spike` and remove later ones. Returns its state, or None.

    No save may be in flight.
    """
    for path in ranks.on_main(checkpoints.candidates):
        if step_of(path) >= spike:
            continue
        if not any(ranks.gather(verify(path, ranks.rank, ranks.world_size))):
            state = read_state(path)
            # From here on, a killed run must not resume from a checkpoint after the spike.
            ranks.on_main(partial(checkpoints.remove_after, step_of(path)))
            engine.load(ShardedTensors.open(path), state.engine)
            console.say(f"back to {path}, continuing with the data after the spike")
            return state
    console.say("no checkpoint before the spike to roll back to: continuing")
    return None


# ---------------------------------------------------------------------- what MLflow shows of a run
def run_facts(start: StartingPoint, origin: WeightsOrigin | None) -> RunFacts:
    """The facts of a run whose model is built. origin: of the weights that its first start began with; None for new
    weights, and where it was not recorded.
    """
    config, plan, data, model = start.config, start.plan, start.data, start.model.config
    dataset, split, objective = data.dataset, data.split, objectives.kind(config.train.loss)
    flops = objectives.training_flops(config, model)
    resolved = architecture.as_settings(model)
    defaults = changes.defaults(RunConfig)
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
        for one, part, share, entry in zip(split.datasets, split.parts, split.shares, split.mixture.sets, strict=True):
            found = facts(one, part, "training", test_copies=_test_copies(one, part.name), share=share)
            # Another name, because MLflow shows a data set of the same name and content once.
            yield found if entry.labels else replace(found, name=f"{found.name} without labels", num_classes=0)
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
