"""Gram anchoring against its formula, and its anchor: the weights that a run began with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loaded import inputs_of
from torch import Tensor

from data_tools.bench.noise import noise_views
from pipeline import objectives
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.model import build, configure, load, save
from pipeline.objectives.objective import Facts, Objective, constants
from pipeline.objectives.parts.crops import ANCHORED, gram_losses, on_grid
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig
from pipeline.train.setup import initial_model

OF_LOSS = {
    "dino": ["objective.prototypes=12", "objective.hidden=16", "objective.bottleneck=8", "objective.ibot_weight=1"],
    "lejepa": ["objective.hidden=16", "objective.width=6", "objective.directions=12", "objective.global_views=3"],
}
LARGE = {"dino": 2, "lejepa": 3}
ON = ("objective.gram_weight=2.5",)
TWICE = (*ON, "objective.gram_size=32")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a classifier with a representation layer and dropout, for 9 patches: a run at 16 px has 4."""
    path = tmp_path_factory.mktemp("gram") / "old.pt"
    model = build(configure("ViT-mu/8", 24, 5, representation=True, dropout=0.5, registers=2), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    save(model, path)
    return path


def run(weights: Path | str, loss: str, *more: str) -> RunConfig:
    given = ["name=a", "data.path=d", "train.length=10 steps", f"train.loss={loss}", "model.image_size=16"]
    small = ["objective.local_views=2", "objective.local_size=8", *OF_LOSS[loss]]
    crop = ["augment.crop=random_resized", "augment.color_jitter=0.4"]
    return schema.load(RunConfig, None, [*given, *crop, *small, f"init.weights={weights}", *more])


def create(config: RunConfig, pixels: Pixels = RGB8) -> Objective:
    dataset = SimpleNamespace(num_classes=0, classes=[], pixels=pixels)
    objectives.check(config)
    objective = objectives.create(config, initial_model(config, dataset, None, SimpleNamespace(say=print))[0])
    objective.num_steps = 10
    objective.before_step(0)
    return objective.train()


def moved(objective: Objective) -> Objective:
    """As after some steps: no weight is that of the anchor."""
    with torch.no_grad():
        for parameter in objective.backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
    return objective


def batch_of(config: RunConfig, valid: tuple[bool, ...] = (True, False, True), fill: int = 0) -> Batch:
    groups = objectives.kind(config.train.loss).views(config)
    batch = noise_views([(group.count, *ImageSize.parse(group.size)) for group in groups], len(valid))
    for view in batch.views:
        view[:, ~torch.tensor(valid)] = fill
    return replace(batch, valid=torch.tensor(valid))


def step(objective: Objective, batch: Batch) -> tuple[Tensor, Facts, Facts]:
    """Loss, logged values, and gradients."""
    objective.zero_grad()
    loss, values = objective(*inputs_of(objective, batch))
    loss.backward()
    return loss.detach(), values, {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------- the formulae
def of_image(patches: np.ndarray, anchor: np.ndarray) -> float:
    """DINOv3, equation 2, over the number of pairs: float64, patch by patch."""

    def similarity(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))

    N = len(patches)
    pairs = [(i, j) for i in range(N) for j in range(N)]
    return sum((similarity(patches[i], patches[j]) - similarity(anchor[i], anchor[j])) ** 2 for i, j in pairs) / N**2


def test_the_loss_is_that_of_the_paper() -> None:
    own, anchor = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0)).unbind()
    assert ((own @ own.transpose(1, 2)) < 0).any(), "negative similarities count"
    expected = [of_image(*pair) for pair in zip(own.double().numpy(), anchor.double().numpy(), strict=True)]
    np.testing.assert_allclose(gram_losses(own, anchor), expected, rtol=1e-5)
    np.testing.assert_allclose(gram_losses(7 * own, own), 0, atol=1e-12)


@pytest.mark.parametrize("size", [(), ("objective.gram_size=32",)], ids=["same size", "twice the size"])
@pytest.mark.parametrize("loss", OF_LOSS)
def test_a_step_adds_the_loss_of_each_large_view(weights: Path, loss: str, size: tuple[str, ...]) -> None:
    config = run(weights, loss, *ON, *size)
    objective, batch = moved(create(config)), batch_of(config)
    found, values, _ = step(objective, batch)
    views, facts = inputs_of(objective, batch)
    assert [view.shape[0] for view in views] == [3 * group.count for group in objective.views(config)[:-1]]
    with torch.no_grad():
        masked = {"masked": (facts["masked"], objective.mask_token)} if loss == "dino" else {}
        large = torch.cat(views[:2]) if loss == "dino" else views[0]
        own = objective.backbone(large, with_patches=True, **masked)[1]
        anchor = objective.frozen_teacher(facts[ANCHORED], with_patches=True)[1]
        if size:
            anchor = on_grid(anchor, (4, 4), (2, 2))
    assert own.shape == anchor.shape == (LARGE[loss] * 3, 4, own.shape[2])
    pairs = list(zip(own.double().numpy(), anchor.double().numpy(), strict=True))
    # The second image of three is unreadable.
    expected = sum(of_image(*pairs[3 * view + image]) for view in range(LARGE[loss]) for image in (0, 2))
    expected /= 3 * LARGE[loss]
    assert values["gram_loss"].item() == pytest.approx(expected, rel=1e-4)
    off = run(weights, loss)
    before = {**objective.state_dict()}
    alone = create(off)
    alone.load_state_dict({name: before[name] for name in alone.state_dict()})
    without, others, _ = step(alone, replace(batch, views=batch.views[:-1]))
    assert found.item() == pytest.approx(without.item() + 2.5 * expected, rel=1e-5)
    assert values.keys() - others.keys() == {"gram_loss"}
    assert all(torch.equal(values[name], value) for name, value in others.items())
    assert values.keys() == objective.values(config).keys()


@pytest.mark.parametrize("loss", OF_LOSS)
def test_a_weight_of_0_is_no_anchor(weights: Path, loss: str) -> None:
    config = run(weights, loss, "objective.gram_weight=0", "objective.gram_size=32")
    cls = objectives.kind(loss)
    assert cls.views(config) == cls.views(run(weights, loss)) == cls.views(run(weights, loss, *ON))[:-1]
    assert create(config).frozen_teacher is None
    assert objectives.teacher_digest(config) == ""
    assert "gram_loss" not in cls.values(config)
    assert "objective.gram_size" in " ".join(objectives.without_effect(config))


@pytest.mark.parametrize("loss", OF_LOSS)
def test_an_unreadable_image_contributes_nothing(weights: Path, loss: str) -> None:
    config = run(weights, loss, *TWICE)
    (loss_0, values_0, found_0), (loss_1, values_1, found_1) = (
        step(moved(create(config)), batch_of(config, fill=fill)) for fill in (0, 200)
    )
    assert torch.equal(loss_0, loss_1)
    assert torch.equal(values_0["gram_loss"], values_1["gram_loss"])
    assert all(torch.equal(found_0[name], found_1[name]) for name in found_0)
    none, values, gradients = step(moved(create(config)), batch_of(config, (False, False)))
    assert none == values["gram_loss"] == 0
    assert all(gradient.isfinite().all() for gradient in gradients.values())


# ---------------------------------------------------------------------- the anchor
@pytest.mark.parametrize("loss", OF_LOSS)
def test_the_anchor_is_what_the_run_began_with(weights: Path, loss: str) -> None:
    for objective in (create(run(weights, loss, *ON)), create(run(weights, loss, *TWICE))):
        anchor, size = objective.frozen_teacher, objective.frozen_teacher.config.image_size
        expected = load(weights, image_size=size, num_classes=0, representation=False).state_dict()
        assert anchor.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in anchor.state_dict().items())
        assert not anchor.training  # It has dropout.
        assert not any(p.requires_grad for p in anchor.parameters())
        assert not [name for name, _ in constants(objective) if "teacher" in name]
    begun = create(run(weights, loss, *ON))
    state = begun.backbone.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in begun.frozen_teacher.state_dict().items())
    assert objectives.teacher_digest(run(weights, loss, *ON))


def test_the_anchor_reads_the_channels_of_the_data(weights: Path) -> None:
    pixels = Pixels(("a", "b", "c", "d"), "uint16", (0.0,) * 4, (4095.0,) * 4, (0.5,) * 4, (0.5,) * 4)
    objective = create(run(weights, "lejepa", *ON, "augment.color_jitter=0"), pixels)
    own, anchor = objective.backbone.state_dict(), objective.frozen_teacher.state_dict()
    assert objective.frozen_teacher.config == objective.backbone.config
    assert all(torch.equal(tensor, own[name]) for name, tensor in anchor.items())


def test_the_anchor_sees_the_crops_without_distortions(weights: Path) -> None:
    for loss, large in LARGE.items():
        *others, anchored = objectives.kind(loss).views(run(weights, loss, *TWICE, "augment.flip_vertical=true"))
        assert (anchored.count, anchored.size, anchored.repeats) == (large, (32, 32), 0)
        assert all(group.repeats is None for group in others)
        given, seen = others[0].augment, anchored.augment
        for name in ("crop", "area_min", "area_max", "aspect_min", "aspect_max", "flip", "flip_vertical", "turns"):
            assert getattr(seen, name) == getattr(given, name)
        assert (given.color_jitter, seen.color_jitter, seen.blur) == (0.4, 0, 0)


# ---------------------------------------------------------------------- what does not fit
def change(path: Path, **changes: object) -> Path:
    save(build(configure("ViT-mu/8", 16, 0, representation=False, **changes)), path)
    return path


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda at: ["init.weights=null", "model.name=ViT-Ti/8"], "init.weights"),
        (lambda at: ["init.weights=models:/vit@best"], "init.weights"),
        (lambda at: ["objective.gram_size=32x16"], "objective.gram_size = 32x16"),
        (lambda at: ["objective.gram_size=36"], "36"),
        (
            lambda at: [f"init.weights={change(at / 'r.pt', positions='relative')}", "objective.local_views=0", *TWICE],
            "positions",
        ),
    ],
    ids=["none", "MLflow's", "shape", "pixels", "positions"],
)
def test_what_does_not_fit_is_refused_by_name(
    given: Callable[[Path], list[str]], named: str, weights: Path, tmp_path: Path
) -> None:
    config = run(weights, "lejepa", *ON, *given(tmp_path))
    with pytest.raises(UserError, match=named):
        create(config)
