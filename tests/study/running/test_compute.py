"""What the weights of a study cost before it."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tiny_study import write_run

from pipeline.data.mixture.run_data import open_run_data
from pipeline.estimate.plan import make_plan
from pipeline.model import create, save_safetensors, training_flops_per_image
from pipeline.monitor.page_folder import PageFolder, Start
from pipeline.settings import schema
from pipeline.study.running.compute import compute_of_runs
from pipeline.train.run_facts import run_facts
from pipeline.transfer.child_run import make_child


def test_a_checkpoint_within_progressive_image_sizes_counts_the_parts_before_it(dataset: Path, tmp_path: Path) -> None:
    """It was worth the mean of all parts in each step: more than it had cost, as a run begins with small images."""
    base = write_run(tmp_path, dataset)
    run = make_child(
        "parts", str(base), ["name=parts", f"out={tmp_path}", "train.length=30 steps", "train.image_sizes=8"]
    )
    config, model = run.config, create("ViT-mu/4", 16, 4)
    data = open_run_data(config.data, config.seed, config.train.global_batch, config.labels)
    facts = run_facts(config, make_plan(config, data.epoch_samples, 1), model, data, torch.device("cpu"), None)
    PageFolder(run.folder).begin("any", facts, Start(0.0, 0, []))
    (run.folder / "config.yaml").write_text(yaml.safe_dump(schema.to_dict(config)))
    (run.folder / "status.json").write_text(json.dumps({"status": "finished", "step": 30, "code": 0, "reason": ""}))
    small, large = (training_flops_per_image(create("ViT-mu/4", side, 4).config) for side in (8, 16))
    for step, done in ((10, 10 * small), (15, 15 * small), (20, 15 * small + 5 * large), (30, 15 * (small + large))):
        checkpoint = run.folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        save_safetensors(model, checkpoint / "model.safetensors", {})
        (checkpoint.parent / "latest").write_text(checkpoint.name)
        assert (
            compute_of_runs(checkpoint)
            == compute_of_runs(run.folder)
            == pytest.approx([config.train.global_batch * done], rel=1e-4)
        )
