"""Sums and gathers over all ranks: none on one rank, although DeepSpeed makes a process group there too."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from collectives import Collectives
from distillation import SETTINGS
from loaded import inputs_of
from torch import distributed

from data_tools.bench.noise import noise_views
from pipeline import objectives
from pipeline.model import build, configure, save
from pipeline.objectives.parts.across_ranks import summed
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

SMALL = ["objective.hidden=16", "objective.width=8"]
LOCAL = ["objective.local_size=16", "objective.local_views=2"]
GRAM = ["objective.gram_weight=2", "objective.gram_size=64"]
CASES = {
    "softmax": [],
    "sigmoid": [],
    "masked_pixels": [],
    "mae": ["objective.decoder_depth=1"],
    "dino": [*SETTINGS, "objective.koleo_weight=0.1", "objective.centring=sinkhorn"],
    "lejepa": [*SMALL, *LOCAL],
    "simclr": SMALL,
    "pseudo_labels": [],
    "distill": [],
}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("loss", "gram"), [*((loss, False) for loss in CASES), ("dino", True), ("lejepa", True)])
def test_a_step_on_one_rank_calls_no_other(loss: str, gram: bool, alone: None, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    save(build(configure("ViT-mu/8", 32, 10, width=48), seed=0), weights)
    given = ["name=x", "data.path=x", "train.length=10 steps", "schedule.warmup=0 steps", "data.streams=4"]
    given += ["model.name=ViT-mu/8", "model.image_size=32", "model.representation=false"]
    given += ["train.micro_batch=4", "train.global_batch=4"]
    given += [f"objective.teacher={weights}"] * (loss == "distill")
    config = schema.load(RunConfig, None, [*given, f"train.loss={loss}", *CASES[loss], *GRAM * gram])
    if gram:
        config = replace(config, init=replace(config.init, weights=str(weights)))
    objective = objectives.create(config, build(objectives.new_backbone(config, 4), seed=0)).train()
    objective.num_steps = 10
    shapes = [(group.count, *ImageSize.parse(group.size)) for group in type(objective).views(config)]
    with Collectives() as collectives:
        objective.before_step(0)
        objective(*inputs_of(objective, noise_views(shapes, 4, 4)))[0].backward()
        objective.after_step()
    assert collectives.names == []


def test_the_collective_calls_of_several_ranks_are_seen(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with Collectives() as collectives:
        summed(torch.ones(2))
    assert collectives.names == ["allreduce_"]
