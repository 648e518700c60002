"""What MLflow shows of a training run: parameters, data sets, the run that its weights come from, a description."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline import model as models
from pipeline import objectives
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.metric import score_of
from pipeline.base.trained_on import TRAINED_BY, TrainedSet
from pipeline.base.words import counted, of_classes, on_one_line
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import Split
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MixedSplit
from pipeline.data.storage.retry import StorageError
from pipeline.estimate.memory import rank_memory
from pipeline.estimate.plan import Plan
from pipeline.evaluate import architecture
from pipeline.evaluate.intervals import of_samples
from pipeline.evaluate.probes.probe import RunProbe
from pipeline.model import Model
from pipeline.monitor.metrics_file import METRICS_FILE, by_name, read_metrics
from pipeline.monitor.origin import find_origin
from pipeline.monitor.run_page import (
    PROBED_IMAGES,
    TEACHER_TAG,
    DatasetFacts,
    RunFacts,
    WeightsOrigin,
    installed_packages,
)
from pipeline.settings import changes, schema
from pipeline.settings.run import RunConfig

if TYPE_CHECKING:  # It calls `result`.
    from pipeline.train.bookkeeping import TrainingRun

# Files of the run folder that MLflow shows.
ARTIFACTS = (
    "config.yaml",
    "deepspeed.json",
    "log.txt",
    "scores.json",
    "probe.json",
)


def run_facts(
    config: RunConfig,
    plan: Plan,
    model: Model,
    data: RunData,
    device: torch.device,
    origin: WeightsOrigin | None,
    probe: RunProbe | None = None,
    trained_on: Sequence[TrainedSet] = (),
) -> RunFacts:
    """The facts of a run whose model is built. origin: None for new weights, and where it was not recorded. trained_on:
    see `RunContext`.
    """
    dataset, split = data.dataset, data.split
    flops = objectives.training_flops(config, model.config)
    exaflops = plan.steps * plan.global_batch * flops / 1e18
    kind = "finetune" if config.init.weights else "pretrain"
    resolved = architecture.as_settings(model.config)
    settings = schema.flatten(schema.to_dict(config))
    defaults = changes.defaults(RunConfig)
    parameters = {
        **{name: value for name, value in settings.items() if value != defaults.get(name)},
        **resolved,
        "steps": plan.steps,
        "epochs": round(plan.epochs, 3),
        "ranks": plan.world_size,
        "accumulation": plan.accumulation,
        "num_parameters": models.num_parameters(model.config),
        "gflops_per_image": round(flops / 1e9, 3),
        "exaflops_planned": round(exaflops, 6),
        "fingerprint": dataset.fingerprint,
        "samples": len(split),
        "classes": dataset.num_classes,
        "excluded": split.excluded,
    }
    if probe and probe.labelled:
        parameters[PROBED_IMAGES] = len(probe.labelled.test)
    for hidden in ("name", "out", "track.uri", "track.parent_run", "launch.env"):
        parameters.pop(hidden, None)
    name = dataset.path.name
    parent = origin.run_id if origin else None
    copies = _test_copies(dataset, split.name)
    tags = {
        "model": str(resolved["model.name"]),
        "data": dataset.fingerprint,
        "dataset": name,
        "device": str(device),
        "torch": torch.__version__,
        "test_copies": copies,
        "run_folder_path": str((Path(config.out) / config.name).resolve()),
    }
    if teacher := objectives.kind(config.train.loss).teacher_file(config):
        file = find_origin(teacher[0], str(teacher[0]))
        tags[TEACHER_TAG] = f"{file.path}, {file.details}"
    parents = {"parent": parent} if parent else {}
    if config.track.parent_run:
        parents["group"] = tags["mlflow.parentRunId"] = config.track.parent_run
    of_steps = objectives.kind(config.train.loss).values(config)
    measured = {
        name: metric for of in objectives.metrics(config, dataset.num_classes).values() for name, metric in of.items()
    }
    measured |= {name: replace(metric, group="train") for name, metric in of_steps.items()}
    return RunFacts(
        name=config.name,
        kind=kind,
        parameters=parameters,
        tags=tags,
        datasets=tuple(datasets_of(data, trained_on)),
        description=_description(config, plan, resolved, dataset, split, parent, origin),
        parents=parents,
        steps=plan.steps,
        images_per_step=plan.global_batch,
        flops_per_image=flops,
        artifacts=ARTIFACTS,
        score=config.checkpoint.best or score_of(measured),
        origin=origin,
        objective=config.train.loss,
        metrics=measured,
        model=model.config.to_dict(),
        checkpoint_folder=config.checkpoint.folder,
    )


def datasets_of(data: RunData, trained_on: Sequence[TrainedSet] = ()) -> list[DatasetFacts]:
    """The data that a run trains on, then the data it is evaluated on."""
    trained = data.not_held_out(trained_on)
    evaluated = [
        _data_facts(dataset, split, "evaluation", {TRAINED_BY: trained[name]} if name in trained else {})
        for name, (dataset, split) in data.evaluated.items()
    ]
    return [*_training_data(data.dataset, data.split), *evaluated]


def _training_data(dataset: Dataset, split: Split) -> Iterator[DatasetFacts]:
    """The data set of a run, or those of its mixture with their shares."""
    if not isinstance(split, MixedSplit):
        yield _data_facts(dataset, split, "training", {"test_copies": _test_copies(dataset, split.name)})
        return
    for one, part, share, entry in zip(split.datasets, split.parts, split.shares, split.mixture.sets, strict=True):
        facts = _data_facts(one, part, "training", {"test_copies": _test_copies(one, part.name), "share": share})
        # Another name, because MLflow shows a data set of the same name and content once.
        yield facts if entry.labels else replace(facts, name=f"{facts.name} without labels", num_classes=0)


def _data_facts(dataset: Dataset, split: Split, context: str, notes: dict[str, str]) -> DatasetFacts:
    notes = {**notes, "excluded": split.excluded}
    return DatasetFacts(
        dataset.path.name,
        str(dataset.path),
        dataset.fingerprint,
        split.name,
        len(split),
        dataset.num_classes,
        context,
        notes,
    )


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


def _description(
    config: RunConfig,
    plan: Plan,
    resolved: dict[str, Any],
    dataset: Dataset,
    split: Split,
    parent: str | None,
    origin: WeightsOrigin | None,
) -> str:
    """Markdown: what is trained, on what, from what."""
    what = "Fine-tuning" if config.init.weights else "Pre-training"
    lines = [
        (
            f"**{what} of {resolved['model.name']}** at {resolved['model.image_size']} px on **{dataset.path.name}**"
            f" {'and other sets ' * (len(split.parts) > 1)}({counted(len(split), 'image')}"
            f" {of_classes(dataset.num_classes)}, fingerprint `{dataset.fingerprint}`)."
        ),
        f"Plan: {plan.describe()}.",
    ]
    if isinstance(split, MixedSplit):
        lines.append(f"M{split.describe()[1:]}.")
    if config.init.weights:
        weights = f"`{origin.path}`, {origin.details}" if origin else f"`{config.init.weights}`"
        lines.append(f"From the weights in {weights}" + (f"; MLflow run `{parent}`." if parent else "."))
    return "\n\n".join(lines)


def result(run: "TrainingRun", facts: RunFacts, status: str, outcome: str) -> str:
    """Markdown for the end of the description: what was measured, and what a reviewer should know of it. Arguments: see
    `TrainingRun.close`.
    """
    plan, step, meter, counted_by_ranks = (
        run.plan,
        run.progress.step,
        run.meter,
        run.counts,
    )
    planned, done = (facts.axes(count).get("exaflops", 0.0) for count in (plan.steps, step))
    rows = [
        ("steps", f"{plan.steps:,}", f"{step:,}"),
        ("images", f"{plan.steps * plan.global_batch:,}", f"{step * plan.global_batch:,}"),
        ("exaFLOPs", f"{planned:.4g}", f"{done:.4g}"),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [("", "planned", "done"), ("---",) * 3, *rows])
    # A rank that failed cannot ask the others: it knows of its own images, and what they counted at the last log line.
    is_known = status != "FAILED"
    unreadable = counted_by_ranks.unreadable if is_known else counted_by_ranks.unreadable | run.feed.loader.bad
    counts = {
        "steps skipped": run.engine.skipped_steps,
        "loss spikes": run.spikes.num_spikes,
        "rollbacks": len(run.progress.skipped_batches),
        "unreadable images": len(unreadable),
        "storage retries": counted_by_ranks.storage_retries,
    }
    warnings = [f"{count:,} {what}" for what, count in counts.items() if count]
    warnings += [run.collapses.first.rstrip(".")] * bool(run.collapses.first)
    until = "" if is_known else ", up to the last log line"
    warned = (
        f"Warnings: {', '.join(warnings)}{until}." if warnings else f"No step was skipped, no image unreadable{until}."
    )
    lines = [f"**Result**: {'; '.join([outcome, *_last_scores(run.folder, facts)])}. {warned}", table]
    if meter.total_seconds:
        lines.append(
            f"{meter.average:,.1f} images/s over {meter.total_seconds:,.0f} s of training since the last start."
        )
    return "\n\n".join(lines)


def caveats(run: "TrainingRun") -> str:
    """Warnings about a finished run: most steps were skipped, or its score may be chance; "" without any."""
    skipped, step, num_classes = (
        run.engine.skipped_steps,
        run.progress.step,
        run.data.dataset.num_classes,
    )
    told = []
    if 2 * skipped > step:
        told.append(
            f"{skipped:,} of {counted(step, 'step')} were skipped, for a non-finite gradient or a loss that jumped:"
            " lower optimizer.lr, use a longer schedule.warmup or engine.precision=fp32"
        )
    scores = json_record.read_or_none(run.folder / "scores.json", dict[str, Any]) or {}
    count, top1 = scores.get("top1_effective_images") or scores.get("num_samples"), scores.get("top1")
    if top1 is not None and count and scores.get("step") == step and of_samples(top1, count).low <= 1 / num_classes < 1:
        told.append(
            f"top-1 {top1:.2%} cannot be told from chance, {1 / num_classes:.2%} of {counted(num_classes, 'class')}"
        )
    return "; ".join(told)


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
