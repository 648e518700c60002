"""Run folders as training leaves them, if asked also in an MLflow store."""

import dataclasses
import json
from pathlib import Path

from pipeline import model as models
from pipeline.base.metric import Metric
from pipeline.cluster.status_files import write_settings
from pipeline.evaluate import architecture
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.run_page import DatasetFacts, RunFacts, WeightsOrigin, source_tags
from pipeline.monitor.tracking import Tracker
from pipeline.settings import schema
from pipeline.settings.run import RunConfig, TrackConfig

MODEL = models.configure("ViT-Ti/16", 32, 4, width=32, depth=2, mlp_width=64, num_heads=2)
TEST = DatasetFacts("digits", "datasets/digits", "863e11667db2eff9", "test", 400, 10, "evaluation")


def write_run(
    folder: Path,
    *settings: str,
    evaluations: dict[int, float] | None = None,
    steps: int = 20,
    every: int = 1,
    num_samples: int = 400,
    digest: str = TEST.digest,
    model: models.Config = MODEL,
    tracked: bool = False,
    train_split: str = "train",
    origin: WeightsOrigin | None = None,
    declared: dict[str, Metric] | None = None,
    beside: tuple[DatasetFacts, ...] = (),
) -> Path:
    """A finished run: a loss of 1 / step at every `every`-th step, and top-1 by step. tracked: also in
    <parent>/mlflow.db.

    beside: other sets of its mixture. declared: an objective's metrics, which are there in place of top-1: of a step
    the step, of an evaluation its value.
    """
    overrides = [
        f"name={folder.name}",
        f"out={folder.parent}",
        "data.path=datasets/digits",
        "data.eval_split=test",
        f"train.length={steps} steps",
        "train.global_batch=16",
    ]
    names = "model.name=ViT-Ti/16" if not any(s.startswith(("init.", "model.name")) for s in settings) else None
    config = schema.load(RunConfig, None, [*overrides, *([names] if names else []), *settings])
    folder.mkdir(parents=True)
    write_settings(config, folder)
    (folder / "status.json").write_text(json.dumps({"status": "finished", "step": steps, "code": 0, "reason": ""}))
    facts = RunFacts(
        folder.name,
        "finetune" if config.init.weights else "pretrain",
        {"ranks": 2, "steps": steps, "samples": 1000, "excluded": "none", "seed": config.seed}
        | architecture.as_settings(model),
        {"model": "ViT-32x2h2m64/16", "device": "cpu", "torch": "2.13.0", **source_tags()},
        tuple(
            dataclasses.replace(TEST, digest=digest, split=split, num_samples=count, context=context)
            for split, count, context in ((train_split, 1000, "training"), ("test", num_samples, "evaluation"))
        )
        + beside,
        "A run.",
        {"parent": origin.run_id} if origin else {},
        steps,
        config.train.global_batch,
        float(models.training_flops_per_image(model)),
        artifacts=("config.yaml",),
        score="test_top1",
        origin=origin,
        metrics=declared or {},
        checkpoint_folder=config.checkpoint.folder,
    )
    track = TrackConfig(enabled=tracked)
    timing = ExportTiming(poll=0.05, retry=(0.05,), finish=300)
    tracker = Tracker(track, folder.parent, folder, facts, None, timing)
    for step in range(every, steps + 1, every):
        speed = {"images_per_second": 100.0 + step, "mfu": 0.2, "data_wait": 0.125}
        tracker.log(step, {"loss": 1 / step, **speed, "skipped_steps": 0.0})
        own = {
            group: [n for n, m in (declared or {}).items() if m.group == group] for group in ("train", "eval", "probe")
        }
        tracker.log(step, dict.fromkeys(own["train"], float(step)))
        if (top1 := (evaluations or {}).get(step)) and declared:
            tracker.log(step, dict.fromkeys([*own["eval"], *own["probe"]], top1) | {"test_num_samples": num_samples})
        elif top1:
            tracker.log(step, {"test_top1": top1, "test_loss": 1 - top1, "test_num_samples": num_samples})
    tracker.finish("FINISHED", outcome="finished")
    return folder
