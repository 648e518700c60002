"""train.freeze: what is trained, what it costs by prediction and by count, and what is refused."""

import numpy as np
import pytest
import torch
from live_tensors import LiveTensors, operators_of_a_gpu

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.estimate import memory
from pipeline.model import build, configure, training_flops_per_image
from pipeline.objectives import on_meta
from pipeline.objectives.parameters import optimizers
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

MODEL = configure("ViT-Ti/8", 32, 4, depth=5)
POOLED = configure("ViT-Ti/8", 32, 4, depth=5, pool="attentive")
IMAGES = 16


def run_of(freeze: str, *more: str) -> RunConfig:
    return schema.load(
        RunConfig,
        None,
        [
            "name=x",
            "data.path=x",
            "init.weights=x",
            "model.image_size=32",
            "train.length=10 steps",
            "train.loss=softmax",
            f"train.freeze={freeze}",
            "train.global_batch=32",
            "train.micro_batch=16",
            "engine.precision=fp32",
            "engine.zero_stage=0",
            *more,
        ],
    )


def test_parameters_of_the_head_the_pool_or_the_last_blocks_are_trained() -> None:
    of_blocks = ("blocks.3.", "blocks.4.", "norm.", "head.")
    for model, freeze, begins in (
        (MODEL, "backbone", ("head.",)),
        (POOLED, "backbone", ("head.",)),
        (POOLED, "encoder", ("pool.", "head.")),
        (MODEL, "3 blocks", of_blocks),
    ):
        objective = objectives.create(run_of(freeze), build(model))
        trained = {name for name, p in objective.backbone.named_parameters() if p.requires_grad}
        assert trained == {name for name, _ in objective.backbone.named_parameters() if name.startswith(begins)}
        groups = optimizers.parameter_groups(objective, objective.decayed(), run_of(freeze).optimizer)
        assert sum(len(group["params"]) for group in groups) == len(trained)


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("freeze", ["backbone", "encoder", "3 blocks"])
def test_predicted_memory_is_what_a_step_holds(freeze: str, checkpointing: str) -> None:
    """Weights, gradients, activations and inputs of the second micro-batch of a step."""
    config = run_of(freeze, f"engine.activation_checkpointing={checkpointing}")
    model = POOLED if freeze == "encoder" else MODEL
    backward = memory.moments(model, config, IMAGES, 2, 1)[0]
    objective = objectives.create(config, build(model)).train()
    objective.backbone.activation_checkpointing = checkpointing == "true"
    batch = Batch(
        (torch.zeros(1, IMAGES, 32, 32, 3, dtype=torch.uint8),),
        torch.zeros(IMAGES, 1, dtype=torch.int64),
        torch.ones(IMAGES, dtype=torch.bool),
        np.arange(IMAGES),
        np.zeros(IMAGES, np.int64),
    )
    for _ in range(2):
        with LiveTensors() as live, operators_of_a_gpu():
            for p in objective.parameters():
                live._meet(p.untyped_storage())
                if p.grad is not None:
                    live._meet(p.grad.untyped_storage())
            objective(*objective.inputs(batch, torch.device("cpu"), None))[0].backward()
    predicted = backward.weights + backward.gradients + backward.activations + backward.inputs
    assert predicted == pytest.approx(live.peak, rel=0.10), backward


def test_arithmetic_is_that_of_what_is_trained() -> None:
    whole = training_flops_per_image(MODEL)
    assert objectives.training_flops(run_of("backbone"), MODEL) == whole // 3
    config = run_of("3 blocks")
    counted = on_meta._flops(objectives.kind("softmax"), config, MODEL)
    assert objectives.training_flops(config, MODEL) == pytest.approx(counted, rel=0.01)


def test_a_new_model_is_not_frozen() -> None:
    with pytest.raises(UserError, match=r"needs init\.weights"):
        run_of("backbone", "init.weights=null", "model.name=ViT-Ti/8")
