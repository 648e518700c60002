"""Runs of a tiny model, and what they leave."""

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


def settings(dataset: Path, out: Path, name: str, *more: str) -> list[str]:
    """A run of a tiny model, a few steps long, that logs each of them."""
    return [
        f"name={name}",
        f"out={out}",
        f"data.path={dataset}",
        "data.streams=4",
        "data.window=16",
        "model.name=ViT-Ti/8",
        "model.image_size=16",
        "model.width=32",
        "model.depth=2",
        "model.mlp_width=64",
        "model.num_heads=2",
        "train.global_batch=24",
        "train.micro_batch=6",
        f"train.length={STEPS} steps",
        "train.log_every=1",
        "train.loss=softmax",
        "optimizer.lr=0.01",
        "schedule.warmup=2 steps",
        "evaluate.every=3 steps",
        "checkpoint.every=3 steps",
        "engine.precision=fp32",
        "track.enabled=false",
        "track.figures=false",
        *more,
    ]


def metrics(run: Path, name: str = "loss") -> dict[int, float]:
    """The last value of a metric at each step, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["metrics"][name] for record in records if name in record["metrics"]}


def without_mlflow(folder: Path) -> str:
    """PYTHONPATH of a run that is not tracked, with a stand-in in `folder` for MLflow.

    DeepSpeed's launcher imports MLflow if it is there, for its autotuner: 1.5 s of CPU in each of its processes, on
    each host.
    """
    (folder / "mlflow.py").write_text("raise ImportError\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
