"""What MLflow shows of a training run: parameters, data sets, the run that its weights come from, a description."""

from pathlib import Path
from typing import Any

import torch

from pipeline import model as models
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.dataset.split import Split
from pipeline.data.storage.bucket import to_path
from pipeline.estimate.plan import Plan
from pipeline.evaluate import architecture
from pipeline.model import Model
from pipeline.monitor.run_page import DatasetFacts, RunFacts
from pipeline.monitor.sync_state import run_id_of
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.train.resume import default_settings

# Files of the run folder that MLflow shows.
ARTIFACTS = ("config.yaml", "deepspeed.json", "model.json", "log.txt", "scores.json", "probe.json", "trace.json")


def run_facts(
    config: RunConfig, plan: Plan, model: Model, dataset: Dataset, split: Split, evaluation: Split, device: torch.device
) -> RunFacts:
    """The facts of a run whose model is built and whose data is open."""
    flops = models.training_flops_per_image(model.config)
    exaflops = plan.steps * plan.global_batch * flops / 1e18
    kind = "finetune" if config.init.weights else "pretrain"
    resolved = architecture.as_settings(model.config)
    settings = schema.flatten(schema.to_dict(config))
    defaults = default_settings()
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
    for hidden in ("name", "out", "track.uri", "track.parent_run", "launch.env"):
        parameters.pop(hidden, None)
    name = dataset.path.name
    parent = _parent(config.init.weights)
    tags = {
        "model": str(resolved["model.name"]), "data": dataset.fingerprint, "dataset": name, "device": str(device),
        "torch": torch.__version__, "run_folder_path": str((Path(config.out) / config.name).resolve()),
    }  # fmt: skip
    parents = {"parent": parent} if parent else {}
    if config.track.parent_run:
        parents["grid"] = tags["mlflow.parentRunId"] = config.track.parent_run
    datasets = [
        DatasetFacts(name, str(dataset.path), dataset.fingerprint, s.name, len(s), dataset.num_classes, context)
        for s, context in ((split, "training"), (evaluation, "evaluation"))
    ]
    return RunFacts(
        config.name, kind, parameters, tags, tuple(datasets), _description(config, plan, resolved, dataset, split, parent),
        parents, plan.steps, plan.global_batch, flops, ARTIFACTS,
        config.checkpoint.best or f"{config.data.evaluated_split}_top1",
    )  # fmt: skip


def _parent(weights: str | None) -> str | None:
    """ID of the MLflow run of the run folder that weights come from; None for other weights, or a run that was not tracked."""
    if not weights or not isinstance(path := to_path(weights), Path):
        return None
    folders = [folder for folder in (path, *path.parents[:3]) if (folder / "config.json").is_file()]
    return run_id_of(folders[0]) if folders else None


def _description(
    config: RunConfig, plan: Plan, resolved: dict[str, Any], dataset: Dataset, split: Split, parent: str | None
) -> str:
    """Markdown: what is trained, on what, from what."""
    what = "Fine-tuning" if config.init.weights else "Pre-training"
    lines = [
        f"**{what} of {resolved['model.name']}** at {resolved['model.image_size']} px on **{dataset.path.name}** "
        f"({len(split):,} images of {dataset.num_classes:,} classes, fingerprint `{dataset.fingerprint}`).",
        f"Plan: {plan.describe()}.",
    ]
    if config.init.weights:
        lines.append(f"From the weights in `{config.init.weights}`" + (f", MLflow run `{parent}`." if parent else "."))
    return "\n\n".join(lines)
