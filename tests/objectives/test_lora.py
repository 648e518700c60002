"""LoRA: nothing changes at first, factors alone are trained, and a checkpoint's weights have their product."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import objectives
from pipeline.checkpoint.sharded_tensors import CheckpointIndex, ShardedTensors, with_factors
from pipeline.model import build, configure
from pipeline.objectives.objective import Objective, constants, stored_name
from pipeline.settings import schema
from pipeline.settings.run import RunConfig
from pipeline.settings.schema import facts_of

MODEL = configure("ViT-mu/8", 16, 5, layer_scale=0.5, depth=3)


def run_of(*more: str) -> RunConfig:
    return schema.load(
        RunConfig,
        None,
        [
            "name=x",
            "data.path=x",
            "init.weights=x",
            "model.image_size=16",
            "train.length=10 steps",
            "train.loss=softmax",
            "train.freeze=backbone",
            "train.lora_rank=3",
            "train.lora_alpha=6",
            *more,
        ],
    )


def with_trained_factors(*more: str) -> Objective:
    objective = objectives.create(run_of(*more), build(MODEL, seed=1)).eval()
    with torch.no_grad():
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return objective


def test_nothing_changes_before_the_first_step() -> None:
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = build(MODEL, seed=1).eval()
    torch.nn.init.normal_(model.head.weight)
    expected = model(images).detach()
    assert torch.equal(objectives.create(run_of(), model).backbone(images), expected)


def test_the_exported_weights_compute_the_same() -> None:
    objective = with_trained_factors("train.lora_layers=[qkv,down]")
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert {name for name, p in objective.named_parameters() if p.requires_grad} == {
        "backbone.head.weight",
        "backbone.head.bias",
    } | {
        f"lora.blocks/{i}/{layer}.{factor}"
        for i in range(MODEL.depth)
        for layer in ("attention/qkv", "mlp/down")
        for factor in ("up", "down")
    }
    stored = {
        stored_name(name): tensor.detach().numpy()
        for name, tensor in [*objective.named_parameters(), *objective.named_buffers()]
    }
    merged = {name: torch.from_numpy(np.asarray(array)) for name, array in with_factors(stored).items()}
    plain = build(MODEL).eval()
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(images), objective.backbone(images), rtol=1e-5, atol=1e-6)


def test_the_exported_weights_are_the_same_if_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = with_trained_factors("train.lora_layers=[qkv,down]")
    tensors = [*objective.named_parameters(), *objective.named_buffers()]
    stored = {stored_name(name): tensor.detach().numpy() for name, tensor in tensors}
    (tmp_path / "rank-0.bin").write_bytes(b"".join(array.tobytes() for array in stored.values()))
    shapes = {name: list(array.shape) for name, array in stored.items()}
    ranges = [(name, 0, array.size) for name, array in stored.items()]
    sharded = ShardedTensors(tmp_path, CheckpointIndex(shapes, ["weights"], {"rank-0.bin": ranges}))
    monkeypatch.setattr("pipeline.checkpoint.sharded_tensors._BATCH", 3000)
    found, expected = dict(sharded.model_tensors("weights")), with_factors(stored)
    assert list(found) == list(expected) == list(sharded.model_shapes())
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


def test_another_alpha_is_another_run() -> None:
    """A checkpoint holds the factor: a run said that its alpha was another one, and went on with the factor from
    before.
    """
    held = dict(constants(with_trained_factors()))
    assert held["lora.blocks/0/attention/qkv.scale"] == 6 / 3
    assert facts_of(RunConfig)["train.lora_alpha"].means("run")


def test_it_is_planned() -> None:
    from pipeline.estimate import memory

    without = ("train.lora_rank=0", "train.lora_alpha=16")
    config = run_of("engine.precision=fp32", "engine.zero_stage=0", "train.micro_batch=8")
    found = memory.parameters(config, MODEL)
    trained = sum(p.numel() for p in with_trained_factors().parameters() if p.requires_grad)
    assert found.trained == trained < found.frozen
    frozen, free = (
        memory.moments(MODEL, c, 8, 1, 1)[0]
        for c in (run_of("engine.precision=fp32", "engine.zero_stage=0", *without), config)
    )
    assert free.activations > frozen.activations, "gradients go through all blocks"
    assert objectives.training_flops(config, MODEL) > objectives.training_flops(run_of(*without), MODEL)
