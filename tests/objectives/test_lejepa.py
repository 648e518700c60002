"""LeJEPA against independent formulae in numpy: SIGReg and its gradient, the loss, and what must contribute nothing,
which holds of SimCLR as well.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from crops_step import GIVEN, step_of_tiny_lejepa, step_of_tiny_simclr, tiny_lejepa
from torch import Tensor

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.estimate.plan import cut_batch
from pipeline.objectives.lejepa import Lejepa, random_directions, sigreg
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

NEEDED = ("name=try", "data.path=here", "train.length=10 epochs", "train.loss=lejepa", "model.name=ViT-Ti/16")


def config(*settings: str) -> RunConfig:
    return schema.load(RunConfig, None, [*NEEDED, *settings])


def epps_pulley(projections: np.ndarray, directions: np.ndarray, knots: int, t_max: float) -> float:
    """N times the integral over [-t_max, t_max], with numpy's complex exponential and trapezoid; mean over
    directions.
    """
    t = np.linspace(-t_max, t_max, 2 * knots - 1)
    found = []
    for direction in directions.T:
        empirical = np.exp(1j * np.outer(t, projections @ direction)).mean(1)
        weight = np.exp(-(t**2) / 2)
        found.append(len(projections) * np.trapezoid(np.abs(empirical - weight) ** 2 * weight, t))
    return float(np.mean(found))


@pytest.mark.parametrize("shape", [(20, 6), (3, 20, 6)])
@pytest.mark.parametrize(("knots", "t_max"), [(17, 3.0), (5, 2.0)])
def test_sigreg_is_the_statistic_of_epps_and_pulley(shape: tuple[int, ...], knots: int, t_max: float) -> None:
    """Of several samples it is the mean of the statistic of each."""
    projections, directions = torch.randn(shape) * 1.5 + 0.2, random_directions(6, 9, seed=1)
    found = sigreg(projections, directions, knots, t_max)
    assert found.shape == ()
    samples = projections.view(-1, 20, 6).double().numpy()
    expected = np.mean([epps_pulley(sample, directions.double().numpy(), knots, t_max) for sample in samples])
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_directions_are_units_and_those_of_the_step() -> None:
    objective, other = tiny_lejepa(), tiny_lejepa()
    torch.testing.assert_close(objective.directions.norm(dim=0), torch.ones(GIVEN.directions))
    before = objective.directions.clone()
    objective.before_step(4)
    assert not torch.equal(objective.directions, before)
    objective.before_step(3)
    assert torch.equal(objective.directions, before)
    assert torch.equal(other.directions, before)
    assert "directions" not in objective.state_dict()


def reference(objective: Lejepa, views: tuple[Tensor, ...], valid: Tensor) -> tuple[float, float]:
    """(prediction, SIGReg) of the readable images in numpy, from the backbone's features."""
    V = GIVEN.global_views + GIVEN.local_views
    features = torch.cat([objective.backbone(views[0]), objective.backbone(views[1], any_size=True)]).detach()
    x = features.view(V, len(valid), -1)[:, valid].flatten(0, 1).double().numpy()
    state = {name: value.double().numpy() for name, value in objective.projector.state_dict().items()}
    for i in range(2):
        x = x @ state[f"layers.{i}.weight"].T + state[f"layers.{i}.bias"]
        x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * state[f"norms.{i}.weight"] + state[f"norms.{i}.bias"]
        x = np.maximum(x, 0)
    x = x @ state["last.weight"].T + state["last.bias"]
    per_view = x.reshape(V, int(valid.sum()), -1)
    centre = per_view[: GIVEN.global_views].mean(0)
    errors = ((per_view - centre) ** 2).sum(2).mean(0)
    samples = per_view if objective.given.sigreg == "views" else [x]
    statistics = [epps_pulley(sample, objective.directions.double().numpy(), 17, 3.0) for sample in samples]
    return errors.sum() / len(valid), float(np.mean(statistics))


@pytest.mark.parametrize("kind", ["views", "pooled"])
@pytest.mark.parametrize("unreadable", [(), (2,), (0, 5)])
def test_the_loss_is_prediction_and_sigreg_of_readable_images(unreadable: tuple[int, ...], kind: str) -> None:
    found = step_of_tiny_lejepa(0, 1, unreadable, sigreg=kind)
    objective, views, facts = found["objective"], found["views"], found["facts"]
    prediction, normality = reference(objective, views, facts["valid"])
    assert float(found["values"]["prediction"]) == pytest.approx(prediction, rel=1e-4)
    assert float(found["values"]["sigreg"]) == pytest.approx(normality, rel=1e-4)
    assert float(found["loss"]) == pytest.approx(0.13 * prediction + 0.87 * normality, rel=1e-4)


@pytest.mark.parametrize("step", [step_of_tiny_lejepa, step_of_tiny_simclr])
def test_pixels_of_an_unreadable_image_change_nothing(step: Callable[..., dict[str, Any]]) -> None:
    one, other = step(0, 1, (2,)), step(0, 1, (2,), fill=200)
    torch.testing.assert_close(one["loss"], other["loss"])
    for name, gradient in one["gradients"].items():
        torch.testing.assert_close(gradient, other["gradients"][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("step", [step_of_tiny_lejepa, step_of_tiny_simclr])
def test_a_batch_without_a_readable_image_has_no_loss_and_no_gradient(step: Callable[..., dict[str, Any]]) -> None:
    found = step(0, 1, tuple(range(8)))
    assert float(found["loss"]) == 0
    assert not any(gradient.any() for gradient in found["gradients"].values())


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    message = r"in 8 micro-batches: train.global_batch = 4096 on 8 ranks is 512 each, .* Use train.micro_batch=512"
    with pytest.raises(UserError, match=message):
        cut_batch(config(), 8)
    assert cut_batch(config("train.micro_batch=512"), 8) == (1, 512)
    for setting, message in (
        ("augment.crop=none", "needs random crops"),
        ("objective.local_size=90", "16 pixels"),
        ("objective={global_views: 1, local_views: 0}", "no view to predict"),
        ("augment.mixup=0.2", "predicts no classes"),
    ):
        with pytest.raises(UserError, match=message):
            objectives.check(config(setting))


def test_a_collapse_is_said() -> None:
    assert "objective.weight" in tiny_lejepa().collapse({"embedding_std": 0.01})
    assert not tiny_lejepa().collapse({"embedding_std": 0.5})
