"""Memory and arithmetic of objectives that add to the backbone: counted on the meta device, and of real steps in one
process.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crops_step import tiny_lejepa
from distillation import SETTINGS
from live_tensors import LiveTensors, operators_of_a_gpu
from loaded import inputs_of

from data_tools.bench.noise import noise_views
from pipeline import objectives
from pipeline.estimate import memory
from pipeline.model import Config, build, save, training_flops_per_image
from pipeline.objectives import on_meta
from pipeline.objectives.parts import across_ranks
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

IMAGES = 16
ANCHORED = ("objective.gram_weight=2", "objective.gram_size=64")


def run_of(loss: str, *more: str) -> tuple[RunConfig, Config]:
    config = schema.load(
        RunConfig,
        None,
        [
            "name=x",
            "data.path=x",
            "data.streams=2",
            "train.length=10 steps",
            "schedule.warmup=0 steps",
            "model.name=ViT-Ti/8",
            "model.image_size=32",
            "model.representation=false",
            "model.depth=5",
            f"train.loss={loss}",
            f"train.micro_batch={IMAGES}",
            f"train.global_batch={2 * IMAGES}",
            "engine.precision=fp32",
            "engine.zero_stage=0",
            *(SETTINGS if loss == "dino" else ()),
            *more,
        ],
    )
    return config, objectives.new_backbone(config, 4)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("loss", "more"),
    # With small views, LeJEPA's projector is what is largest; with large ones, the blocks.
    [
        ("dino", []),
        ("simclr", []),
        ("mae", ["objective.decoder_depth=4"]),
        ("lejepa", ["objective.local_size=64", "objective.local_views=2"]),
        ("lejepa", ["objective.local_size=16"]),
        ("pseudo_labels", []),
        *((loss, ["objective.local_size=16", *ANCHORED]) for loss in ("dino", "lejepa")),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_prediction_is_what_a_backward_pass_holds(
    loss: str, more: list[str], checkpointing: bool, tmp_path: Path
) -> None:
    """Weights with the teacher's, gradients, activations and inputs of the second micro-batch of a step, within 10
    %.
    """
    unanchored = [given for given in more if given not in ANCHORED]
    config, model = run_of(loss, f"engine.activation_checkpointing={str(checkpointing).lower()}", *unanchored)
    if unanchored != more:
        save(build(model, seed=0), tmp_path / "w.pt")
        init = replace(config.init, weights=str(tmp_path / "w.pt"))
        gram = dict(item.removeprefix("objective.").split("=") for item in ANCHORED)
        config = replace(config, init=init, objective={**config.objective, **gram})
    _check_backward_pass(config, model, checkpointing)


def _check_backward_pass(config: RunConfig, model: Config, checkpointing: bool) -> None:
    loss = config.train.loss
    backward = memory.moments(model, config, IMAGES, 2, 1)[0]
    objective = objectives.create(config, build(model, seed=0)).train()
    objective.backbone.activation_checkpointing = checkpointing
    shapes = [(g.count, *ImageSize.parse(g.size)) for g in objectives.kind(loss).views(config)]
    pixels = replace(noise_views(shapes, IMAGES), labels=torch.full((IMAGES, 1), -1))
    for p in objective.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None  # Of the first micro-batch.
    with LiveTensors() as live, operators_of_a_gpu():
        live.bytes = live.peak = sum(p.numel() * 4 for p in objective.parameters())
        live.sizes = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in objective.parameters()}
        for p in objective.parameters():
            if p.grad is not None:
                live._meet(p.grad.untyped_storage())
        read = inputs_of(objective, pixels)
        objective(*read)[0].backward()
    predicted = backward.weights + backward.gradients + backward.activations + backward.inputs
    assert predicted == pytest.approx(live.peak, rel=0.10), backward


@pytest.mark.parametrize("given", [{"freeze": "backbone", "lora_rank": 4}, {"freeze": "3 blocks"}], ids=str)
def test_a_teacher_has_no_copy_of_what_is_frozen(given: dict[str, Any]) -> None:
    config, model = run_of("dino")
    config = replace(config, train=replace(config.train, **given))
    found, backbone = memory.parameters(config, model), memory.num_parameters(model)
    assert found.teacher < found.trained
    assert found.frozen > 0.5 * backbone
    _check_backward_pass(config, model, checkpointing=False)


def test_parameters_are_counted_apart() -> None:
    config, model = run_of("dino")
    objective = objectives.create(config, build(model, seed=0))
    found = memory.parameters(config, model)
    trained = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    teacher = sum(p.numel() for p in objective.teacher.parameters())
    assert (found.trained, found.teacher, found.frozen) == (trained, teacher, 2 * 8), "two centres of 8 prototypes"
    assert 0.9 * trained < teacher < trained, "all but the mask token"
    assert memory.checkpoint_bytes(model, config) == 4 * (4 * trained + found.frozen + memory.num_parameters(model))
    plain, taught = (memory.moments(m, c, 2, 1, 4) for c, m in (run_of("softmax"), run_of("dino")))
    assert taught[2].weights > 1.9 * plain[2].weights
    assert taught[2].optimizer > 1.2 * plain[2].optimizer


@pytest.mark.parametrize("loss", ["softmax", "masked_mean_color"])
def test_counted_arithmetic_is_the_configurations(loss: str) -> None:
    """Within 4 %: the configuration's has no head, and has a gradient of the images, which nothing needs."""
    config, model = run_of(loss)
    exact = objectives.training_flops(config, model)
    assert exact == training_flops_per_image(model)
    assert on_meta.training_flops(objectives.kind(loss), config, model) == pytest.approx(exact, rel=0.04)


def test_arithmetic_counts_views_and_a_teacher_without_its_backward_pass() -> None:
    alone = on_meta.training_flops(objectives.kind("softmax"), *run_of("softmax"))
    config, model = run_of("simclr", "objective.hidden=32")
    assert objectives.training_flops(config, model) == pytest.approx(2 * alone, rel=0.02)
    config, model = run_of("dino", "objective.local_views=0", "objective.ibot_weight=0")
    assert objectives.training_flops(config, model) == pytest.approx(2 * 4 / 3 * alone, rel=0.02), "two views"


@pytest.mark.parametrize("loss", ["dino", "simclr", "lejepa"])
def test_many_images_are_extrapolated(loss: str) -> None:
    config, model = run_of(loss)

    def count(images: int) -> memory.Saved:
        return memory.saved_by_loss(objectives.kind(loss), config, model, images, torch.float32, False, 4)

    counted, found = count(80), memory.of_many(count, 80)
    for name in ("total", "outside", "until_added"):
        assert getattr(found, name) == pytest.approx(getattr(counted, name), rel=0.01)
    for use, expected in zip(found.uses, counted.uses, strict=True):
        assert use == pytest.approx(expected, rel=0.01)


def test_samples_of_other_ranks_are_counted() -> None:
    config, model = run_of("simclr")
    one, many = (memory.moments(model, config, IMAGES, 1, ranks)[0].activations for ranks in (1, 64))
    assert many - one > 2 * 63 * (2 * IMAGES) ** 2 * 4
    with across_ranks.on_meta(3):
        assert across_ranks.gathered(torch.empty(2, 5, device="meta")).shape == (6, 5)


def test_metrics_without_a_measure_name_both() -> None:
    with pytest.raises(NotImplementedError, match="Lejepa"):
        tiny_lejepa().measure((), {})
