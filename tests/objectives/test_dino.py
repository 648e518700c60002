"""DINO, iBOT and KoLeo against independent formulae in numpy, and what must contribute nothing."""

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loaded import inputs_of
from torch import Tensor

from pipeline import objectives
from pipeline.architecture.pixels import RGB8
from pipeline.data.loading.loader import Batch
from pipeline.model import build, configure, create, forward_macs, save
from pipeline.objectives.dino import BlockMasks, Dino, DinoSettings, koleo, sinkhorn
from pipeline.objectives.objective import embedding_std
from pipeline.settings import schema
from pipeline.settings.quantities import Length
from pipeline.settings.run import RunConfig
from pipeline.train.setup import initial_model

GIVEN = DinoSettings(
    prototypes=12, hidden=16, bottleneck=8, local_views=2, local_size=8, teacher_temperature=0.07, momentum=0.9
)
DINOV2 = replace(GIVEN, ibot_weight=1.0, koleo_weight=0.1, centring="sinkhorn", ibot_head="separate")
NEEDED = ("name=try", "data.path=here", "train.length=10 epochs", "train.loss=dino")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def dino(given: DinoSettings = GIVEN, **changes) -> Dino:
    torch.manual_seed(0)
    backbone = build(configure("ViT-mu/4", 16, num_classes=0, **changes))
    objective = Dino(backbone, given, 3)
    objective.lengths = {"objective.temperature_warmup": Fraction(1, 2), "objective.frozen": Fraction(1, 4)}
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    objective.num_steps = 10
    objective.before_step(0)
    return objective.train()


def batch_of(valid: list[bool], epoch: int = 0) -> Batch:
    B, draw = len(valid), np.random.default_rng(epoch)
    views = [
        torch.from_numpy(draw.integers(0, 256, (count, B, side, side, 3), np.uint8))
        for count, side in ((1, 16), (1, 16), (2, 8))
    ]
    for view in views:
        view[:, ~torch.tensor(valid)] = 0
    return Batch(tuple(views), torch.zeros(B, 0), torch.tensor(valid), np.arange(B), np.full(B, epoch))


def without_invalid(batch: Batch) -> Batch:
    kept = batch.valid
    return Batch(
        tuple(view[:, kept] for view in batch.views),
        batch.labels[kept],
        batch.valid[kept],
        batch.rows[kept.numpy()],
        batch.epochs[kept.numpy()],
    )


def read(objective: Dino, batch: Batch):
    return inputs_of(objective, batch)


# ---------------------------------------------------------------------- the formulae
def cross_entropy(
    student: Tensor, teacher: Tensor, student_temperature: float, teacher_temperature: float, centre: Tensor
) -> Tensor:
    """The loss of one pair of views (DINO, equation 1): outputs (B, K), centre (K,)."""
    targets = ((teacher - centre) / teacher_temperature).softmax(1)
    return -(targets * (student / student_temperature).log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("iterations", [1, 3])
def test_sinkhorn_is_that_of_dinov2(iterations: int) -> None:
    outputs = normal(6, 4).double().numpy()
    expected = np.exp(outputs / 0.5).T
    expected /= expected.sum()
    for _ in range(iterations):
        expected /= expected.sum(1, keepdims=True) * 4
        expected /= expected.sum(0, keepdims=True) * 6
    found = sinkhorn(torch.from_numpy(outputs).float(), 0.5, iterations)
    np.testing.assert_allclose(found, 6 * expected.T, rtol=1e-5)


@pytest.mark.parametrize("scale", [4, 100])
def test_sinkhorn_reads_large_outputs(scale: float) -> None:
    """A sample far below another had shares of 0 and so no target, and prototypes that only it can have were lost."""
    outputs = scale * normal(8, 16)
    shares = outputs.double() / 0.04
    for _ in range(3):
        shares = shares - shares.logsumexp(0)
        shares = shares - shares.logsumexp(1, keepdim=True)
    found = sinkhorn(outputs, 0.04, 3)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-3)
    np.testing.assert_allclose(found, shares.exp(), atol=1e-3)


def test_koleo_is_the_distance_to_the_nearest() -> None:
    features = normal(6, 5)
    units = features.double().numpy() / np.linalg.norm(features.double().numpy(), axis=1, keepdims=True)
    nearest = [min(np.linalg.norm(a - b) for j, b in enumerate(units) if j != i) for i, a in enumerate(units)]
    found = koleo(features)
    assert float(found) == pytest.approx(-np.log(np.array(nearest) + 1e-8).mean(), rel=1e-5)


def test_koleo_of_equal_features_has_a_finite_gradient() -> None:
    features = normal(1, 5).repeat(3, 1).requires_grad_()
    koleo(features).backward()
    assert features.grad.isfinite().all()


def test_the_std_of_embeddings_tells_collapse() -> None:
    everywhere, same = normal(4000, 8), normal(1, 8).repeat(5, 1)
    assert float(embedding_std(everywhere, torch.ones(4000, dtype=torch.bool))) == pytest.approx(1, abs=0.01)
    assert float(embedding_std(same, torch.ones(5, dtype=torch.bool))) == pytest.approx(0, abs=1e-3)


# ---------------------------------------------------------------------- the objective
def test_the_loss_is_the_mean_over_pairs_of_views() -> None:
    objective, batch = dino(), batch_of([True] * 4)
    objective.centre.copy_(0.1 * normal(12))
    objective.temperature.fill_(0.05)
    views, facts = read(objective, batch)
    loss, values = objective(views, facts)
    local = views[2].chunk(2)
    student = [objective.head(objective.backbone(view, any_size=True)) for view in (views[0], views[1], *local)]
    teacher = [objective.teacher["head"](objective.teacher["backbone"](view)) for view in views[:2]]
    pairs = [
        cross_entropy(student[s], teacher[t], 0.1, 0.05, objective.centre) for t in range(2) for s in range(4) if s != t
    ]
    torch.testing.assert_close(loss, sum(pairs) / 6)
    targets = [((t - objective.centre) / 0.05).softmax(1) for t in teacher]
    entropy = sum(-(t * t.log()).sum(1).mean() for t in targets) / 2
    torch.testing.assert_close(values["teacher_entropy"], entropy)
    torch.testing.assert_close(values["teacher_kl"], loss.detach() - entropy)


def test_the_centre_is_a_running_mean_of_the_teachers_outputs() -> None:
    objective = dino()
    outputs = []
    for epoch in range(2):  # Two micro-batches of one step.
        views, facts = read(objective, batch_of([True, True, epoch == 0], epoch))
        objective(views, facts)
        whole = torch.cat(views[:2])[facts["valid"].repeat(2)]
        outputs.append(objective.teacher["head"](objective.teacher["backbone"](whole)))
    objective.after_step()
    torch.testing.assert_close(objective.centre, 0.1 * torch.cat(outputs).mean(0))


def test_evaluation_leaves_the_centre_and_draws_no_masks() -> None:
    objective = dino(DINOV2)
    objective.centre.copy_(0.1 * normal(12))
    objective.eval()
    views, facts = read(objective, batch_of([True] * 3))
    assert set(facts) == {"valid"}
    found = objective(views, facts, task="measure")["loss"]
    assert found.shape == (3,)
    assert not objective.centre_sums.any()
    training = dino(replace(DINOV2, centring="mean", ibot_weight=0.0, koleo_weight=0.0))
    training.load_state_dict(objective.state_dict(), strict=False)
    torch.testing.assert_close(found.mean(), training(views, facts)[0])


@pytest.mark.parametrize("given", [GIVEN, DINOV2, replace(DINOV2, centring="mean", ibot_head="shared")])
def test_an_unreadable_image_contributes_nothing(given: DinoSettings) -> None:
    with_it, without = dino(given), dino(given)
    batch = batch_of([True, False, True, True])
    loss, values = with_it(*read(with_it, batch))
    expected, expected_values = without(*read(without, without_invalid(batch)))
    torch.testing.assert_close(loss, 0.75 * expected)
    for name in ("teacher_entropy", "teacher_kl", "embedding_std"):
        torch.testing.assert_close(values[name], expected_values[name])
    for objective, value in ((with_it, loss), (without, 0.75 * expected)):
        value.backward()
        objective.after_step()
    gradients = {name: parameter.grad for name, parameter in without.named_parameters()}
    for name, parameter in with_it.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(with_it.centre, without.centre)


@pytest.mark.parametrize("given", [GIVEN, DINOV2])
def test_a_batch_without_a_readable_image_has_no_loss_and_no_gradient(given: DinoSettings) -> None:
    objective = dino(given)
    loss, values = objective(*read(objective, batch_of([False, False])))
    loss.backward()
    objective.after_step()
    assert float(loss.detach()) == 0
    assert all(value.isfinite() for value in values.values())
    assert all(p.grad is None or not p.grad.any() for p in objective.parameters())
    assert not objective.centre.any()


def test_dinov2_adds_masked_patches_and_koleo() -> None:
    objective, batch = dino(replace(DINOV2, centring="mean")), batch_of([True] * 3)
    views, facts = read(objective, batch)
    loss, values = objective(views, facts)
    whole = torch.cat(views[:2])
    student, tokens = objective.backbone(whole, masked=(facts["masked"], objective.mask_token), with_patches=True)
    seen = objective.teacher["backbone"](whole, with_patches=True)[1]
    found = []
    for view in range(6):
        places = facts["masked"][view].nonzero()[:, 0]
        if len(places):
            outputs = objective.patch_head(tokens[view, places]), objective.teacher["patch_head"](seen[view, places])
            found.append(cross_entropy(*outputs, 0.1, float(objective.temperature), torch.zeros(12)))
    assert len(found) == 3
    torch.testing.assert_close(values["ibot_loss"], sum(found) / 6)
    first, second = student.chunk(2)
    torch.testing.assert_close(values["koleo_loss"], koleo(first) + koleo(second))
    local = [objective.backbone(views[2], any_size=True)]
    outputs = objective.head(torch.cat([student, *local])).chunk(4)
    teacher = objective.teacher["head"](objective.teacher["backbone"](whole)).chunk(2)
    pairs = [
        cross_entropy(outputs[s], teacher[t], 0.1, float(objective.temperature), torch.zeros(12))
        for t in range(2)
        for s in range(4)
        if s != t
    ]
    torch.testing.assert_close(loss, sum(pairs) / 6 + values["ibot_loss"] + 0.1 * values["koleo_loss"])


def test_masks_are_blocks_of_one_of_the_two_views() -> None:
    masks, batch = BlockMasks((14, 14), seed=1), batch_of([True] * 64)
    masked, indices, weights = (values.numpy() for values in masks.draw(batch).values())
    by_view = masked.reshape(2, 64, 196).sum(2)
    assert ((by_view == 0).sum(0) == 1).all()
    assert 20 < (by_view[0] > 0).sum() < 44
    counts = by_view.sum(0)
    assert counts.min() >= 19
    assert counts.max() <= 98
    assert 45 < counts.mean() < 72  # 30 % of 196 is 58.8.
    for i in range(64):
        real = weights[i] > 0
        places = [196 * row + patch for row in (i, 64 + i) for patch in np.flatnonzero(masked[row])]
        assert set(indices[i]) == set(places)
        assert real.sum() == counts[i]
        assert weights[i].sum() == pytest.approx(1)
    grids = masked[by_view.ravel() > 0].reshape(64, 14, 14)
    neighbours = (grids[:, 1:] & grids[:, :-1]).sum() / grids[:, 1:].sum()
    assert neighbours > 0.6  # 0.3 for single patches.


def test_masks_depend_on_the_sample_alone() -> None:
    masks = BlockMasks((4, 6), seed=1)
    whole, batch = masks.draw(batch_of([True] * 6)), batch_of([True] * 6)
    part = masks.draw(Batch(batch.views, batch.labels, batch.valid, batch.rows[4:], batch.epochs[4:]))
    assert torch.equal(part["masked"].view(2, 2, 24), whole["masked"].view(2, 6, 24)[:, 4:])
    other = masks.draw(batch_of([True] * 6, epoch=1))
    assert (other["masked"] != whole["masked"]).any()


# ---------------------------------------------------------------------- around a step
def test_schedules() -> None:
    objective = dino()
    found = []
    for step in (0, 2, 5, 9):  # Half of the run is warm-up.
        objective.before_step(step)
        found.append(float(objective.temperature))
    assert found == pytest.approx([0.04, 0.052, 0.07, 0.07])
    momentum = [objective.teacher_momentum(step) for step in (0, 5, 10)]
    assert momentum == pytest.approx([0.9, 1 - 0.1 * (math.cos(math.pi / 2) + 1) / 2, 1])
    assert objective.frozen_steps() == {"head.last.": 2, "patch_head.last.": 2}


def test_a_collapse_is_named_with_what_to_change() -> None:
    objective, same = dino(), {"embedding_std": 0.01}
    assert not objective.collapse(same)  # At the start of a run, this says nothing.
    objective.before_step(5)
    assert "objective.centring=sinkhorn" in objective.collapse(same)
    assert not objective.collapse({"embedding_std": 0.5})


# ---------------------------------------------------------------------- from other weights


def test_the_prototypes_have_gain_1_and_the_teacher_no_gradient() -> None:
    objective = dino(DINOV2, drop_path=0.5, dropout=0.5)
    outputs = objective.head(normal(3, objective.backbone.config.width))
    assert outputs.abs().max() <= 1.001
    views, facts = read(objective, batch_of([True] * 3))
    objective(views, facts)[0].backward()
    assert not any(p.requires_grad or p.grad is not None for p in objective.teacher.parameters())
    first, second = (objective.teacher["backbone"](views[0]) for _ in range(2))
    assert torch.equal(first, second)  # The teacher has no stochastic depth.
    assert not objective.decayed() & {"mask_token", "head.mlp.0.bias"}
    assert {"head.last.weight", "head.mlp.0.weight"} <= objective.decayed()


# ---------------------------------------------------------------------- settings
def config_of(*overrides: str, model: str = "model.name=ViT-Ti/16") -> RunConfig:
    return schema.load(RunConfig, None, [*NEEDED, model, *overrides])


def test_views_and_arithmetic() -> None:
    config = config_of("augment.area_min=0.4", "objective.local_area_max=0.3", "train.global_batch=1024")
    first, second, local = Dino.views(config)
    assert [(group.count, group.size) for group in (first, second, local)] == [
        (1, (224, 224)),
        (1, (224, 224)),
        (8, 96),
    ]
    assert [group.augment.area_min for group in (first, second, local)] == [0.4, 0.4, 0.05]
    assert local.augment.area_max == 0.3
    assert [(group.augment.blur, group.augment.solarise) for group in (first, second, local)] == [
        (1, 0),
        (0.1, 0.2),
        (0.5, 0),
    ]
    objectives.check(config)
    model = configure("ViT-Ti/16", 224, 0)
    head = 192 * 2048 + 2048**2 + 2048 * 256 + 256 * 65_536
    whole, small = forward_macs(model), forward_macs(replace(model, image_size=(96, 96)))
    expected = 6 * (2 * whole + 8 * small + 10 * head) + 2 * 2 * (whole + head)
    # Nothing needs the gradient of the images, which the formula counts.
    assert 0.98 * expected < objectives.training_flops(config, model) < expected
    assert len(Dino.views(config_of("objective.local_views=0"))) == 2


@pytest.mark.parametrize("new_head", [True, False])
def test_weights_begin_a_run_with_their_backbone(tmp_path: Path, new_head: bool) -> None:
    old = create("ViT-mu/4", 16, 5, representation=True)
    save(old, tmp_path / "old.pt")
    config = config_of("model.image_size=24", f"init.new_head={new_head}", model=f"init.weights={tmp_path}/old.pt")
    found, _ = initial_model(
        config, SimpleNamespace(num_classes=7, classes=[], pixels=RGB8), None, SimpleNamespace(say=print)
    )
    assert (found.config.num_classes, found.config.representation, found.config.image_size) == (0, False, (24, 24))
    assert torch.equal(found.blocks[0].mlp.up.weight, old.blocks[0].mlp.up.weight)
    objective = objectives.create(config, found)
    averaged, state = objective.teacher["backbone"].state_dict(), found.state_dict()
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("length", "whole", "share"),
    [
        ("1 epochs", "100 epochs", Fraction(1, 100)),
        ("10%", "7 steps", Fraction(1, 10)),
        ("10 steps", "1280 samples", Fraction(1, 2)),
        ("1 epochs", "100 steps", None),
    ],
)
def test_a_length_as_a_share_of_another(length: str, whole: str, share: Fraction | None) -> None:
    batch = 64 if "1280" in whole else 256
    assert Length.parse(length).share_of(Length.parse(whole), batch) == share
