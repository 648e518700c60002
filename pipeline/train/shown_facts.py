"""What MLflow and the page of a run show of it: facts, data sets, environment, plan, last scores."""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline import model as models
from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.base.metric import probed_data, score_of
from pipeline.base.trained_on import TRAINED_BY, TrainedSet
from pipeline.base.words import counted, of_classes, on_one_line
from pipeline.data.dataset.dedup_report import read_dedup_report
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import Split
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MixedSplit
from pipeline.data.storage.retry import StorageError
from pipeline.evaluate import architecture
from pipeline.evaluate.intervals import of_samples
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
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

if TYPE_CHECKING:
    from pipeline.train.bookkeeping import StartingPoint


# Settings that are no parameters in MLflow: they do not change what is learnt.
_HIDDEN = ("name", "out", "track.uri", "track.parent_run")


def run_facts(start: "StartingPoint", origin: WeightsOrigin | None) -> RunFacts:
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
        **{name: settings[name] for name in settings if settings[name] != defaults.get(name) and name not in _HIDDEN},
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
    if start.run_probe:
        parameters |= {f"{PROBED_IMAGES}_{one.name}": len(one.test) for one in start.run_probe.labelled}
    tags = {
        "model": str(resolved["model.name"]),
        "data": dataset.fingerprint,
        "dataset": dataset.path.name,
        "device": str(start.ranks.device),
        "torch": torch.__version__,
        "test_copies": _test_copies(dataset, split.name),
        "run_folder_path": str((Path(config.out) / config.name).resolve()),
    }
    if teacher := objective.published(config):
        file = find_origin(teacher.file, str(teacher.file))
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
        if context == "training":
            notes = {"test_copies": _test_copies(dataset, split.name), **notes}
        notes["excluded"] = split.excluded
        path, classes = dataset.path, dataset.num_classes
        return DatasetFacts(path.name, str(path), dataset.fingerprint, split.name, len(split), classes, context, notes)

    split = data.split
    if isinstance(split, MixedSplit):
        for one, share in zip(split.sets, split.shares, strict=True):
            found = facts(one.dataset, one.split, "training", share=share)
            # Another name, because MLflow shows a data set of the same name and content once.
            yield found if one.entry.labels else replace(found, name=f"{found.name} without labels", num_classes=0)
    else:
        yield facts(data.dataset, split, "training")
    trained = data.not_held_out(trained_on)
    for name, part in data.evaluated.items():
        yield facts(data.own, part, "evaluation", **({TRAINED_BY: trained[name]} if name in trained else {}))


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


def last_scores(folder: Path, facts: RunFacts) -> Iterator[str]:
    """The last value of each score of the held-out images and of the probe, of accuracies with the 95 % interval over
    images.
    """
    last = {name: max(values.items()) for name, values in by_name(read_metrics(folder / METRICS_FILE)[0]).items()}
    for name in [name for name in facts.metrics if name in last]:
        metric, (step, value) = facts.metrics[name], last[name]
        if metric.group not in ("eval", "probe") or not metric.better:
            continue
        own, of_split = f"{name}_effective_images", f"{name.rpartition('_')[0]}_num_samples"
        probed = facts.parameters.get(f"{PROBED_IMAGES}_{probed_data(name)}", 0)
        count = next((last[key][1] for key in (own, of_split) if key in last), probed)
        interval = ""
        ends = [last[key][1] for end in ("low", "high") if (key := f"{name}_{end}") in last]
        if ends and math.isfinite(ends[0]):
            interval = metric.interval_text(*ends)
        elif metric.is_share and count and 0 <= value <= 1:
            found = of_samples(value, count)
            interval = metric.interval_text(found.low, found.high)
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
